"""Lower bounds of plans' time and memory, without simulating or routing.

The search leaves out a plan whose bound is too high. A pass has the bound of ``schedules.timing``,
sampling its time on the fastest links, a switch 0. A rank's bytes are those of its models and of
sampling's work, without the copy of the weights that a switch makes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush, merge
from math import inf
from operator import itemgetter
from typing import NamedTuple

from puzzle_align.layout.job_plan import ContextPlan, lender
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory.job import generation_bytes, state_bytes
from puzzle_align.planning.search.evaluation import sampled_at_once
from puzzle_align.planning.search.space import Choice, Group, SamplingChoice, Space


@dataclass(frozen=True)
class Bounded:
    """A choice with lower bounds of an iteration's seconds and of its phases' without sampling.

    ``seconds`` is infinite if no sampling fits beside the choice's models.
    """

    seconds: float
    phases: float
    choice: Choice


class _Sampled(NamedTuple):
    """A sampling with its least seconds, and its bytes on the ranks with the least and the most."""

    seconds: float
    least: int
    most: int
    sampling: SamplingChoice


class Bounds:
    """Bounds of a space's plans."""

    def __init__(self, space: Space) -> None:
        self._space, self._samples = space, space.job.samples
        self._on = cache(self._samplings_on)
        self._state = cache(self._state_of)
        self._first = cache(self._least_sampled)
        self._smallest = cache(self._smallest_on)
        self.num_bounded = 0

    def ordered(self, groups: Iterable[Group]) -> Iterator[Bounded]:
        """The groups' choices with their bounds, the lowest first.

        A group's choices are made when no choice before them is left.
        """
        heap: list[tuple[float, tuple[int, ...], Group | Bounded]] = []
        for number, group in enumerate(groups):
            heappush(heap, (group.seconds + self._least_sampling(group), (0, number), group))
        while heap:
            _, (_, number, *_), first = heappop(heap)
            if isinstance(first, Bounded):
                yield first
                continue
            for index, choice in enumerate(first.choices()):
                bounded = self._bounded(choice)
                heappush(heap, (bounded.seconds, (1, number, index), bounded))

    def _least_sampling(self, group: Group) -> float:
        """Seconds of the fastest sampling, whether or not it fits."""
        numbers = self._numbers(group.num_ranks)
        return min((self._on(n)[0].seconds for n in numbers if self._on(n)), default=0.0)

    def _bounded(self, choice: Choice) -> Bounded:
        self.num_bounded += 1
        phases = self._space.times.least_seconds(choice.phases, choice.row_tokens)
        held = [(n, self._held(choice, n)) for n in self._numbers_of(choice)]
        sampled = min((self._first(*each) for each in held), default=0.0)
        return Bounded(phases + sampled, phases, choice)

    def samplings(self, choice: Choice) -> Iterator[tuple[float, SamplingChoice | None]]:
        """Samplings that may fit beside a choice's models, in order of their least seconds."""
        if not self._samples:
            yield 0.0, None
            return
        numbers = self._numbers_of(choice)
        fitting = (self._fitting(n, self._held(choice, n)) for n in numbers)
        yield from merge(*fitting, key=itemgetter(0))

    def smallest_samplings(self, choice: Choice) -> list[SamplingChoice | None]:
        """The smallest sampling under every plan; larger batches never need less memory."""
        if not self._samples:
            return [None]
        return [sampling for n in self._numbers_of(choice) for sampling in self._smallest(n)]

    def _numbers_of(self, choice: Choice) -> list[int]:
        return self._numbers(len(choice.context("actor").ranks)) if self._samples else []

    def _numbers(self, actors: int) -> list[int]:
        """Numbers of ranks that the actor may sample on: its training ranks, or all."""
        whole = self._space.cluster.num_ranks
        return [actors] if actors == whole else [actors, whole]

    def _least_sampled(self, number: int, held: tuple[int, int]) -> float:
        """Seconds of the fastest fitting sampling; infinite if there is none."""
        return next((seconds for seconds, _ in self._fitting(number, held)), inf)

    def _fitting(
        self, number: int, held: tuple[int, int]
    ) -> Iterator[tuple[float, SamplingChoice]]:
        """Samplings on ``number`` ranks that may fit in memory, the fastest first."""
        memory, (least, most) = self._space.cluster.memory_bytes, held
        for each in self._on(number):
            if each.least + most <= memory and each.most + least <= memory:
                yield each.seconds, each.sampling

    def _smallest_on(self, number: int) -> list[SamplingChoice]:
        by_plan: dict[ParallelPlan, SamplingChoice] = {}
        for sampling in self._space.samplings(number):  # the smallest first
            by_plan.setdefault(sampling.plan, sampling)
        return list(by_plan.values())

    def _samplings_on(self, number: int) -> list[_Sampled]:
        """Samplings on ``number`` ranks, the fastest first."""
        samplings = map(self._sampled, self._space.samplings(number))
        return sorted(samplings, key=itemgetter(0))

    def _sampled(self, sampling: SamplingChoice) -> _Sampled:
        context = self._space.sampling_context(sampling, tuple(range(sampling.plan.world_size)))
        sizes = sampled_at_once(self._space, sampling.plan, sampling)
        work = [generation_bytes(context, p, sizes) for p in range(sampling.plan.pipeline)]
        batches = sampling.prefill_tokens, sampling.decode_batch_size
        seconds = self._space.times.least_sampled(context, *batches)
        return _Sampled(seconds, min(work), max(work), sampling)

    def _held(self, choice: Choice, number: int) -> tuple[int, int]:
        """Least and most bytes of resident models per rank if ``number`` ranks sample."""
        actor = choice.context("actor")
        models = [choice.context(role) for role in self._space.job.models]
        states = [
            self._state(model, lender(model, models))
            for model in models
            if model.ranks == actor.ranks
        ]
        held = [sum(parts) for parts in zip(*states, strict=True)]
        # Ranks without the actor may hold nothing.
        return (min(held) if number == len(actor.ranks) else 0), max(held)

    def _state_of(self, context: ContextPlan, lender: ContextPlan | None) -> tuple[int, ...]:
        """Bytes of a model by pipeline rank, without parts offloaded while the actor samples."""
        settings = self._space.job.settings
        aside = settings.set_aside if context.workload == "train" else ()
        states = (
            state_bytes(context, part, settings.optimizers, lender)
            for part in range(context.plan.pipeline)
        )
        return tuple(sum(n for name, n in each.items() if name not in aside) for each in states)
