"""Qwen2 and Qwen2.5: a bias on query, key and value, and on nothing else."""

from puzzle_align.models import weight_map as rules

LAYER_RULES = (
    rules.INPUT_NORM,
    rules.QKV_WEIGHT,
    rules.QKV_BIAS,
    rules.ATTENTION_OUTPUT,
    rules.MLP_NORM,
    rules.GATE_UP,
    rules.DOWN,
)
