"""The models of tests: tiny, but for those whose published sizes are what is tested.

A test that wants another writes ``replace(...)``; shapes that numbers are worked out from stay.
"""

from dataclasses import replace
from typing import Any

from puzzle_align.layout.model import ModelSpec

# Small enough to do on paper: H = 8, q = 4 * 2 = 8, k and v = 2 * 2 = 4, F = 16.
PAPER = ModelSpec(
    model_type="llama",
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=128,
    max_position_embeddings=64,
)
# A usual model, to be run: uneven vocabulary, weights large enough that mistakes are seen.
LLAMA = replace(
    PAPER,
    hidden_size=32,
    intermediate_size=64,
    head_dim=8,
    vocab_size=97,
    max_position_embeddings=128,
    initializer_range=0.3,
)
# As long rows as LLAMA's, with what it has not: a tied head, norms of queries and keys, wide heads.
TIED = replace(LLAMA, model_type="qwen3", head_dim=16, tie_word_embeddings=True, qk_norm=True)
# The quickest to train, tied, with biases (which do not decay); two tensor ranks can share it.
TINY = ModelSpec(
    model_type="qwen2",
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    max_position_embeddings=32,
    attention_bias=True,
    tie_word_embeddings=True,
)
# For eight tensor ranks; of the vocabulary's 256 rows the last ones of these have none.
MANY_HEADS = ModelSpec(
    model_type="qwen2",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=2,
    vocab_size=150,
    max_position_embeddings=64,
    attention_bias=True,
)

# Published ones, whose parameters are counted.
LLAMA_2_7B = ModelSpec(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=4096,
)
MISTRAL_7B = replace(
    LLAMA_2_7B, model_type="mistral", intermediate_size=14336, num_key_value_heads=8
)
QWEN3_0_6B = ModelSpec(
    model_type="qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
    qk_norm=True,
)

# ``model.config`` of a sound job, for byte tokens.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 8192,
}


def hf_llama(vocab_size: int, **changes: Any) -> Any:
    """Config of a tiny Llama, for transformers to make."""
    from transformers import LlamaConfig

    sizes = {name: CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads")}
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"vocab_size": vocab_size, "max_position_embeddings": 128, "initializer_range": 0.2}
    return LlamaConfig(**{**sizes, **changes})
