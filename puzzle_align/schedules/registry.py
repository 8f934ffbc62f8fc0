"""Registry of schedules for trained models.

To add a schedule of the existing actions, write a function in a new file and a row here: configs,
checks, validation, time-sharing, memory and predictions read the row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.gpipe import gpipe
from puzzle_align.schedules.single import forward_only, interleaved, one_f_one_b, one_f_one_b_of

Lists = list[list[Action]]  # compute actions of every pipeline rank


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
