"""Schedules of one model: forward-only, 1F1B and interleaved 1F1B (``registry`` names them).

All give compute actions only, one list per pipeline rank; ``lowering`` adds sends and receives.
P pipeline ranks, M microbatches, V chunks per rank. With V > 1 microbatches go in groups of P: a
group passes chunk 0 of all ranks, then chunk 1, and so on, before the next group starts.
"""

from collections.abc import Sequence

from puzzle_align.schedules.actions import Action, Kind

_Step = tuple[str, int, int]  # (model, microbatch, chunk)


def forward_only(
    model: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1
) -> list[list[Action]]:
    """Forwards only, for any M, in the same order on every rank."""
    _check_sizes(num_ranks, num_microbatches, num_chunks)
    order = _chunk_order(model, num_ranks, num_microbatches, num_chunks)
    forwards = _actions(Kind.FORWARD, order)
    return [list(forwards) for _ in range(num_ranks)]


def one_f_one_b(
    model: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1
) -> list[list[Action]]:
    """1F1B: rank p keeps at most ``min(M, P - p)`` activations; V is 1."""
    _check_sizes(num_ranks, num_microbatches, num_chunks)
    assert num_chunks == 1, "1F1B of several chunks is ``interleaved``"
    return one_f_one_b_of([(model, number) for number in range(num_microbatches)], num_ranks)


def one_f_one_b_of(sequence: Sequence[tuple[str, int]], num_ranks: int) -> list[list[Action]]:
    """1F1B over ``(model, microbatch)`` pairs, as if they were one model's microbatches."""
    order = [(model, microbatch, 0) for model, microbatch in sequence]
    both = _actions(Kind.FORWARD, order), _actions(Kind.BACKWARD, order)
    return [_alternate(*both, num_warmup=num_ranks - rank - 1) for rank in range(num_ranks)]


def interleaved(
    model: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> list[list[Action]]:
    """Megatron's interleaved 1F1B for V >= 2; ValueError unless P divides M."""
    _check_sizes(num_ranks, num_microbatches, num_chunks)
    if num_chunks < 2:
        raise ValueError(f"interleaved 1F1B of {num_chunks} chunk a rank; take 2 or more, or 1F1B")
    if num_microbatches % num_ranks:
        raise ValueError(
            f"interleaved 1F1B of {num_microbatches} microbatches on {num_ranks} pipeline ranks;"
            " take a multiple of the ranks, or 1 chunk a rank"
        )
    forwards = _chunk_order(model, num_ranks, num_microbatches, num_chunks)
    backwards = [(model, number, num_chunks - 1 - chunk) for model, number, chunk in forwards]
    both = _actions(Kind.FORWARD, forwards), _actions(Kind.BACKWARD, backwards)
    # The first backward needs the first group's last chunk, so the chunks before it come first.
    # Each rank nearer the start waits one hop there and one back longer, so it runs two more.
    lead = (num_chunks - 1) * num_ranks
    return [
        _alternate(*both, num_warmup=lead + 2 * (num_ranks - rank - 1)) for rank in range(num_ranks)
    ]


def _chunk_order(model: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[_Step]:
    """Order of a rank's forwards; the last group may be smaller than P."""
    if num_chunks == 1:
        return [(model, microbatch, 0) for microbatch in range(num_microbatches)]
    order = []
    for first in range(0, num_microbatches, num_ranks):
        group = range(first, min(first + num_ranks, num_microbatches))
        order += [(model, number, chunk) for chunk in range(num_chunks) for number in group]
    return order


def _actions(kind: Kind, steps: Sequence[_Step]) -> list[Action]:
    """The actions of steps, made once for all ranks."""
    return [Action(model, kind, microbatch, chunk) for model, microbatch, chunk in steps]


def _alternate(forwards: list[Action], backwards: list[Action], *, num_warmup: int) -> list[Action]:
    """``num_warmup`` forwards, then forward and backward in turn, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    actions = forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        actions += pair
    return actions + backwards[len(forwards) - num_warmup :]


def _check_sizes(num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    assert num_ranks >= 1 and num_microbatches >= 1 and num_chunks >= 1
