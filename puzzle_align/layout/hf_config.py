"""Hugging Face's ``config.json``: read into a model's dimensions, and written from them."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from puzzle_align.files.json_file import read_object
from puzzle_align.files.messages import quoted, shown
from puzzle_align.files.typed import Kind, either, kind_of, list_of, only, real, table, whole
from puzzle_align.layout.families import FAMILIES, Family
from puzzle_align.layout.model import Head, ModelSpec, RopeScaling, rotary_channels

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
    "max_position_embeddings",
)
_TOKEN_ID = whole(-1, 2**31 - 1)  # some older files write -1 for none
_ROTARY_SHARE = "partial_rotary_factor"
_LAYERS, _WIDTH, _HEADS, _POSITIONS = (whole(1, 2**bits) for bits in (12, 20, 14, 40))
_ROPE = {
    "rope_type": only("default", "llama3"),
    "type": only("default", "llama3"),
    "rope_theta": real(1, 1e15),
    "factor": real(1, 1e6),
    "low_freq_factor": real(1e-6, 1e6),
    "high_freq_factor": real(1e-6, 1e6),
    "original_max_position_embeddings": _POSITIONS,
    # Rotary settings by kind of layer are not supported.
    "full_attention": only(),
    "sliding_attention": only(),
}
# Keys that are read in every family; ``_table`` adds keys whose values depend on the family.
# ``only`` lists supported values of keys that would change the computation.
_KEYS: dict[str, Kind] = {
    "architectures": kind_of(list[str]),
    "num_labels": whole(0, 2**31),
    "id2label": table({}),
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEADS,
    "vocab_size": whole(1, 2**24),
    "max_position_embeddings": _POSITIONS,
    "sliding_window": _POSITIONS,
    "rms_norm_eps": real(1e-30, 1),
    "initializer_range": real(1e-30, 1e3),
    "rope_theta": real(1, 1e15),
    "tie_word_embeddings": kind_of(bool),
    "bos_token_id": _TOKEN_ID,
    "eos_token_id": either(_TOKEN_ID, list_of(_TOKEN_ID)),
    "pad_token_id": _TOKEN_ID,
    "mlp_bias": only(False),
    "use_sliding_window": only(False),
    "layer_types": list_of(only("full_attention")),
    "num_experts": only(0),
    "num_local_experts": only(0),
    "quantization_config": only(),
    "is_causal": only(True),
    "per_layer_config": only(),
}


def read_hf_config(directory: str | Path) -> dict[str, Any]:
    """Read the ``config.json`` of a Hugging Face directory; ValueError if it is not an object."""
    return read_object(Path(directory) / "config.json", "give a Hugging Face model's directory")


def from_hf_config(config: Mapping[str, Any], where: str) -> ModelSpec:
    """Convert a ``config.json``, as transformers 4 or 5 writes it.

    Types and ranges of all values are checked here, and need no checks elsewhere.

    Args:
        config: the parsed JSON object.
        where: its name in errors: a path, or the config key with the inline model.

    Raises:
        ValueError: one line with ``where``, the key and its value, if it is not supported.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}: {quoted(config)} must be a mapping, as in a config.json")
    model_type = config.get("model_type")
    if type(model_type) is not str or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(
            f"{where}: model_type={quoted(model_type)} is not supported: use one of {known}"
        )
    family = FAMILIES[model_type]
    _table(family).read(config, where)
    present = {key: value for key, value in config.items() if value is not None}
    # An explicit null means "none", not the family's default.
    present |= {key: value for key, value in family.defaults.items() if key not in config}
    for key in ("rope_scaling", "rope_parameters"):
        share = present.get(key, {}).get(_ROTARY_SHARE)
        present |= {} if share is None else {_ROTARY_SHARE: share}
    for key in _REQUIRED:
        if key not in present:
            raise ValueError(f"{where}: {key} is missing: give it as a positive integer")
    spec = _build_spec(present, family, where)
    _check_sizes(spec, len(present.get("layer_types", range(spec.num_hidden_layers))), where)
    return spec


def _table(family: Family) -> Kind:
    """Allowed values of the keys in a family's ``config.json``."""
    kinds: dict[str, Kind] = {
        # A family with the bias ignores the key.
        "attention_bias": only(*{family.attention_bias, False}),
        "hidden_act": only(*family.activations),
        _ROTARY_SHARE: only(1.0, 1),
        **family.kinds,
    }
    rope = table({**_ROPE, _ROTARY_SHARE: kinds[_ROTARY_SHARE]})
    return table({**_KEYS, "rope_scaling": rope, "rope_parameters": rope, **kinds})


