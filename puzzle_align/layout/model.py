"""Model dimensions under the names of Hugging Face's ``config.json``, and counts from them.

Counts are of one whole model, independent of its plan; vocabulary padding is not counted.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from puzzle_align.layout.attention import AttentionBackend

Dtype = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
Fp8Format = Literal["hybrid", "e4m3"]
Fp8Recipe = Literal["tensorwise", "blockwise"]
Head = Literal["lm", "scalar"]  # next-token logits, or one number (a reward) at a token
Activation = Literal["silu", "gelu_tanh"]  # of the MLP's gate; GELU in its tanh approximation
# By FP8 recipe: a divisor of the tokens on a rank and of the layers' widths.
FP8_MULTIPLES: dict[Fp8Recipe, int] = {"tensorwise": 16, "blockwise": 128}
BYTES_PER_PARAMETER = {"fp32": 4, "bf16": 2}
PIECE_SIZE = 2**24  # elements of a weight that AdamW updates at once, if state is small or on hosts
VOCAB_MULTIPLE = 128  # vocabulary rows are padded to it under every plan, so checkpoints agree


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


# Linear layers of a layer that can have adapters, in order: PEFT's ``all-linear``.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters of a model (LoRA), with the names and meanings of PEFT's ``LoraConfig``.

    A target's output gets ``scaling * B A x``; ``A`` is ``[r, inputs]``, ``B`` ``[outputs, r]``.
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]  # of ``LORA_TARGETS``, in their order
    lora_dropout: float = 0.0  # of ``x``
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        """Factor of an adapter's output."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Architecture of a decoder-only transformer, with ``config.json``'s field names, normalised.

    Defaults are the most common choice; a family with another trait sets the field.
    """

    model_type: str  # one of layout.families
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
    sliding_window: int | None = None  # attention is full up to this length; longer rows: an error
    activation: Activation = "silu"
    norm_offset: Literal[0, 1] = 0  # norms multiply by offset + weight
    partial_rotary_factor: float = 1.0  # share of a head's channels that rotary embeddings rotate
    embedding_multiplier: float = 1.0  # rounded to the weights' precision, as in Gemma
    attention_multiplier: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    residual_multiplier: float = 1.0  # of the outputs of attention and MLP
    logits_scaling: float = 1.0  # divides the logits
    initializer_range: float = 0.02
    head: Head = "lm"
    lora: LoraSpec | None = None  # adapters; only they, and a scalar head, are trained
    # For generation from the exported model; training does not read them.
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fusions:
    """Fused operations of a layer, by Megatron's names; CUDA only."""

    apply_rope_fusion: bool = False  # needs Transformer Engine
    bias_activation_fusion: bool = False  # the gated activation, by Transformer Engine or compiled
    gradient_accumulation_fusion: bool = False  # needs Transformer Engine's layers


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a model's computation that leave its architecture unchanged."""

    dtype: Dtype = "fp32"
    attention: AttentionBackend = "segments"
    transformer_impl: Literal["local", "te"] = "local"
    fusions: Fusions = Fusions()
    fp8: Fp8Format | None = None  # of the layers' matrix products
    fp8_recipe: Fp8Recipe = "tensorwise"
    recompute: Recompute = "none"
    logprob_chunk_size: int = 1024  # predicted tokens whose logits are in memory at once


def with_scalar_head(spec: ModelSpec) -> ModelSpec:
    """The model with a scalar head instead of logits, and so without output embeddings."""
    return replace(spec, head="scalar", tie_word_embeddings=False)


def without_adapters(spec: ModelSpec) -> ModelSpec:
    """The base: the model without its adapters."""
    return replace(spec, lora=None)


def traits(spec: ModelSpec) -> tuple[object, ...]:
    """Traits that affect the costs of a layer, beside its sizes."""
    return (
        spec.attention_bias,
        spec.qk_norm,
        spec.activation,
        spec.norm_offset,
        spec.partial_rotary_factor,
        spec.embedding_multiplier != 1,
        spec.residual_multiplier != 1,
        spec.logits_scaling != 1,
        spec.lora,
    )


def rotary_channels(spec: ModelSpec) -> int:
    """Number of a head's channels, counted from the first, that rotary embeddings rotate."""
    return int(spec.head_dim * spec.partial_rotary_factor)


def padded_vocab_size(spec: ModelSpec) -> int:
    """Stored vocabulary rows; rows from ``spec.vocab_size`` on are zero and unused."""
    return -(-spec.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def layer_matmul_parameters(spec: ModelSpec) -> int:
    """Weights of one layer's matrices."""
    query = spec.num_attention_heads * spec.head_dim
    key_value = 2 * spec.num_key_value_heads * spec.head_dim
    attention = (query + key_value) * spec.hidden_size + spec.hidden_size * query
    return attention + 3 * spec.hidden_size * spec.intermediate_size


def output_width(spec: ModelSpec) -> int:
    """Outputs of the head for a token: a logit for each vocabulary row, or one number."""
    return 1 if spec.head == "scalar" else spec.vocab_size
