"""Hugging Face's ``config.json``: read into a model's dimensions, and written from them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.family import Family
from puzzle_align.layout.model import Head, ModelSpec, RopeScaling

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
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{where}: model_type={model_type!r} is not supported: use one of {known}")
    family = FAMILIES[model_type]
    # A family that has the bias has it whatever the key says.
    fixed = {**_FIXED, "attention_bias": (family.attention_bias, False)}
    for key, accepted in fixed.items():
        value = config.get(key)
        if value is not None and value not in accepted:
            only = f"only {accepted[0]!r} is" if accepted else "remove it"
            raise ValueError(f"{where}: {key}={value!r} is not supported for {model_type}: {only}")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"{where}: layer_types={config['layer_types']!r} is not supported:"
            " only 'full_attention' is"
        )
    present = {key: value for key, value in config.items() if value is not None}
    # An explicit null means "none", not the family's default.
    present |= {key: value for key, value in family.defaults.items() if key not in config}
    return _build_spec(present, family, where)


def _build_spec(config: Mapping[str, Any], family: Family, where: str) -> ModelSpec:
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
    own: dict[str, Any] = {key: config.get(key) for key in family.own_keys}
    return ModelSpec(
        model_type=family.model_type,
        **sizes,
        num_key_value_heads=groups,
        head_dim=_positive_int(config, "head_dim", where, sizes["hidden_size"] // heads),
        max_position_embeddings=_positive_int(config, "max_position_embeddings", where),
        rms_norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=head == "lm" and bool(config.get("tie_word_embeddings", False)),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        initializer_range=_number(config, "initializer_range", where, 0.02),
        head=head,
        bos_token_id=_token_id(config, "bos_token_id", where),
        eos_token_id=_eos_token_ids(config, where),
        pad_token_id=_token_id(config, "pad_token_id", where),
        **own,
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
    family = FAMILIES[spec.model_type]
    config: dict[str, Any] = {
        "architectures": [family.architecture + _ARCHITECTURE_ENDINGS[spec.head]],
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
    return config | {key: getattr(spec, key) for key in family.own_keys}
