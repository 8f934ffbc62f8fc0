"""Device, precision and kernels."""

from dataclasses import dataclass
from typing import Literal

from puzzle_align.config.schema import key

Switch = bool | Literal["auto"]
FUSIONS = ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Device, precision and kernels, the same for every model."""

    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = key("auto", "auto: bf16 on cuda, fp32 on cpu", choices=("auto", "fp32", "bf16"))
    attention: str = key(
        "auto",
        "auto: on cuda the fastest, measured at start (planned for as flex); on cpu segments",
        choices=("auto", "varlen", "flex", "flex_flash", "dense", "segments"),
    )
    transformer_impl: str = key(
        "auto", "auto: te where Transformer Engine imports", choices=("auto", "te", "local")
    )
    apply_rope_fusion: Switch = key(
        "auto", "rotary embedding in one kernel, Transformer Engine's; auto: where te is used"
    )
    bias_activation_fusion: Switch = key(
        "auto", "SwiGLU in one kernel, compiled for cuda; auto: where te is used"
    )
    gradient_accumulation_fusion: Switch = key(
        "auto", "weight gradients added up by the product that makes them; auto: where te is used"
    )
    logprob_chunk_size: int = key(
        1024, "predictions whose logits exist at once", unit="tokens", at_least=1
    )
    distributed_timeout: float = key(
        600.0,
        "a collective that takes longer ends the job (not what models of stage ppo wait for each "
        "other)",
        unit="s",
        above=0,
    )
