"""Time-sharing: several models on one pipeline, one filling the bubbles of another.

PUZZLE's intra-stage switch (section 4.2), for any number of models, forward-only or training, with
any costs. Invariants (the tests assert them):
- the makespan is never longer than that of the models one after the other;
- no rank holds more live activations than with the models one after the other;
- each model runs its microbatches in order.

Several orders are proposed, with the models (at most four in a job) in every order. They are timed,
and the shortest is taken:
- the models one after the other; for forward-only models this is one uninterrupted pipeline;
- 1F1B over the microbatches of all training models in sequence (Figure 5(b); its speed-up is
  Equation (1)); also with the shorter model's microbatches partly before and partly after the
  longer's, so that they fill both its warm-up and its cool-down;
- one model as it would run alone, with the others put into its idle times;
- list scheduling (``dispatch``), if several models train: of 150 pairs on 2 to 8 ranks, one a
  fifth to all of the other's size, 60 become shorter by it, by 0.7 % in the mean of all and 4.5 %
  at most.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, permutations

from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.backfill import backfill
from puzzle_align.schedules.costs import Costs
from puzzle_align.schedules.dependencies import Dependencies
from puzzle_align.schedules.dispatch import dispatch
from puzzle_align.schedules.registry import Lists, schedule_for, schedule_of
from puzzle_align.schedules.timing import least_makespan, makespan_of, timeline_of

_TOLERANCES = (0.0, 0.5)
_NUM_SPLITS = 8


def one_after_the_other(programs: Sequence[Program], num_ranks: int) -> Lists:
    """Sequential schedule: one model's schedule after another.

    Raises:
        ValueError: ``interleaved`` rejects a program.
    """
    return _joined([schedule_for(program, num_ranks) for program in programs], num_ranks)


def time_share(programs: Sequence[Program], num_ranks: int, costs: Costs) -> Lists:
    """Compute actions of all models for every pipeline rank, in the best of the proposed orders.

    The same arguments give the same lists, on every rank of a job. Raises ValueError as
    ``one_after_the_other`` does.
    """
    graph = Dependencies(programs, num_ranks)
    sequential = one_after_the_other(programs, num_ranks)
    limits = graph.peaks(sequential, costs)
    best, shortest = sequential, makespan_of(sequential, graph, costs)
    counts = {program.model: program.num_microbatches for program in programs}
    least = least_makespan(costs, counts, num_ranks)
    proposals = chain(
        _proposals(programs, num_ranks, graph, costs, limits),
        _dispatched(sequential, graph, costs, limits),
    )
    for lists in proposals:
        if least >= shortest * (1 - 1e-9):
            break  # nothing is shorter
        makespan = makespan_of(lists, graph, costs)
        if makespan >= shortest * (1 - 1e-9):
            continue
        peaks = graph.peaks(lists, costs)
        if all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)):
            best, shortest = lists, makespan
    return best


def _proposals(
    programs: Sequence[Program],
    num_ranks: int,
    graph: Dependencies,
    costs: Costs,
    limits: Sequence[float],
) -> Iterator[Lists]:
    if not any(program.backward for program in programs):
        # One uninterrupted pipeline: the order only decides which model fills and drains it.
        for order in permutations(programs):
            yield _joined([schedule_for(program, num_ranks) for program in order], num_ranks)
        return
    for merge in dict.fromkeys(schedule_of(p).merge for p in programs if p.backward):
        if merge is None:
            continue
        training = [p for p in programs if p.backward and schedule_of(p).merge is merge]
        others = [p for p in programs if p not in training]
        for sequence in _sequences(training, num_ranks, costs):
            for order in permutations(others):
                yield from _filled(merge(sequence, num_ranks), order, graph, costs, limits)
    for first, *rest in permutations(programs):
        yield from _filled(schedule_for(first, num_ranks), rest, graph, costs, limits)


def _dispatched(
    sequential: Lists, graph: Dependencies, costs: Costs, limits: Sequence[float]
) -> Iterator[Lists]:
    """The proposal of ``dispatch``, if there is one.

    There is none if a trained model's schedule keeps its order, or if a model has several chunks
    (they share edges). Fewer than two trained models hardly gain by it.
    """
    trained = [p for p in graph.programs.values() if p.backward]
    is_free = all(p.num_chunks == 1 for p in graph.programs.values())
    if len(trained) > 1 and is_free and all(schedule_of(p).merge for p in trained):
        lists = dispatch(sequential, graph, costs, limits)
        if lists is not None:
            yield lists


def _filled(
    lists: Lists,
    rest: Sequence[Program],
    graph: Dependencies,
    costs: Costs,
    limits: Sequence[float],
) -> Iterator[Lists]:
    """``lists`` with the rest put into their idle times, one model after the other."""
    for tolerance in _TOLERANCES if rest else (0.0,):
        filled: Lists | None = lists
        for program in rest:
            timeline = timeline_of(filled, graph, costs)
            alone = schedule_for(program, len(lists))
            filled = backfill(timeline, alone, graph, costs, limits=limits, tolerance=tolerance)
            if filled is None:
                break
        if filled is not None:
            yield filled


def _sequences(
    training: Sequence[Program], num_ranks: int, costs: Costs
) -> Iterator[list[tuple[str, int]]]:
    """Orders of ``(model, microbatch)`` for one common 1F1B."""
    if len(training) < 2:
        return
    for order in permutations(training):
        yield [item for program in order for item in _items(program)]
    *shorter, longest = sorted(training, key=lambda p: _work(p, costs))
    nested = {_nested(shorter, longest, num_ranks, pick) for pick in range(_NUM_SPLITS + 1)}
    yield from map(list, sorted(nested))


def _nested(
    shorter: Sequence[Program], longest: Program, num_ranks: int, pick: int
) -> tuple[tuple[str, int], ...]:
    """Each shorter model's microbatches partly before and partly after those of the longer models.

    ``pick`` decides how many go before: 0 for half of them, else ``pick / _NUM_SPLITS`` of those
    that fit into a warm-up.
    """
    inner = _items(longest)
    for program in reversed(shorter):
        items = _items(program)
        room = min(len(items), num_ranks)
        at = round(room * pick / _NUM_SPLITS) if pick else len(items) // 2
        inner = items[:at] + inner + items[at:]
    return tuple(inner)


def _items(program: Program) -> list[tuple[str, int]]:
    return [(program.model, number) for number in range(program.num_microbatches)]


def _work(program: Program, costs: Costs) -> float:
    model_costs = costs[program.model]
    return program.num_microbatches * (sum(model_costs.forward) + sum(model_costs.backward))


def _joined(parts: Sequence[Lists], num_ranks: int) -> Lists:
    return [[action for lists in parts for action in lists[rank]] for rank in range(num_ranks)]
