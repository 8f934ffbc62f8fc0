"""What makes a model family: all that ``model_type`` alone says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from puzzle_align.layout.rules import K_NORM, Q_NORM, QKV_BIAS, Rule


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's weights, and what its ``config.json`` leaves unsaid or has of its own."""

    model_type: str
    architecture: str  # what its class names begin with in transformers
    layer_rules: tuple[Rule, ...]  # of one layer's weights, in the order of files
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that may be left out
    own_keys: tuple[str, ...] = ()  # further keys that are read and written, fields of ModelSpec

    @property
    def attention_bias(self) -> bool:
        """Whether query, key and value have a bias."""
        return QKV_BIAS in self.layer_rules

    @property
    def qk_norm(self) -> bool:
        """Whether every query and key head is normed."""
        return Q_NORM in self.layer_rules and K_NORM in self.layer_rules
