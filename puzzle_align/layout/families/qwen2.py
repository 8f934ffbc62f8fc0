"""Qwen2 and Qwen2.5: a bias on query, key and value only."""

from puzzle_align.layout import rules
from puzzle_align.layout.families import Family

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2",
    layer_rules=(
        rules.INPUT_NORM,
        rules.QKV_WEIGHT,
        rules.QKV_BIAS,
        rules.ATTENTION_OUTPUT,
        rules.MLP_NORM,
        rules.GATE_UP,
        rules.DOWN,
    ),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
)
