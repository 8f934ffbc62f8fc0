"""Qwen3: RMSNorm on every query and key head, no biases, an explicit head size."""

from puzzle_align.layout import rules
from puzzle_align.layout.families import Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3",
    layer_rules=(
        rules.INPUT_NORM,
        rules.QKV_WEIGHT,
        rules.Q_NORM,
        rules.K_NORM,
        rules.ATTENTION_OUTPUT,
        rules.MLP_NORM,
        rules.GATE_UP,
        rules.DOWN,
    ),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
)
