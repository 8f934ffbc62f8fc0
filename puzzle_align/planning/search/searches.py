"""Searches for the fastest plan that fits (PUZZLE, section 5.3).

The objective is the predicted time of a whole iteration: all phases, and the switch between the
actor's plans (Equation 2, summed over the iteration). Memory is a limit that no plan may exceed.

``exhaustive`` finds the fastest plan: it leaves out a plan only if a lower bound of its time, which
holds for every schedule, is above the best plans' times, or a lower bound of its memory is above
the limit. ``similarity`` simulates the training plans with the lowest bounds and hill-climbs from
the fastest of these: the actor samples under the training plan, then under plans ever further away,
exchanging pipeline for tensor ranks first, as long as an iteration gets shorter. If the actor is
trained on a part of the ranks, the same is done for sampling on all ranks, from the most similar
plan.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile
from math import inf, prod
from operator import itemgetter

from puzzle_align.layout.plan import ParallelPlan, divisors
from puzzle_align.planning.search.bounds import Bounded, Bounds
from puzzle_align.planning.search.evaluation import Evaluation, Planned
from puzzle_align.planning.search.space import Choice, SamplingChoice, Space

NUM_TRIED = 12  # training plans that ``similarity`` simulates before it begins, by lowest bounds
NUM_STARTS = 4  # the fastest of these, from which it starts


@dataclass
class SearchResult:
    """Result of a search: plans that fit, the fastest first, and the search's extent.

    The ``best`` differ in their texts: of plans with the same text the fastest is kept.
    """

    best: list[Planned] = field(default_factory=list)
    num_bounded: int = 0  # training plans of which a bound was made
    num_evaluated: int = 0  # plans for which a whole iteration was predicted
    nearest: Planned | None = None  # if none fits: the plan with the least memory


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Switch the garbage collector off, which would take a quarter of a search's time.

    A search keeps its results, and they have hardly any reference cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_nothing_collected()
def exhaustive(space: Space, keep: int = 5) -> SearchResult:
    """The ``keep`` fastest plans that fit."""
    return _Search(space, keep).exhaustive()


@_nothing_collected()
def similarity(space: Space, keep: int = 5) -> SearchResult:
    """Plans that fit, by hill-climbing from the fastest training plans (module docstring)."""
    return _Search(space, keep).similarity()


class _Search:
    """One search: its bounds, its evaluations, the plans found so far."""

    def __init__(self, space: Space, keep: int) -> None:
        self._lead = space.job.trained[0]
        self._evaluation = Evaluation(space)
        self._bounds = Bounds(space)
        self._space = space
        self._keep = keep
        # Plans that ``similarity`` passed over, with lower bounds of their seconds.
        self._passed: list[tuple[float, Choice, SamplingChoice | None]] = []
        self.result = SearchResult()

    def exhaustive(self) -> SearchResult:
        """Search choice by choice, in order of their bounds."""
        for bounded in self._bounds.ordered(self._space.groups()):
            if bounded.seconds >= self._limit:
                break
            if self._evaluation.fits(bounded.choice):
                self._all_of(bounded)
        return self._ended()

    def similarity(self) -> SearchResult:
        """Hill-climb from the best starts; try the others if none fits.

        Where fewer plans than asked for were better than the one before, passed ones fill up.
        """
        for number, start in enumerate(self._starts()):
            if number >= NUM_STARTS and self.result.best:
                break
            if start.seconds < self._limit:
                self._walk(start)
        for _, choice, sampling in sorted(self._passed, key=_first):
            if len(self.result.best) == self._keep:
                break
            if self._evaluation.fits(choice, sampling):
                self._take(choice, sampling)
        return self._ended()

    def _starts(self) -> Iterator[Bounded]:
        """Choices that fit, the fastest of ``NUM_TRIED`` first, with the phases simulated.

        A start is yielded as soon as no later bound can be below its time.
        """
        tried: list[tuple[float, int, Bounded]] = []
        bounded = self._bounds.ordered(self._space.groups())
        fitting = (each for each in bounded if self._evaluation.fits(each.choice))
        for number, start in enumerate(takewhile(lambda each: each.seconds < inf, fitting)):
            while tried and (len(tried) == NUM_TRIED or tried[0][0] <= start.seconds):
                yield heappop(tried)[-1]
            seconds = start.seconds - start.phases + self._evaluation.trained(start.choice)
            heappush(tried, (seconds, number, start))
        yield from (start for *_, start in sorted(tried))

    @property
    def _limit(self) -> float:
        """Seconds that a plan must stay below to be among the best."""
        best = self.result.best
        return best[-1].seconds if len(best) == self._keep else inf

    def _peak(self, choice: Choice, sampling: SamplingChoice | None) -> int:
        columns = self._evaluation.memory(choice, sampling).values()
        return max(parts["total"] for parts in columns)

    def _all_of(self, bounded: Bounded) -> None:
        """Evaluate the plans of a choice that may be among the best."""
        choice, trained = bounded.choice, bounded.phases
        for seconds, sampling in self._bounds.samplings(choice):
            if trained + seconds >= self._limit:
                break
            seconds = self._evaluation.sampled(choice, sampling)
            if trained + seconds < self._limit and self._evaluation.fits(choice, sampling):
                trained = self._evaluation.trained(choice)
                if trained + seconds < self._limit:
                    self._take(choice, sampling)

    def _take(self, choice: Choice, sampling: SamplingChoice | None) -> float:
        """Predict a plan that fits, add it to the result, return its seconds."""
        result, planned = self.result, self._evaluation.planned(choice, sampling)
        result.num_evaluated += 1
        distinct: dict[str, Planned] = {}
        for each in sorted([*result.best, planned], key=lambda each: each.rank):
            distinct.setdefault(each.text, each)
        result.best = list(distinct.values())[: self._keep]
        return planned.seconds

    def _walk(self, start: Bounded) -> None:
        """Hill-climb over sampling plans from the training plan."""
        by_sizes: dict[_Sizes, list[tuple[float, SamplingChoice | None]]] = {}
        choice = start.choice
        trained = self._evaluation.trained(choice)
        actor = _sizes(choice.context(self._lead).plan)
        for seconds, sampling in self._bounds.samplings(choice):
            sizes = actor if sampling is None else _sizes(sampling.plan)
            by_sizes.setdefault(sizes, []).append((trained + seconds, sampling))

        def best_under(sizes: _Sizes) -> float:
            """Seconds with the best sampling of these sizes, or a bound above the best plan's."""
            shortest = inf
            for number, (least, sampling) in enumerate(by_sizes[sizes]):
                best = self.result.best[0].seconds if self.result.best else inf
                if least >= min(shortest, best):
                    self._passed += ((s, choice, one) for s, one in by_sizes[sizes][number:])
                    return min(shortest, least)
                seconds = trained + self._evaluation.sampled(choice, sampling)
                if seconds >= best:  # not a new best, but maybe a step towards one
                    shortest = min(shortest, seconds)
                    self._passed.append((seconds, choice, sampling))
                elif self._evaluation.fits(choice, sampling):
                    shortest = min(shortest, self._take(choice, sampling))
            return shortest

        seen: set[_Sizes] = set()
        for number in sorted({prod(sizes) for sizes in by_sizes}):  # the actor's ranks, and all
            here = _nearest(actor, [sizes for sizes in by_sizes if prod(sizes) == number])
            seen.add(here)
            seconds, going = best_under(here), True
            while going:
                tried = [each for each in _similar(here) if each in by_sizes and each not in seen]
                seen |= set(tried)
                going = False
                for sizes in tried:
                    shorter = best_under(sizes)
                    if shorter < seconds:
                        seconds, here, going = shorter, sizes, True

    def _ended(self) -> SearchResult:
        self.result.num_bounded = self._bounds.num_bounded
        if not self.result.best:
            self.result.nearest = self._nearest_plan()
        return self.result

    def _nearest_plan(self) -> Planned | None:
        """The plan with the least memory; None if the space is empty.

        Choices are tried by their memory without sampling, which sampling can only raise.
        """
        alone = [(self._peak(choice, None), choice) for choice in self._space.choices()]
        least, nearest = inf, None
        for without_sampling, choice in sorted(alone, key=_first):
            if without_sampling >= least:
                break
            for sampling in self._bounds.smallest_samplings(choice):
                needed = self._peak(choice, sampling)
                if needed < least:
                    least, nearest = needed, (choice, sampling)
        return None if nearest is None else self._evaluation.planned(*nearest)


_first = itemgetter(0)
_Sizes = tuple[int, int, int]  # P, D, T


def _sizes(plan: ParallelPlan) -> _Sizes:
    return plan.pipeline, plan.data, plan.tensor


def _nearest(sizes: _Sizes, there: Iterable[_Sizes]) -> _Sizes:
    """The most similar sizes: T must differ least, then D, then P."""

    def distance(other: _Sizes) -> tuple[int, int, int]:
        pipeline, data, tensor = (abs(a - b) for a, b in zip(other, sizes, strict=True))
        return tensor, data, pipeline

    return min(there, key=distance)


def _similar(sizes: _Sizes) -> Iterator[_Sizes]:
    """Sizes one step away: a factor moved from P to T, from P to D, from T to D, or from D to T."""
    pipeline, data, tensor = sizes
    for factor in divisors(pipeline)[1:]:
        yield pipeline // factor, data, tensor * factor
        yield pipeline // factor, data * factor, tensor
    for factor in divisors(tensor)[1:]:
        yield pipeline, data * factor, tensor // factor
    for factor in divisors(data)[1:]:
        yield pipeline, data // factor, tensor * factor
