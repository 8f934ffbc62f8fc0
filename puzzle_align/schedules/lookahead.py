"""Lookahead: a frozen model's forwards of the next batch fill the bubbles of another's training.

DPO's reference does not change and the order of the data is known, so the reference forwards of
batch t + 1 can fill the bubbles of the policy's pipeline in step t. An optimizer step waits for all
ranks, and the bubbles before and after that wait cannot be filled by a reference that is confined
to one step: after their last backward the last ranks have no reference forwards left, and idle
until the first ranks are done. So this *lookahead model* continues past the end of a step, each
rank as far as it gets, and the next step begins with the forwards of its batch that a rank has
left.

With P ranks, M microbatches and times f, b, r of forward, backward and lookahead forward, a step
takes at least ``max((M + P - 1)(f + b), M(f + b + r))``: the trained model's pipeline, or the work.

Invariants (the tests assert them):
- every position runs every microbatch of the lookahead model once, in order, over all lists;
- on the last rank the lookahead model's forward of a microbatch comes before the trained model's;
- no position ends a list more than ``most_held`` microbatches ahead of the next position, which
  holds the inputs that it has received and not used;
- a run's steps together never take longer than with all reference forwards before each step: a step
  runs ahead only if this step and the next together lose nothing by it, even if the next runs
  nothing ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from puzzle_align.schedules.actions import Action, Program
from puzzle_align.schedules.backfill import backfill
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.registry import forward_only, schedule_for
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timing import timeline_of
from puzzle_align.schedules.validate import validate

_TOLERANCES = (0.0, 0.1, 0.25, 0.5, 0.75)
_NUM_TRIED = 6  # steps simulated with each tolerance
_NUM_SETTLING = 2  # the first of them, not counted: the steady state comes after


@dataclass(frozen=True)
class LookaheadStep:
    """One step: training on batch t, the lookahead model's rest of t, and its start of t + 1.

    The lookahead model numbers batch t's microbatches ``0 .. M_t - 1``; batch t + 1's follow.
    ``done`` is how many of batch t + 1's microbatches every virtual position has run: the next
    step's ``done``.
    """

    lists: list[list[Action]]  # lowered and validated
    programs: tuple[Program, Program]
    done: tuple[int, ...]
    makespan: float  # predicted, without transfers


def lookahead_step(
    train: Program,
    frozen: str,
    num_next: int,
    *,
    num_ranks: int,
    costs: Costs,
    done: Sequence[int] = (),
) -> LookaheadStep:
    """Build a step's lists. The same arguments give the same lists, on every rank of a job.

    Args:
        train: the trained model, with batch t's M_t microbatches.
        frozen: name of the lookahead model, which has as many chunks per rank as ``train``.
        num_next: batch t + 1's microbatches; 0 in the last step.
        costs: of both models.
        done: microbatches of batch t that every virtual position (``chunk * P + rank``) of the
            lookahead model ran in the step before; empty in the first step.
    """
    train = replace(train, reads=frozen)
    pair = _Pair(train, frozen, num_ranks, (costs[train.model], costs[frozen]))
    return _lookahead_step(pair, num_next, tuple(done) or pair.zeros)


def most_held(num_ranks: int) -> int:
    """Most inputs of the lookahead model that a position holds between two steps.

    2P is enough for the two bubbles at the end of a step: later ranks fill theirs with microbatches
    that earlier ranks ran in theirs; 3P makes no step of the tests' grid shorter.
    """
    return 2 * num_ranks


@dataclass(frozen=True, slots=True)
class _Pair:
    """A step's two models: the trained one, with its microbatches, and the lookahead model."""

    train: Program
    frozen: str
    num_ranks: int
    costs: tuple[ModelCosts, ModelCosts]

    @property
    def zeros(self) -> tuple[int, ...]:
        """No microbatch at any virtual position."""
        return (0,) * (self.num_ranks * self.train.num_chunks)

    @property
    def costs_by_model(self) -> dict[str, ModelCosts]:
        """Costs of both models."""
        return dict(zip((self.train.model, self.frozen), self.costs, strict=True))

    def program(self, done: tuple[int, ...], ahead: tuple[int, ...]) -> Program:
        """The lookahead model's program."""
        first = self.train.num_microbatches
        windows = tuple(range(d, first + a) for d, a in zip(done, ahead, strict=True))
        return Program(self.frozen, first + max(ahead), self.train.num_chunks, False, windows)

    def least(self, num_microbatches: int, done: tuple[int, ...]) -> float:
        """Makespan of a step of ``num_microbatches`` that runs nothing ahead."""
        train = replace(self.train, num_microbatches=num_microbatches)
        return _compose(replace(self, train=train), 0, done).makespan


