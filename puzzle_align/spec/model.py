"""Model dimensions, in the words of Hugging Face's ``config.json``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Field names are those of ``config.json``, normalised."""

    model_type: str  # llama | mistral | qwen2 | qwen3
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # bias on q, k, v (Qwen2)
    qk_norm: bool = False  # RMSNorm on q and k heads (Qwen3)
    sliding_window: int | None = None
    initializer_range: float = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is computed (not what it is)."""

    dtype: str = "fp32"  # fp32 | bf16
    attention: str = "segments"  # flex | dense | segments
    transformer_impl: str = "local"  # local | te
    recompute: str = "none"  # none | selective | full
    logprob_chunk_size: int = 1024  # predicted tokens whose logits exist at once
