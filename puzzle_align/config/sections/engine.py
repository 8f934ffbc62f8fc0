"""Device, precision and kernels."""

from dataclasses import dataclass, fields
from typing import Literal

from puzzle_align.config.schema import LONGEST_WAIT, key
from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.model import Dtype, Fp8Format, Fp8Recipe, Fusions

Switch = bool | Literal["auto"]
FUSIONS = tuple(field.name for field in fields(Fusions))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Device, precision and kernels, the same for every model."""

    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    dtype: Literal["auto", Dtype] = key("auto", "auto: bf16 on cuda, fp32 on cpu")
    attention: str = key(
        "auto",
        "auto: on cuda the fastest, measured at start (planned for as flex); on cpu segments",
        choices=("auto", *BACKENDS),
    )
    flash_attention: str = key(
        "auto",
        "kernels of attention=varlen; auto: FlashAttention 3 or 4 where it imports, else torch's 2",
        choices=("auto", "fa2", "fa3", "fa4"),
    )
    transformer_impl: Literal["auto", "te", "local"] = key(
        "auto", "auto: te where Transformer Engine imports"
    )
    apply_rope_fusion: Switch = key(
        "auto", "rotary embedding in one kernel, Transformer Engine's; auto: where te is used"
    )
    bias_activation_fusion: Switch = key(
        "auto", "the gated activation in one kernel, compiled for cuda; auto: where te is used"
    )
    gradient_accumulation_fusion: Switch = key(
        "auto", "weight gradients added up by the product that makes them; auto: where te is used"
    )
    fp8: Fp8Format | None = key(
        None, "products of layers in FP8: hybrid (gradients e5m2) or e4m3; null: in dtype"
    )
    # Both take their scales from the numbers at hand. Delayed scaling's are of the steps before,
    # which checkpoints do not hold: a resumed run would not go on as it was.
    fp8_recipe: Fp8Recipe = key("tensorwise", "one scale a tensor, or a block of 128")
    fp8_roles: str | list[str] | None = key(
        None,
        "the model, or a list of those, whose layers are in FP8; null: the one a stage is about",
        choices=("actor", "critic", "reference", "reward"),
    )
    logprob_chunk_size: int = key(
        1024, "predictions whose logits exist at once", unit="tokens", at_least=1
    )
    distributed_timeout: float = key(
        600.0,
        "a rank that is stopped, or does nothing new while others wait for it, ends the job",
        unit="s",
        above=0,
        at_most=LONGEST_WAIT,
    )
