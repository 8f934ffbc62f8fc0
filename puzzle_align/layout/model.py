"""Model dimensions, in the words of Hugging Face's ``config.json``, and what follows from them.

Counts are of one whole model, whatever its plan; vocabulary padding is not counted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

AttentionBackend = Literal["flex", "dense", "segments"]
Head = Literal["lm", "scalar"]  # next-token logits, or one number (a reward) at a token
BYTES_PER_PARAMETER = {"fp32": 4, "bf16": 2}
VOCAB_MULTIPLE = 128  # vocabulary rows are padded to it under every plan: checkpoints are alike


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
    sliding_window: int | None = None  # attention is full up to this length; beyond is refused
    initializer_range: float = 0.02
    head: Head = "lm"
    # For whoever generates from the exported model; training does not read them.
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is computed (not what it is)."""

    dtype: str = "fp32"  # fp32 | bf16
    attention: AttentionBackend = "segments"
    transformer_impl: str = "local"  # local | te
    recompute: str = "none"  # none | selective | full
    logprob_chunk_size: int = 1024  # predicted tokens whose logits exist at once


@dataclass(frozen=True)
class FamilyTraits:
    """What ``model_type`` alone says about a model's ``config.json``."""

    architecture: str  # what its class names begin with in transformers
    attention_bias: bool = False
    qk_norm: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys a config.json may leave out


FAMILY_TRAITS = {
    "llama": FamilyTraits(
        "Llama",
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mistral": FamilyTraits(
        "Mistral",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen2": FamilyTraits(
        "Qwen2",
        attention_bias=True,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
    ),
    "qwen3": FamilyTraits(
        "Qwen3",
        qk_norm=True,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    ),
}

_ARCHITECTURE_ENDINGS: dict[Head, str] = {
    "lm": "ForCausalLM",
    "scalar": "ForSequenceClassification",
}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
# Keys that change the computation in ways that are not built: the only values that are accepted.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "quantization_config": (),
}


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face directory.

    Raises:
        ValueError: if it is not there or not a JSON object.
    """
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give a Hugging Face model's directory"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); save it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object; give a Hugging Face model's directory")
    return config


def from_hf_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Read the keys of a ``config.json``, as transformers 4 or 5 writes them.

    Args:
        config: the parsed JSON object.
        where: what error messages call it (a path, or the config key it was given inline under).

    Raises:
        ValueError: one line naming ``where``, the key and its value, for what is not supported.
    """
    family = config.get("model_type")
    if family not in FAMILY_TRAITS:
        known = ", ".join(FAMILY_TRAITS)
        raise ValueError(f"{where}: model_type={family!r} is not supported: use one of {known}")
    traits = FAMILY_TRAITS[family]
    # A family that has the bias has it whatever the key says.
    fixed = {**_FIXED, "attention_bias": (traits.attention_bias, False)}
    for key, accepted in fixed.items():
        value = config.get(key)
        if value is not None and value not in accepted:
            only = f"only {accepted[0]!r} is" if accepted else "remove it"
            raise ValueError(f"{where}: {key}={value!r} is not supported for {family}: {only}")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"{where}: layer_types={config['layer_types']!r} is not supported:"
            " only 'full_attention' is"
        )
    present = {key: value for key, value in config.items() if value is not None}
    # An explicit null means "none", not the family's default.
    present |= {key: value for key, value in traits.defaults.items() if key not in config}
    return _build_spec(present, family, traits, where)


def _build_spec(
    config: Mapping[str, Any], family: str, traits: FamilyTraits, where: str
) -> ModelSpec:
    sizes = {key: _positive_int(config, key, where) for key in _REQUIRED}
    heads = sizes["num_attention_heads"]
    groups = _positive_int(config, "num_key_value_heads", where, heads)
    if heads % groups:
        raise ValueError(
            f"{where}: num_key_value_heads={groups} does not divide num_attention_heads={heads}"
        )
    if "head_dim" not in config and sizes["hidden_size"] % heads:
        raise ValueError(
            f"{where}: num_attention_heads={heads} does not divide"
            f" hidden_size={sizes['hidden_size']}: give head_dim"
        )
    theta, scaling = _rope(config, where)
    head = _head(config, where)
    window = config.get("sliding_window") if family == "mistral" else None
    return ModelSpec(
        model_type=family,
        **sizes,
        num_key_value_heads=groups,
        head_dim=_positive_int(config, "head_dim", where, sizes["hidden_size"] // heads),
        max_position_embeddings=_positive_int(config, "max_position_embeddings", where),
        rms_norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=head == "lm" and bool(config.get("tie_word_embeddings", False)),
        attention_bias=traits.attention_bias,
        qk_norm=traits.qk_norm,
        sliding_window=window,
        initializer_range=_number(config, "initializer_range", where, 0.02),
        head=head,
        bos_token_id=_token_id(config, "bos_token_id", where),
        eos_token_id=_eos_token_ids(config, where),
        pad_token_id=_token_id(config, "pad_token_id", where),
    )


def _head(config: Mapping[str, Any], where: str) -> Head:
    """Scalar for a sequence classifier, which must have one label; else next-token logits."""
    ending = _ARCHITECTURE_ENDINGS["scalar"]
    if not any(str(name).endswith(ending) for name in config.get("architectures") or ()):
        return "lm"
    # transformers writes the labels' names, and two labels by leaving them out.
    labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))
    if labels != 1:
        raise ValueError(f"{where}: num_labels={labels!r} is not supported: only 1 (a reward) is")
    return "scalar"