@lru_cache(maxsize=16)  # a steady state repeats; a step holds the lists of all ranks
def _lookahead_step(pair: _Pair, num_next: int, done: tuple[int, ...]) -> LookaheadStep:
    train = pair.train
    assert all(0 <= number <= train.num_microbatches for number in done)
    tolerance = _best_tolerance(pair)
    if tolerance is None:
        num_next = 0
    made = _compose(pair, num_next, done, tolerance or 0.0)
    if num_next > 0:
        alone = _compose(pair, 0, done)
        later, from_scratch = pair.least(num_next, made.ahead), pair.least(num_next, pair.zeros)
        if made.makespan + later > (alone.makespan + from_scratch) * (1 + 1e-9):
            made = alone
    programs = train, pair.program(done, made.ahead)
    lowered = lower(made.lists, programs, made.timeline)
    validate(lowered, programs)
    return LookaheadStep(lowered, programs, made.ahead, made.makespan)


@lru_cache(maxsize=256)
def _best_tolerance(pair: _Pair) -> float | None:
    """Tolerance with the shortest steady state of equal steps; None: running nothing ahead."""
    sequential = _compose(pair, 0, pair.zeros)
    best, shortest = None, sequential.makespan * (_NUM_TRIED - _NUM_SETTLING) * (1 - 1e-9)
    for tolerance in _TOLERANCES:
        done, made, total = pair.zeros, None, 0.0
        for step in range(_NUM_TRIED):
            if made is None or made.ahead != done:  # else this step is the same as the one before
                done = pair.zeros if made is None else made.ahead
                made = _compose(pair, pair.train.num_microbatches, done, tolerance)
            total += made.makespan if step >= _NUM_SETTLING else 0.0
        if total < shortest:
            best, shortest = tolerance, total
    return best


@dataclass(frozen=True, slots=True)
class _Composed:
    lists: list[list[Action]]
    timeline: Timeline
    ahead: tuple[int, ...]  # next-batch microbatches that each virtual position runs

    @property
    def makespan(self) -> float:
        return self.timeline.makespan


def _compose(
    pair: _Pair, num_next: int, done: tuple[int, ...], tolerance: float = 0.0
) -> _Composed:
    """Compose the rest of batch t's lookahead, then the training, then batch t + 1 in the gaps."""
    alone = _compose_alone(pair, done)
    if num_next == 0:
        return alone
    train, num_ranks, costs = pair.train, pair.num_ranks, pair.costs_by_model
    both = pair.program(done, (num_next,) * len(done))
    lists = backfill(
        alone.timeline,
        _forwards(both, num_ranks, train.num_microbatches),
        Dependencies((train, both), num_ranks, lead=most_held(num_ranks)),
        costs,
        limits=(inf,) * num_ranks,
        tolerance=tolerance,
        deadline=alone.makespan,
    )
    assert lists is not None
    timeline = timeline_of(lists, Dependencies((train, both), num_ranks), costs)
    return _Composed(lists, timeline, _ahead(lists, pair))


@lru_cache(maxsize=4)  # each tolerance begins with the same
def _compose_alone(pair: _Pair, done: tuple[int, ...]) -> _Composed:
    """Compose the rest of batch t's lookahead, then the training."""
    train, num_ranks, costs = pair.train, pair.num_ranks, pair.costs_by_model
    current = pair.program(done, pair.zeros)
    graph = Dependencies((train, current), num_ranks)
    timeline = timeline_of(_forwards(current, num_ranks), graph, costs)
    no_limits = (inf,) * num_ranks  # the lookahead model keeps nothing
    lists = backfill(timeline, schedule_for(train, num_ranks), graph, costs, limits=no_limits)
    assert lists is not None
    return _Composed(lists, timeline_of(lists, graph, costs), pair.zeros)


def _ahead(lists: list[list[Action]], pair: _Pair) -> tuple[int, ...]:
    """Number of next-batch microbatches that each virtual position runs."""
    ahead = [*pair.zeros]
    for rank, actions in enumerate(lists):
        for action in actions:
            if action.model == pair.frozen and action.microbatch >= pair.train.num_microbatches:
                ahead[action.chunk * pair.num_ranks + rank] += 1
    return tuple(ahead)


def _forwards(program: Program, num_ranks: int, first: int = 0) -> list[list[Action]]:
    """The lookahead model's forwards within its windows, from microbatch ``first`` on."""
    whole = forward_only(
        program.model, num_ranks, program.num_microbatches - first, program.num_chunks
    )
    shifted = [[replace(a, microbatch=a.microbatch + first) for a in actions] for actions in whole]
    return [
        [a for a in actions if a.microbatch in program.microbatches(a.chunk * num_ranks + rank)]
        for rank, actions in enumerate(shifted)
    ]
