"""Mistral: Llama's weights. Its sliding window is full attention up to the window's length."""

from puzzle_align.layout.families import Family

FAMILY = Family(
    model_type="mistral",
    architecture="Mistral",
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    own_keys=("sliding_window",),
)