def with_scalar_head(spec: ModelSpec) -> ModelSpec:
    """The model with one number at a token in place of logits: it has no output embeddings."""
    return replace(spec, head="scalar", tie_word_embeddings=False)


def _token_id(config: Mapping[str, Any], key: str, where: str) -> int | None:
    value = config.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= -1):
        return value  # some older files write -1 for none
    raise ValueError(f"{where}: {key}={value!r} must be a token id: a whole number, or null")


def _eos_token_ids(config: Mapping[str, Any], where: str) -> int | tuple[int, ...] | None:
    """One, or several of which any ends a text."""
    key = "eos_token_id"
    value = config.get(key)
    if not isinstance(value, list):
        return _token_id(config, key, where)
    ids = (_token_id({key: item}, key, where) for item in value)
    return tuple(token_id for token_id in ids if token_id is not None)


def _positive_int(
    config: Mapping[str, Any], key: str, where: str, default: int | None = None
) -> int:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"{where}: {key} is missing: give it as a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {key}={value!r} must be a positive integer")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"{where}: {key} is missing: give it as a positive number")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{where}: {key}={value!r} must be a positive number")
    return float(value)


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``."""
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{where}: {key}={rope!r} must be a mapping")
    theta = _number({**config, **rope}, "rope_theta", where, 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"{where}: {key}.rope_type={kind!r} is not supported: only 'default' and 'llama3' are"
        )
    return theta, RopeScaling(
        factor=_number(rope, "factor", f"{where}: {key}"),
        low_freq_factor=_number(rope, "low_freq_factor", f"{where}: {key}"),
        high_freq_factor=_number(rope, "high_freq_factor", f"{where}: {key}"),
        original_max_position_embeddings=_positive_int(
            rope, "original_max_position_embeddings", f"{where}: {key}"
        ),
    )


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` of ``spec``, with rope settings under the old and the new keys."""
    config: dict[str, Any] = {
        "architectures": [
            FAMILY_TRAITS[spec.model_type].architecture + _ARCHITECTURE_ENDINGS[spec.head]
        ],
        "model_type": spec.model_type,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tie_word_embeddings,
        "initializer_range": spec.initializer_range,
        # Also where null: an absent key means the family's default.
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
    }
    if isinstance(spec.eos_token_id, tuple):
        config["eos_token_id"] = list(spec.eos_token_id)
    if spec.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **vars(spec.rope_scaling)}
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {**scaling, "rope_theta": spec.rope_theta}
    if spec.head == "scalar":
        config |= {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    if spec.model_type == "mistral":
        config["sliding_window"] = spec.sliding_window
    return config


def padded_vocab_size(spec: ModelSpec) -> int:
    """Vocabulary rows that are stored; those from ``spec.vocab_size`` on are zero and unused."""
    return -(-spec.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def layer_matmul_parameters(spec: ModelSpec) -> int:
    """Weights of one layer's matrices."""
    query = spec.num_attention_heads * spec.head_dim
    key_value = 2 * spec.num_key_value_heads * spec.head_dim
    attention = (query + key_value) * spec.hidden_size + spec.hidden_size * query
    return attention + 3 * spec.hidden_size * spec.intermediate_size


def layer_parameters(spec: ModelSpec) -> int:
    """Parameters of one layer."""
    heads = spec.num_attention_heads + 2 * spec.num_key_value_heads
    biases = heads * spec.head_dim if spec.attention_bias else 0
    norms = 2 * spec.hidden_size + (2 * spec.head_dim if spec.qk_norm else 0)
    return layer_matmul_parameters(spec) + biases + norms


def num_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    table = spec.vocab_size * spec.hidden_size
    head = 0 if spec.tie_word_embeddings else output_width(spec) * spec.hidden_size
    ends = table + spec.hidden_size + head
    return spec.num_hidden_layers * layer_parameters(spec) + ends


def output_width(spec: ModelSpec) -> int:
    """Numbers that the head gives for a token: a logit a vocabulary row, or one."""
    return 1 if spec.head == "scalar" else spec.vocab_size
