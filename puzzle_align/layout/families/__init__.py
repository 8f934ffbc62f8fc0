"""Model families, one file each: a new one is a new file with a ``FAMILY``, and nothing else.

A family's file says what ``model_type`` alone tells: its weights, what its ``config.json`` leaves
out, and the traits (fields of ``ModelSpec``) in which it differs from the others.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from puzzle_align.files.typed import Kind
from puzzle_align.layout.model import Activation
from puzzle_align.layout.rules import K_NORM, Q_NORM, QKV_BIAS, Rule


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's weights, traits and keys of ``config.json``."""

    model_type: str
    architecture: str  # what its class names begin with in transformers
    has_classifier: bool = True  # whether transformers has a sequence classifier of it
    layer_rules: tuple[Rule, ...]  # of one layer's weights, in the order of files
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be left out
    own_keys: tuple[str, ...] = ()  # further keys that are read and written, fields of ModelSpec
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # of keys that others do not have
    # By ``hidden_act``; the first is written.
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu"})
    # Further fields of ModelSpec, which follow from the config without a key of their own.
    traits: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _config: {}

    @property
    def attention_bias(self) -> bool:
        """Whether query, key and value have a bias."""
        return QKV_BIAS in self.layer_rules

    @property
    def qk_norm(self) -> bool:
        """Whether every query and key head is normed."""
        return Q_NORM in self.layer_rules and K_NORM in self.layer_rules

    @property
    def hidden_act(self) -> str:
        """How ``config.json`` names the activation when it is written."""
        return next(iter(self.activations))


def _families() -> dict[str, Family]:
    """Every file's family by its ``model_type``, in order of names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = (import_module(f"{__name__}.{name}").FAMILY for name in names)
    return {family.model_type: family for family in families}


FAMILIES = _families()
