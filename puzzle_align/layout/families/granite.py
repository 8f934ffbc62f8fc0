"""Granite: Llama's weights, and four multipliers of its ``config.json``."""

from puzzle_align.files.typed import real
from puzzle_align.layout.families import Family

_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)

FAMILY = Family(
    model_type="granite",
    architecture="Granite",
    has_classifier=False,
    defaults={
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(_MULTIPLIERS, 1.0),
    },
    kinds=dict.fromkeys(_MULTIPLIERS, real(1e-6, 1e6)),
    own_keys=_MULTIPLIERS,
)
