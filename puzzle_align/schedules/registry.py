"""Schedules of one model: forward-only, 1F1B, interleaved 1F1B and GPipe, and their registry.

All give compute actions only, one list per pipeline rank; ``lowering`` adds sends and receives.
P pipeline ranks, M microbatches, V chunks per rank. With V > 1 microbatches go in groups of P: a
group passes chunk 0 of all ranks, then chunk 1, and so on, before the next group starts.

To add a schedule of the existing actions, write a function and a row of ``SCHEDULES``: configs,
checks, validation, time-sharing, memory and predictions read the row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from puzzle_align.schedules.actions import Action, Kind, Program

Lists = list[list[Action]]  # compute actions of every pipeline rank
_Step = tuple[str, int, int]  # (model, microbatch, chunk)


def forward_only(model: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Lists:
    """Forwards only, for any M, in the same order on every rank."""
    order = _chunk_order(model, num_ranks, num_microbatches, num_chunks)
    forwards = _actions(Kind.FORWARD, order)
    return [list(forwards) for _ in range(num_ranks)]


def one_f_one_b(model: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Lists:
    """1F1B: rank p keeps at most ``min(M, P - p)`` activations; V is 1."""
    assert num_chunks == 1, "1F1B of several chunks is ``interleaved``"
    return one_f_one_b_of([(model, number) for number in range(num_microbatches)], num_ranks)


def one_f_one_b_of(sequence: Sequence[tuple[str, int]], num_ranks: int) -> Lists:
    """1F1B over ``(model, microbatch)`` pairs, as if they were one model's microbatches."""
    order = [(model, microbatch, 0) for model, microbatch in sequence]
    both = _actions(Kind.FORWARD, order), _actions(Kind.BACKWARD, order)
    return [_alternate(*both, num_warmup=num_ranks - rank - 1) for rank in range(num_ranks)]


def interleaved(model: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Lists:
    """Megatron's interleaved 1F1B for V >= 2; ValueError unless P divides M."""
    assert num_chunks > 1, "interleaved 1F1B of one chunk is ``one_f_one_b``"
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


def gpipe(model: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Lists:
    """GPipe (Huang et al., 2019): all forwards, then all backwards; V is 1.

    Alone on a pipeline it takes as long as 1F1B, but every rank keeps the activations of all M
    microbatches. Backwards run in the order of the forwards, so gradients are summed as in 1F1B.
    """
    assert num_chunks == 1, "GPipe has one chunk a rank"
    order = _chunk_order(model, num_ranks, num_microbatches, num_chunks)
    actions = _actions(Kind.FORWARD, order) + _actions(Kind.BACKWARD, order)
    return [list(actions) for _ in range(num_ranks)]


def _chunk_order(model: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[_Step]:
    """Order of a rank's forwards; the last group may be smaller than P."""
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


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How one trained model's actions are ordered.

    ``make``: (model, pipeline ranks P, microbatches M, chunks per rank V) -> compute actions of
    every rank, for V from ``least_chunks`` to ``most_chunks`` (None: no upper limit).

    ``in_groups``: M must be a multiple of P. ``holds_all``: a rank's live activations grow with M;
    otherwise more than 3P microbatches take no more memory.

    ``merge``: (model, microbatch) pairs, P -> the schedule over several models' microbatches as if
    they were one model's. Time-sharing then reorders the model's actions as well; None: other
    models only fill its idle times.
    """

    make: Callable[[str, int, int, int], Lists]
    least_chunks: int = 1
    most_chunks: int | None = 1
    in_groups: bool = False
    holds_all: bool = False
    merge: Callable[[Sequence[tuple[str, int]], int], Lists] | None = None


SCHEDULES = {
    "1f1b": Schedule(make=one_f_one_b, merge=one_f_one_b_of),
    "interleaved": Schedule(make=interleaved, least_chunks=2, most_chunks=None, in_groups=True),
    "gpipe": Schedule(make=gpipe, holds_all=True),
}


def schedule_named(name: str | None, num_chunks: int) -> Schedule:
    """The schedule of that name; None: 1F1B, or interleaved if a rank has several chunks."""
    return SCHEDULES[name or ("interleaved" if num_chunks > 1 else "1f1b")]


def schedule_of(program: Program) -> Schedule:
    """The schedule of a trained program."""
    return schedule_named(program.schedule, program.num_chunks)


def schedule_for(program: Program, num_ranks: int) -> Lists:
    """Lists of a model alone on the pipeline; ValueError if its schedule rejects the sizes."""
    sizes = program.model, num_ranks, program.num_microbatches, program.num_chunks
    return schedule_of(program).make(*sizes) if program.backward else forward_only(*sizes)


def schedule_problem(name: str | None, num_chunks: int) -> str | None:
    """Why a schedule cannot run ``num_chunks`` per rank, and the cure; None if it can."""
    if name is None:
        return None
    if name not in SCHEDULES:
        return f"{name!r} is not a schedule; choose one of {', '.join(SCHEDULES)}"
    schedule = SCHEDULES[name]
    least, most = schedule.least_chunks, schedule.most_chunks
    if num_chunks >= least and (most is None or num_chunks <= most):
        return None
    wanted = f"{least} or more" if most is None else " to ".join(map(str, sorted({least, most})))
    return (
        f"{name} does not run {num_chunks} model chunk{'s' * (num_chunks != 1)} a pipeline rank; "
        f"set virtual_pipeline_model_parallel_size to {wanted}"
    )
