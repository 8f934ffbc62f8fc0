"""Llama 2 and 3: no biases, no norms inside attention."""

from puzzle_align.models import weight_map as rules

LAYER_RULES = (
    rules.INPUT_NORM,
    rules.QKV_WEIGHT,
    rules.ATTENTION_OUTPUT,
    rules.MLP_NORM,
    rules.GATE_UP,
    rules.DOWN,
)
