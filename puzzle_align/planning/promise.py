"""What plans promise before any is evaluated: the least that they take, and that they need.

Nothing here is simulated, routed or ordered, and every figure is a bound: a plan that promises too
little is left out without a look at it. A rank receives at least what its part under the sampling's
plan is larger than the largest under the training's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from math import inf
from operator import itemgetter
from typing import NamedTuple

from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.evaluation import sampled_at_once
from puzzle_align.planning.job_memory import cut_bytes, generation_bytes, state_bytes
from puzzle_align.planning.kept import kept
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


class _Alone(NamedTuple):
    """A sampling whatever the training's plan: seconds on any ranks; bytes of the ranks that need
    least and most, with the training's weights and with a copy that has nothing of them."""

    seconds: float
    without_copy: tuple[int, int]
    with_copy: tuple[int, int]
    sampling: Sampling


class _Beside(NamedTuple):
    """The samplings under one plan, the fastest first, for a training.

    ``switch``: seconds that each of them takes more at least; ``copied``: whether no rank has
    anything in the same form under both plans.
    """

    plan: ParallelPlan
    switch: float
    copied: bool
    samplings: list[_Alone]

    def needed(self, own: _Alone) -> tuple[int, int]:
        """Bytes of the ranks that need least and most."""
        return own.with_copy if self.copied else own.without_copy


class Promises:
    """Bounds of a space's plans."""

    def __init__(self, space: Space, times: Times) -> None:
        self._space, self._times = space, times
        # By the actor's plan, its number of ranks, and that of sampling.
        self._by_actor: dict[tuple[ParallelPlan, int, int], list[_Beside]] = {}
        # By the actor's plan, its number of ranks, and the bytes that stay on these.
        self._least: dict[tuple[ParallelPlan, int, tuple[int, int]], float] = {}

    def ordered(self, choices: Iterable[Choice]) -> list[Promising]:
        """The choices, what promises to be the fastest first."""
        found = []
        for choice in choices:
            phases = sum(self._times.least(phase, choice.row_tokens) for phase in choice.phases)
            found.append(Promising(phases + self._least_sampled(choice), phases, choice))
        return sorted(found, key=lambda own: own.seconds)

    def number(self, choice: Choice) -> int:
        """How many samplings there are, those that cannot fit included."""
        if not self._samples:
            return 1
        return sum(len(own) for n in self._numbers(choice) for own in self._on(n).values())

    def samplings(self, choice: Choice) -> Iterator[tuple[float, Sampling | None]]:
        """The samplings that may fit beside a choice's models, by the least that they take."""
        if not self._samples:
            yield 0.0, None
            return
        memory = self._space.cluster.memory_bytes
        kept = [
            _fitting(beside, room)
            for number in self._numbers(choice)
            for room in [self._room(choice, number, memory)]
            for beside in self._beside(choice.context("actor"), number)
        ]
        yield from merge(*kept, key=itemgetter(0))

    def _least_sampled(self, choice: Choice) -> float:
        """Seconds of the first of ``samplings``; infinite, where there is none."""
        if not self._samples:
            return 0.0
        actor = choice.context("actor")
        key = actor.plan, len(actor.ranks), self._held(choice)
        if key not in self._least:
            self._least[key] = next((seconds for seconds, _ in self.samplings(choice)), inf)
        return self._least[key]

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
                for beside in self._beside(choice.context("actor"), number):
                    own = min(beside.samplings, key=_batch_sizes)
                    for_least, for_most = beside.needed(own)
                    found.append((max(least + for_least, most + for_most), choice, own.sampling))
        return sorted(found, key=lambda own: own[0])

    @property
    def _samples(self) -> bool:
        return self._space.job.samples

    def _numbers(self, choice: Choice) -> list[int]:
        """The actor samples on its own ranks, or on all."""
        own, whole = len(choice.context("actor").ranks), self._space.cluster.num_ranks
        return [own] if own == whole else [own, whole]

    @kept
    def _on(self, number: int) -> dict[ParallelPlan, list[_Alone]]:
        """The samplings on so many ranks by their plans, the fastest first."""
        found: dict[ParallelPlan, list[_Alone]] = {}
        for own in self._space.samplings(number):
            found.setdefault(own.plan, []).append(self._alone(own))
        return {plan: sorted(own, key=itemgetter(0)) for plan, own in found.items()}

    def _alone(self, own: Sampling) -> _Alone:
        context = self._space.sampling_context(own, tuple(range(own.plan.world_size)))
        sizes, parts = sampled_at_once(self._space, own.plan, own), range(own.plan.pipeline)
        model, dtype = self._space.job.models["actor"], context.options.dtype
        work = tuple(generation_bytes(context, part, sizes) for part in parts)
        copy = tuple(cut_bytes(model, own.plan, dtype, part) for part in parts)
        seconds = self._times.least_sampled(context, own.prefill_tokens, own.decode_batch_size)
        both = [sum(parts) for parts in zip(work, copy, strict=True)]
        return _Alone(seconds, (min(work), max(work)), (min(both), max(both)), own)

    def _beside(self, actor: ContextPlan, number: int) -> list[_Beside]:
        """The samplings on so many ranks of an actor that is trained so."""
        key = (actor.plan, len(actor.ranks), number)
        if key not in self._by_actor:
            grid, found = actor.plan.grid, []
            for plan, own in self._on(number).items():
                if len(actor.ranks) == number and plan == grid:
                    found.append(_Beside(plan, 0.0, False, own))
                else:
                    switch = self._times.least_switch(actor, plan)
                    found.append(_Beside(plan, switch, plan.tensor != grid.tensor, own))
            self._by_actor[key] = found
        return self._by_actor[key]

    def _held(self, choice: Choice) -> tuple[int, int]:
        """Bytes of models that stay while the actor samples, on the actor's ranks: least, most."""
        actor = choice.context("actor")
        beside = (choice.context(role) for role in self._space.job.models)
        states = [self._state(own) for own in beside if own.ranks == actor.ranks]
        held = [sum(parts) for parts in zip(*states, strict=True)]
        return min(held), max(held)

    @kept
    def _state(self, context: ContextPlan) -> tuple[int, ...]:
        """Bytes of a model by pipeline rank, without what is set aside while the actor samples."""
        settings = self._space.job.settings
        aside = settings.set_aside if context.workload == "train" else ()
        return tuple(
            sum(
                size
                for name, size in state_bytes(context, part, settings.optimizers).items()
                if name not in aside
            )
            for part in range(context.plan.pipeline)
        )


def _fitting(beside: _Beside, room: tuple[int, int]) -> Iterator[tuple[float, Sampling]]:
    """The samplings that fit into so many bytes of the ranks that need least, and most."""
    for_least, for_most = room
    for own in beside.samplings:
        least, most = beside.needed(own)
        if least <= for_least and most <= for_most:
            yield own.seconds + beside.switch, own.sampling


def _batch_sizes(own: _Alone) -> tuple[int, int]:
    return own.sampling.decode_batch_size, own.sampling.prefill_tokens