def _build_spec(config: Mapping[str, Any], family: Family, where: str) -> ModelSpec:
    heads = config["num_attention_heads"]
    if "head_dim" not in config and config["hidden_size"] % heads:
        raise ValueError(
            f"{where}: num_attention_heads={heads} does not divide"
            f" hidden_size={config['hidden_size']}: give head_dim"
        )
    theta, scaling = _rope(config, where)
    head = _head(config, where)
    eos = config.get("eos_token_id")
    traits: dict[str, Any] = {key: config[key] for key in family.own_keys if key in config}
    traits |= family.traits(config)
    return ModelSpec(
        model_type=family.model_type,
        **{key: config[key] for key in _REQUIRED},
        num_key_value_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=head == "lm" and config.get("tie_word_embeddings", False),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        initializer_range=float(config.get("initializer_range", 0.02)),
        head=head,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=config.get("pad_token_id"),
        activation=family.activations[config.get("hidden_act", family.hidden_act)],
        **traits,
    )


def _check_sizes(spec: ModelSpec, num_layer_types: int, where: str) -> None:
    """Raise a ValueError unless the sizes fit each other."""
    heads, groups = spec.num_attention_heads, spec.num_key_value_heads
    if heads % groups:
        raise ValueError(
            f"{where}: num_key_value_heads={groups} does not divide num_attention_heads={heads}"
        )
    if spec.head_dim % 2:
        raise ValueError(
            f"{where}: head_dim={spec.head_dim} is odd: rotary embeddings turn pairs of numbers"
        )
    if rotary_channels(spec) % 2 or not rotary_channels(spec):
        raise ValueError(
            f"{where}: {_ROTARY_SHARE}={spec.partial_rotary_factor} turns {rotary_channels(spec)}"
            f" of head_dim={spec.head_dim}: rotary embeddings turn pairs of numbers"
        )
    if num_layer_types != spec.num_hidden_layers:
        raise ValueError(
            f"{where}: layer_types names {num_layer_types} layers, num_hidden_layers is"
            f" {spec.num_hidden_layers}"
        )


def _head(config: Mapping[str, Any], where: str) -> Head:
    """Head of the model: scalar for a sequence classifier (of one label only), else lm."""
    ending = _ARCHITECTURE_ENDINGS["scalar"]
    if not any(name.endswith(ending) for name in config.get("architectures", ())):
        return "lm"
    # transformers writes the labels' names instead, and omits them if there are two.
    labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))
    if labels != 1:
        raise ValueError(
            f"{where}: num_labels={shown(labels)} is not supported: only 1 (a reward) is"
        )
    return "scalar"


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from ``rope_parameters`` or ``rope_theta`` and ``rope_scaling``."""
    keys = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    ropes = [_rope_of(config, key, where) for key in keys]
    if not ropes:
        return float(config.get("rope_theta", 10000.0)), None
    if ropes[0] != ropes[-1]:
        raise ValueError(f"{where}: {' and '.join(keys)} say different things: remove one")
    return ropes[0]


def _rope_of(config: Mapping[str, Any], key: str, where: str) -> tuple[float, RopeScaling | None]:
    rope = {name: value for name, value in config[key].items() if value is not None}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None and (others := [name for name in rope if name != "rope_theta"]):
        raise ValueError(
            f"{where}: {key}.{shown(others[0])} is given, but no rope_type: write llama3 for its"
            " scaling, or default for none"
        )
    if kind in (None, "default"):
        return theta, None
    names = [field.name for field in fields(RopeScaling)]
    for name in names:
        if name not in rope:
            raise ValueError(f"{where}: {key}.{name} is missing: give it as a positive number")
    scaling = RopeScaling(**{name: rope[name] for name in names})
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ValueError(
            f"{where}: {key}.high_freq_factor={scaling.high_freq_factor} must be larger than "
            f"low_freq_factor={scaling.low_freq_factor}"
        )
    return theta, scaling


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` of ``spec``, with rope settings under the old and the new keys."""
    family = FAMILIES[spec.model_type]
    config: dict[str, Any] = {
        "architectures": [family.architecture + _ARCHITECTURE_ENDINGS[spec.head]],
        "model_type": spec.model_type,
        "hidden_act": family.hidden_act,
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
        # Written even if null: an absent key means the family's default.
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
    if spec.partial_rotary_factor != 1:
        config["rope_parameters"][_ROTARY_SHARE] = spec.partial_rotary_factor
    if spec.head == "scalar":
        config |= {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return config | {key: getattr(spec, key) for key in family.own_keys}
