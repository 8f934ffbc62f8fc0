"""Device, precision and kernels."""

from dataclasses import dataclass, fields
from typing import Literal

from puzzle_align.config.schema import LONGEST_WAIT, key
from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.model import Dtype, Fp8Format, Fp8Recipe, Fusions
from puzzle_align.layout.plan import MOST_RANKS

Switch = bool | Literal["auto"]
FUSIONS = tuple(field.name for field in fields(Fusions))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Device, precision and kernels, the same for every model."""

    device: str = key(
        "auto",
        "device of all ranks; auto: cuda if there is one, else cpu",
        choices=("auto", "cpu", "cuda"),
    )
    world_size: int | None = key(
        None,
        "ranks that --validate and inspect assume; a run has torchrun's; null: the fewest it needs",
        at_least=1,
        at_most=MOST_RANKS,
    )
    dtype: Literal["auto", Dtype] = key(
        "auto", "precision of weights and activations; auto: bf16 on cuda, fp32 on cpu"
    )
    attention: str = key(
        "auto",
        "backend; auto: on cuda the fastest, measured at start (plans: flex), on cpu segments",
        choices=("auto", *BACKENDS),
    )
    flash_attention: str = key(
        "auto",
        "FlashAttention for attention=varlen; auto: 3 or 4 if it can be imported, else torch's 2",
        choices=("auto", "fa2", "fa3", "fa4"),
    )
    transformer_impl: Literal["auto", "te", "local"] = key(
        "auto", "layers of Transformer Engine or Megatron; auto: te if it can be imported"
    )
    apply_rope_fusion: Switch = key(
        "auto", "rotary embedding in one kernel of Transformer Engine; auto: if layers are te"
    )
    bias_activation_fusion: Switch = key(
        "auto",
        "gated activation in one kernel, Transformer Engine's or compiled; auto: if layers are te",
    )
    gradient_accumulation_fusion: Switch = key(
        "auto", "matrix products add to the weight gradients themselves; auto: if layers are te"
    )
    fp8: Fp8Format | None = key(
        None, "matrix products of layers in FP8: e4m3, or hybrid: gradients in e5m2; null: in dtype"
    )
    # Both compute scales from the current tensor. Delayed scaling uses a history of earlier steps
    # that checkpoints do not hold: a resumed run would differ from an uninterrupted one.
    fp8_recipe: Fp8Recipe = key(
        "tensorwise", "scaling of FP8: one scale for a tensor, or for a block of 128"
    )
    fp8_roles: str | list[str] | None = key(
        None,
        "models whose layers are in FP8, one or a list; null: the one that the stage is about",
        choices=("actor", "critic", "reference", "reward"),
    )
    logprob_chunk_size: int = key(
        1024, "positions whose logits exist at the same time", unit="tokens", at_least=1
    )
    distributed_timeout: float = key(
        600.0,
        "a rank that makes no progress for so long while others wait for it ends the job",
        unit="s",
        at_least=1,  # less is up before ranks have met
        at_most=LONGEST_WAIT,
    )
