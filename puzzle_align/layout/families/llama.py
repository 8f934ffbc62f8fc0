"""Llama 2 and 3: no biases, no norms inside attention."""

from puzzle_align.layout.families import Family

FAMILY = Family(
    model_type="llama",
    architecture="Llama",
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)
