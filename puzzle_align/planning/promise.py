"""What plans promise before any is evaluated: the least that they take, and that they need.

Nothing here is simulated, routed or ordered, and every figure is a bound: a plan that promises too
little is left out without a look at it. A rank receives at least what its part under the sampling's
plan is larger than the largest under the training's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from heapq import merge
from math import inf

from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.evaluation import sampled_at_once
from puzzle_align.planning.job_memory import cut_bytes, generation_bytes, state_bytes
from puzzle_align.planning.space import Choice, Sampling, Space
from puzzle_align.planning.times import Times


@dataclass(frozen=True)
class Promising:
    """A choice with the least that an iteration takes under it, in seconds.

    ``phases``: its part without sampling. Infinite, where no sampling may fit.
    """

    seconds: float
    phases: float
    choice: Choice


@dataclass(frozen=True)
class _Sampled:
    """A sampling: the least it takes on any ranks, bytes of the ranks that need least and most."""

    seconds: float
    least_bytes: int
    most_bytes: int
    sampling: Sampling


@dataclass(frozen=True)
class _Alone:
    """A sampling whatever the training's plan: seconds on any ranks; bytes of the ranks that need
    least and most, with the training's weights and with a copy that has nothing of them."""

    seconds: float
    without_copy: tuple[int, int]
    with_copy: tuple[int, int]
    sampling: Sampling


class Promises:
    """Bounds of a space's plans."""

    def __init__(self, space: Space, times: Times) -> None:
        self._space, self._times = space, times
        self._on, self._state = cache(self._alone_on), cache(self._state_of)
        # By the actor's plan, its number of ranks, and that of sampling.
        self._by_actor: dict[tuple[ParallelPlan, int, int], list[_Sampled]] = {}

    def ordered(self, choices: Iterable[Choice]) -> list[Promising]:
        """The choices, what promises to be the fastest first."""
        found = []
        for choice in choices:
            phases = sum(self._times.least(phase, choice.row_tokens) for phase in choice.phases)
            first = next(self.samplings(choice), None)
            seconds = inf if first is None else phases + first[0]
            found.append(Promising(seconds, phases, choice))
        return sorted(found, key=lambda own: own.seconds)

    def number(self, choice: Choice) -> int:
        """How many samplings there are, those that cannot fit included."""
        return sum(len(self._on(n)) for n in self._numbers(choice)) if self._samples else 1

    def samplings(self, choice: Choice) -> Iterator[tuple[float, Sampling | None]]:
        """The samplings that may fit beside a choice's models, by the least that they take."""
        if not self._samples:
            yield 0.0, None
            return
        memory = self._space.cluster.memory_bytes
        kept = [self._fitting(choice, number, memory) for number in self._numbers(choice)]
        for own in merge(*kept, key=lambda own: own.seconds):
            yield own.seconds, own.sampling

    def _fitting(self, choice: Choice, number: int, memory: int) -> Iterator[_Sampled]:
        for_least, for_most = self._room(choice, number, memory)
        for own in self._beside(choice.context("actor"), number):
            if own.least_bytes <= for_least and own.most_bytes <= for_most:
                yield own

    def _room(self, choice: Choice, number: int, memory: int) -> tuple[int, int]:
        """Bytes that sampling on so many ranks may take on its ranks that need least, and most."""
        least, most = self._held(choice)
        if number > len(choice.context("actor").ranks):
            least = 0  # of ranks without the actor
        return memory - most, memory - least

    def by_memory(self, choices: Iterable[Choice]) -> list[tuple[int, Choice, Sampling | None]]:
        """Of every choice and sampling plan the one that needs least, and its least bytes.

        Larger batches never need less under a plan. The least bytes come first.
        """
        found: list[tuple[int, Choice, Sampling | None]] = []
        for choice in choices:
            if not self._samples:
                found.append((0, choice, None))
                continue
            for number in self._numbers(choice):
                least, most = (-room for room in self._room(choice, number, 0))
                smallest: dict[ParallelPlan, _Sampled] = {}
                every = self._beside(choice.context("actor"), number)
                for own in sorted(every, key=_batch_sizes):
                    smallest.setdefault(own.sampling.plan, own)
                for own in smallest.values():
                    needed = max(least + own.least_bytes, most + own.most_bytes)
                    found.append((needed, choice, own.sampling))
        return sorted(found, key=lambda own: own[0])

    @property
    def _samples(self) -> bool:
        return self._space.job.samples

    def _numbers(self, choice: Choice) -> list[int]:
        """The actor samples on its own ranks, or on all."""
        own, whole = len(choice.context("actor").ranks), self._space.cluster.num_ranks
        return [own] if own == whole else [own, whole]

    def _alone_on(self, number: int) -> list[_Alone]:
        """The samplings on so many ranks."""
        found = []
        model = self._space.job.models["actor"]
        for own in self._space.samplings(number):
            context = self._space.sampling_context(own, tuple(range(number)))
            sizes, parts = sampled_at_once(self._space, own.plan, own), range(own.plan.pipeline)
            work = tuple(generation_bytes(context, part, sizes) for part in parts)
            copy = tuple(cut_bytes(model, own.plan, context.options.dtype, part) for part in parts)
            seconds = self._times.least_sampled(context, own.prefill_tokens, own.decode_batch_size)
            both = [sum(parts) for parts in zip(work, copy, strict=True)]
            found.append(_Alone(seconds, (min(work), max(work)), (min(both), max(both)), own))
        return found

    def _beside(self, actor: ContextPlan, number: int) -> list[_Sampled]:
        """The samplings on so many ranks of an actor that is trained so, the fastest first."""
        key = (actor.plan, len(actor.ranks), number)
        if key not in self._by_actor:
            switch, same = cache(partial(self._times.least_switch, actor)), key[1] == number
            found, grid = [], actor.plan.grid
            for own in self._on(number):
                plan, needed, seconds = own.sampling.plan, own.without_copy, own.seconds
                if not same or plan != grid:
                    seconds += switch(plan)
                    needed = own.without_copy if plan.tensor == grid.tensor else own.with_copy
                found.append(_Sampled(seconds, *needed, own.sampling))
            self._by_actor[key] = sorted(found, key=lambda own: own.seconds)
        return self._by_actor[key]

    def _held(self, choice: Choice) -> tuple[int, int]:
        """Bytes of models that stay while the actor samples, on the actor's ranks: least, most."""
        actor = choice.context("actor")
        beside = (choice.context(role) for role in self._space.job.models)
        states = [self._state(own) for own in beside if own.ranks == actor.ranks]
        held = [sum(parts) for parts in zip(*states, strict=True)]
        return min(held), max(held)

    def _state_of(self, context: ContextPlan) -> tuple[int, ...]:
        """Bytes of a model by pipeline rank, without what is set aside while the actor samples."""
        settings = self._space.job.settings
        aside = settings.set_aside if context.workload == "train" else ()
        return tuple(
            sum(
                size
                for name, size in state_bytes(context, part, settings.sharded).items()
                if name not in aside
            )
            for part in range(context.plan.pipeline)
        )


def _batch_sizes(own: _Sampled) -> tuple[int, int]:
    return own.sampling.decode_batch_size, own.sampling.prefill_tokens
