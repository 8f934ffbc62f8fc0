"""A tensor rank's part of a model as a model of its own, which can be measured alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from puzzle_align.layout.divisibility import cut_problems
from puzzle_align.layout.model import ModelSpec, padded_vocab_size
from puzzle_align.layout.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One of ``tensor`` ranks' part: heads, MLP and vocabulary divided, the rest as it is.

    Without what the ranks say to each other, and with a head of its own where the model's is tied:
    that computes the same.
    """

    spec: ModelSpec
    tensor: int
    vocab_rows: int  # of the embedding and of the head


def tensor_shard(model: ModelSpec, tensor: int, num_layers: int) -> Shard:
    """The part of the first of ``tensor`` ranks, of so many layers. ``shard_problems`` has none."""
    rows = padded_vocab_size(model) // tensor
    spec = replace(
        model,
        num_hidden_layers=num_layers,
        num_attention_heads=model.num_attention_heads // tensor,
        num_key_value_heads=model.num_key_value_heads // tensor,
        intermediate_size=model.intermediate_size // tensor,
        vocab_size=min(model.vocab_size, rows),
        tie_word_embeddings=False,
    )
    return Shard(spec=spec, tensor=tensor, vocab_rows=rows)


def shard_problems(model: ModelSpec, tensor: int, where: str, name: str) -> Iterator[str]:
    """Why ``tensor`` ranks cannot share a model, a line each; ``where`` is what they call them."""
    whole = replace(model, num_hidden_layers=1)
    yield from cut_problems(whole, ParallelPlan(tensor=tensor), where, name)
