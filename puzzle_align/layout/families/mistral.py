"""Mistral: Llama's weights. (Its sliding window is full attention up to the window's length.)"""

from puzzle_align.layout import rules
from puzzle_align.layout.family import Family

FAMILY = Family(
    model_type="mistral",
    architecture="Mistral",
    layer_rules=(
        rules.INPUT_NORM,
        rules.QKV_WEIGHT,
        rules.ATTENTION_OUTPUT,
        rules.MLP_NORM,
        rules.GATE_UP,
        rules.DOWN,
    ),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    own_keys=("sliding_window",),
)
