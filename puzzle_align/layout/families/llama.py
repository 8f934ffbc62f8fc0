"""Llama 2 and 3: no biases, no norms inside attention."""

from puzzle_align.layout import rules
from puzzle_align.layout.family import Family

FAMILY = Family(
    model_type="llama",
    architecture="Llama",
    layer_rules=(
        rules.INPUT_NORM,
        rules.QKV_WEIGHT,
        rules.ATTENTION_OUTPUT,
        rules.MLP_NORM,
        rules.GATE_UP,
        rules.DOWN,
    ),
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)
