"""Gemma, first generation: norms of 1 + w, scaled embeddings, GeGLU, an explicit head size."""

from math import sqrt

from puzzle_align.files.typed import only
from puzzle_align.layout.families import Family

FAMILY = Family(
    model_type="gemma",
    architecture="Gemma",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    kinds={
        "hidden_activation": only("gelu_pytorch_tanh"),
        "use_bidirectional_attention": only(False),
    },
    # "gelu" in the first published files means the tanh approximation.
    activations={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"},
    traits=lambda config: {
        "norm_offset": 1,
        "embedding_multiplier": sqrt(config["hidden_size"]),
    },
)
