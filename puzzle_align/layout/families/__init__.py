"""Model families, one file each; a new family is a new file with a ``FAMILY``, and nothing else.

A family's file defines what follows from its ``model_type``: weights, defaults of ``config.json``,
and traits (fields of ``ModelSpec``).
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from puzzle_align.files.typed import Kind
from puzzle_align.layout.model import Activation
from puzzle_align.layout.rules import K_NORM, PLAIN_LAYER, Q_NORM, QKV_BIAS, Rule


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's weights, traits and keys of ``config.json``."""

    model_type: str
    architecture: str  # prefix of its class names in transformers
    has_classifier: bool = True  # whether transformers has its sequence classifier
    layer_rules: tuple[Rule, ...] = PLAIN_LAYER  # of one layer's weights, in files' order
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of optional keys
    own_keys: tuple[str, ...] = ()  # further keys to read and write, named as in ModelSpec
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # allowed values of further keys
    # By ``hidden_act``; exports write the first.
    activations: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu"})
    # Further fields of ModelSpec, computed from the config.
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
        """Name of the activation in exported ``config.json``."""
        return next(iter(self.activations))


def _families() -> dict[str, Family]:
    """Import all families; by ``model_type``, in order of file names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = (import_module(f"{__name__}.{name}").FAMILY for name in names)
    return {family.model_type: family for family in families}


FAMILIES = _families()
