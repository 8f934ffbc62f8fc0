"""Qwen3: RMSNorm on every query and key head, no biases, a head size of its own."""

from puzzle_align.models import weight_map as rules

LAYER_RULES = (
    rules.INPUT_NORM,
    rules.QKV_WEIGHT,
    rules.Q_NORM,
    rules.K_NORM,
    rules.ATTENTION_OUTPUT,
    rules.MLP_NORM,
    rules.GATE_UP,
    rules.DOWN,
)
