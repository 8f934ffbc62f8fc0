"""What plans with a switch are compared with: the actor samples under the plan that it trains with.

A *single* plan has the actor on all ranks, where it samples under the plan that it trains with, so
that nothing is switched. All else is free as in a search: rows, recompute, layers, chunks, who
shares time, the sizes of the batches that sample.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from puzzle_align.layout.job_plan import Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.evaluation import Planned, evaluate
from puzzle_align.planning.iteration import PhaseTime
from puzzle_align.planning.space import Choice, Sampling, Space
from puzzle_align.planning.times import Times

Sizes = tuple[int, int, int]  # (P, D, T)
Measure = Callable[[Planned], float]


def sizes_of(plan: ParallelPlan) -> Sizes:
    """Pipeline, data and tensor ranks."""
    return plan.pipeline, plan.data, plan.tensor


def grid_of(planned: Planned) -> Sizes:
    """(P, D, T) that the actor trains with."""
    return sizes_of(planned.plan.context("actor", "train").plan)


def samples_with(planned: Planned) -> Sizes:
    """(P, D, T) that the actor samples with."""
    return sizes_of(planned.plan.context("actor", "generate").plan)


def training_seconds(planned: Planned) -> float:
    """Of the phases under the training's plan: score and learn."""
    return planned.phases["score"].seconds + planned.phases["learn"].seconds


def generation_seconds(planned: Planned) -> float:
    """Of the generate phase, no switch counted."""
    return planned.phases["generate"].seconds


class Narrowed(Space):
    """Of a space, given choices and those samplings that ``keep`` holds of."""

    def __init__(
        self, space: Space, choices: Iterable[Choice], keep: Callable[[ParallelPlan], bool]
    ) -> None:
        super().__init__(space.job, space.cluster, space.times)
        self._given, self._keep = list(choices), keep

    def choices(self) -> Iterator[Choice]:
        """Those given."""
        return iter(self._given)

    def samplings(self, num_ranks: int) -> list[Sampling]:
        """Those kept."""
        return [one for one in super().samplings(num_ranks) if self._keep(one.plan)]


class Least(Times):
    """Phases by the least that they can take: what fits is known without simulating them."""

    @classmethod
    def like(cls, times: Times) -> "Least":
        """Of the same job."""
        return cls(times.measured, times.load, times.settings)

    def phase(self, phase: Phase, row_tokens: int) -> PhaseTime:
        """No simulation."""
        return PhaseTime(seconds=self.least(phase, row_tokens))


@dataclass(frozen=True)
class _Single:
    """A single plan that fits; ``least``: with the least that its phases can take."""

    choice: Choice
    sampling: Sampling
    least: Planned


class Singles:
    """The single plans of some choices that fit, each with the fastest of its samplings."""

    def __init__(self, space: Space, times: Times, choices: Sequence[Choice]) -> None:
        self._space, self._times = space, times
        self._bounds = Least.like(times)
        self._samplings: dict[ParallelPlan, list[Sampling]] = {}
        self._found: dict[int, Planned] = {}
        number = space.cluster.num_ranks
        whole = [one for one in choices if len(one.context("actor").ranks) == number]
        made = (self._fitting(choice) for choice in whole)
        self._singles = [single for single in made if single is not None]

    def fastest(
        self, measure: Measure = lambda one: one.seconds, sizes: Sizes | None = None
    ) -> Planned | None:
        """The one with the least of ``measure``, a sum of phases; ``sizes``: of these alone."""
        best, least = None, inf
        some = [one for one in self._singles if sizes in (None, grid_of(one.least))]
        for single in sorted(some, key=lambda one: measure(one.least)):
            if measure(single.least) >= least:
                break
            planned = self._evaluated(single)
            if measure(planned) < least:
                best, least = planned, measure(planned)
        return best

    def generation_optimal(self) -> Planned | None:
        """The fastest of the (P, D, T) under which sampling takes least."""
        first = min(self._singles, key=lambda one: generation_seconds(one.least), default=None)
        return None if first is None else self.fastest(sizes=grid_of(first.least))

    def training_optimal(self) -> Planned | None:
        """The one whose score and learn phases take least."""
        return self.fastest(training_seconds)

    def _evaluated(self, single: _Single) -> Planned:
        key = id(single)
        if key not in self._found:
            self._found[key] = evaluate(self._space, self._times, single.choice, single.sampling)
        return self._found[key]

    def _fitting(self, choice: Choice) -> _Single | None:
        plan = choice.context("actor").plan
        by_time = self._of(plan)
        smallest = min(by_time, key=lambda one: (one.decode_batch_size, one.prefill_tokens))
        if not self._fits(self._bounded(choice, smallest)):
            return None
        bounded = (self._bounded(choice, sampling) for sampling in by_time)
        return next(single for single in bounded if self._fits(single))

    def _bounded(self, choice: Choice, sampling: Sampling) -> _Single:
        same = replace(sampling, plan=choice.context("actor").plan.grid)
        return _Single(choice, same, evaluate(self._space, self._bounds, choice, same))

    def _fits(self, single: _Single) -> bool:
        return single.least.peak_bytes <= self._space.cluster.memory_bytes

    def _of(self, plan: ParallelPlan) -> list[Sampling]:
        """The sizes of batches to sample with under a plan, the fastest first."""
        if plan not in self._samplings:
            ranks = tuple(range(plan.world_size))
            timed = []
            for one in self._space.samplings(plan.world_size):
                if sizes_of(one.plan) == sizes_of(plan):
                    context = self._space.sampling_context(replace(one, plan=plan), ranks)
                    batch = one.prefill_tokens, one.decode_batch_size
                    timed.append((self._times.sampled(context, *batch), one))
            self._samplings[plan] = [one for _, one in sorted(timed, key=lambda each: each[0])]
        return self._samplings[plan]
