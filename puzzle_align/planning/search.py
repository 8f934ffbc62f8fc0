"""The search for the fastest plan that fits (PUZZLE, section 5.3).

The objective is the predicted time of a whole iteration: all phases, and the switch between the
actor's plans (Equation 2, summed over the iteration). Memory is a limit that no plan may exceed.

``exhaustive`` finds the fastest plan of all: a plan is left out only where the least that it can
take, by a bound that holds for every schedule, is more than the best ones take. ``similarity`` goes
on from the fastest plans of training: the actor samples under the training's plan, then under
plans ever further away, pipeline for tensor ranks first, as long as an iteration gets shorter.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from math import inf

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import JobPlan, Phase
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.planning.bounds import most_kept
from puzzle_align.planning.iteration import PhaseTime, Settings
from puzzle_align.planning.job_memory import GenerationSizes, MemoryInputs, estimate_memory
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.planning.space import Choice, Sampling, Space
from puzzle_align.planning.times import Times

NUM_STARTS = 2  # of training's fastest plans, from which ``similarity`` sets out


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with what is predicted of it."""

    plan: JobPlan
    settings: Settings
    phases: Mapping[str, PhaseTime]
    memory: Mapping[str, int]  # bytes at the peak, by ranks
    mode: str

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def peak_bytes(self) -> int:
        """Of the rank that needs the most."""
        return max(self.memory.values())


@dataclass
class Found:
    """What a search has found: plans that fit, the fastest first, and how far it looked."""

    best: list[Planned] = field(default_factory=list)
    num_plans: int = 0  # that there are
    num_evaluated: int = 0  # of which a whole iteration was predicted
    nearest: Planned | None = None  # of those that do not fit, the one that needs least

    def limit(self, keep: int) -> float:
        """Seconds that a plan must stay below to be among the best ``keep``."""
        return self.best[keep - 1].seconds if len(self.best) >= keep else inf

    def take(self, planned: Planned, keep: int, most_bytes: int) -> None:
        """Note a plan."""
        self.num_evaluated += 1
        if planned.peak_bytes > most_bytes:
            if self.nearest is None or planned.peak_bytes < self.nearest.peak_bytes:
                self.nearest = planned
            return
        self.best.append(planned)
        self.best.sort(key=lambda each: each.seconds)
        del self.best[keep:]


Search = Callable[[Space, Times, int], Found]


def exhaustive(space: Space, times: Times, keep: int = 5) -> Found:
    """The ``keep`` fastest plans of all that fit."""
    found = Found()
    bounded = _bounded(space, times)
    samplings = _Samplings(space, times)
    found.num_plans = sum(samplings.number(choice) for _, choice in bounded)
    for least, choice in bounded:
        if least + samplings.least(choice) >= found.limit(keep):
            break
        if not _fits_at_all(space, times, choice, found):
            continue
        trained = _trained(times, choice)
        for seconds, sampling in samplings.of(choice):
            if trained + seconds >= found.limit(keep):
                break
            planned = evaluate(space, times, choice, sampling)
            found.take(planned, keep, space.cluster.memory_bytes)
    return found


def similarity(space: Space, times: Times, keep: int = 5) -> Found:
    """Plans near the fastest ones of training; see the module's text."""
    found = Found()
    bounded = _bounded(space, times)
    samplings = _Samplings(space, times)
    found.num_plans = sum(samplings.number(choice) for _, choice in bounded)
    for choice in _starts(space, times, bounded, found):
        if not space.job.samples:
            planned = evaluate(space, times, choice, None)
            found.take(planned, keep, space.cluster.memory_bytes)
            continue
        _walk(space, times, choice, samplings, found, keep)
    return found


def evaluate(space: Space, times: Times, choice: Choice, sampling: Sampling | None) -> Planned:
    """A whole plan: every phase's time, the switch, and every rank's memory."""
    phases: dict[str, PhaseTime] = {}
    contexts: list[Phase] = []
    settings = replace(times.settings, row_tokens=choice.row_tokens)
    if sampling is not None:
        trained = choice.context("actor")
        ranks = tuple(range(sampling.plan.world_size))
        if sampling.plan != trained.plan.grid or ranks != trained.ranks:
            holdings = Holdings(trained.model, trained.plan, trained.ranks)
            ranks = ordered_ranks(holdings, sampling.plan, ranks)
        plan = trained.plan if sampling.plan == trained.plan.grid else sampling.plan
        recompute = trained.options.recompute
        context = space.sampling_context(replace(sampling, plan=plan), ranks, recompute)
        sizes = sampling.prefill_tokens, sampling.decode_batch_size
        seconds = times.sampled(context, *sizes)
        moved = times.switch(trained, context)
        if moved > 0:
            phases["switch"] = PhaseTime(seconds=moved)
        phases["generate"] = PhaseTime(seconds=seconds)
        contexts.append(Phase(name="generate", order="sequential", contexts=(context,)))
        settings = replace(settings, prefill_tokens=sizes[0], decode_batch_size=sizes[1])
    for phase in choice.phases:
        phases[phase.name] = times.phase(phase, choice.row_tokens)
    job = space.job
    plan = JobPlan(
        stage=job.stage,
        world_size=space.cluster.num_ranks,
        phases=(*contexts, *choice.phases),
    )
    memory = _memory(space, times, plan, settings)
    return Planned(plan=plan, settings=settings, phases=phases, memory=memory, mode=choice.mode)


class _Samplings:
    """The samplings that go with choices, the fastest first, the switch left out."""

    def __init__(self, space: Space, times: Times) -> None:
        self._space, self._times = space, times
        self._by_ranks: dict[int, list[tuple[float, Sampling]]] = {}

    def of(self, choice: Choice) -> list[tuple[float, Sampling | None]]:
        """Those on the actor's ranks, and on all."""
        if not self._space.job.samples:
            return [(0.0, None)]
        numbers = {len(choice.context("actor").ranks), self._space.cluster.num_ranks}
        every = [one for number in numbers for one in self._on(number)]
        return sorted(every, key=lambda one: one[0])

    def number(self, choice: Choice) -> int:
        """How many there are."""
        return len(self.of(choice))

    def least(self, choice: Choice) -> float:
        """The fastest one's seconds."""
        found = self.of(choice)
        return found[0][0] if found else inf

    def _on(self, number: int) -> list[tuple[float, Sampling]]:
        if number not in self._by_ranks:
            ranks = tuple(range(number))
            timed = []
            for one in self._space.samplings(number):
                context = self._space.sampling_context(one, ranks)
                sizes = one.prefill_tokens, one.decode_batch_size
                timed.append((self._times.sampled(context, *sizes), one))
            self._by_ranks[number] = sorted(timed, key=lambda each: each[0])
        return self._by_ranks[number]


def _bounded(space: Space, times: Times) -> list[tuple[float, Choice]]:
    """All choices with the least that their phases take, the quickest first."""
    made = [
        (sum(times.least(phase, choice.row_tokens) for phase in choice.phases), choice)
        for choice in space.choices()
    ]
    return sorted(made, key=lambda one: one[0])


def _trained(times: Times, choice: Choice) -> float:
    return sum(times.phase(phase, choice.row_tokens).seconds for phase in choice.phases)


def _starts(
    space: Space, times: Times, bounded: list[tuple[float, Choice]], found: Found
) -> list[Choice]:
    """The choices that train fastest, those that fit alone, each of another grid of the actor's."""
    best: dict[ParallelPlan, tuple[float, Choice]] = {}
    for least, choice in bounded:
        known = nsmallest(NUM_STARTS, (seconds for seconds, _ in best.values()))
        if len(known) == NUM_STARTS and least >= known[-1]:
            break
        if not _fits_at_all(space, times, choice, found):
            continue
        seconds = _trained(times, choice)
        grid = choice.context(space.job.trained[0]).plan.grid
        if grid not in best or seconds < best[grid][0]:
            best[grid] = seconds, choice
    ordered = sorted(best.values(), key=lambda one: one[0])
    return [choice for _, choice in ordered[:NUM_STARTS]]


def _walk(
    space: Space,
    times: Times,
    choice: Choice,
    samplings: _Samplings,
    found: Found,
    keep: int,
) -> None:
    """Sampling plans from the training's own on, while an iteration gets shorter."""
    by_sizes: dict[_Sizes, list[Sampling]] = {}
    for _, sampling in samplings.of(choice):
        assert sampling is not None
        by_sizes.setdefault(_sizes(sampling.plan), []).append(sampling)

    def best_under(sizes: _Sizes) -> float:
        """Seconds of the fastest of a plan's samplings, of those that fit."""
        for sampling in by_sizes[sizes]:
            planned = evaluate(space, times, choice, sampling)
            found.take(planned, keep, space.cluster.memory_bytes)
            if planned.peak_bytes <= space.cluster.memory_bytes:
                return planned.seconds
        return inf

    here = _nearest(_sizes(choice.context("actor").plan), by_sizes)
    seconds = inf if here is None else best_under(here)
    seen = {here}
    while here is not None:
        tried = [sizes for sizes in _similar(here) if sizes in by_sizes and sizes not in seen]
        seen |= set(tried)
        shortest, there = min(((best_under(s), s) for s in tried), default=(inf, None))
        here = there if shortest < seconds else None
        seconds = min(seconds, shortest)


_Sizes = tuple[int, int, int]  # P, D, T


def _sizes(plan: ParallelPlan) -> _Sizes:
    return plan.pipeline, plan.data, plan.tensor


def _nearest(sizes: _Sizes, there: Iterable[_Sizes]) -> _Sizes | None:
    def distance(other: _Sizes) -> tuple[int, int, int]:
        pipeline, data, tensor = (abs(a - b) for a, b in zip(other, sizes, strict=True))
        return pipeline, tensor, data

    return min(there, key=distance, default=None)


def _similar(sizes: _Sizes) -> Iterator[_Sizes]:
    """Plans one step away: pipeline for tensor ranks, then for replicas, then tensor ranks for
    replicas, each by every prime factor."""
    pipeline, data, tensor = sizes
    for factor in _prime_factors(pipeline):
        yield pipeline // factor, data, tensor * factor
        yield pipeline // factor, data * factor, tensor
    for factor in _prime_factors(tensor):
        yield pipeline, data * factor, tensor // factor


def _prime_factors(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0 and all(n % m for m in range(2, n))]


def _fits_at_all(space: Space, times: Times, choice: Choice, found: Found) -> bool:
    """Whether a choice fits where nothing is sampled: else no sampling makes it fit."""
    plan = JobPlan(stage=space.job.stage, world_size=space.cluster.num_ranks, phases=choice.phases)
    settings = replace(times.settings, row_tokens=choice.row_tokens)
    memory = _memory(space, times, plan, settings)
    if max(memory.values()) <= space.cluster.memory_bytes:
        return True
    phases = {p.name: PhaseTime(seconds=times.least(p, choice.row_tokens)) for p in choice.phases}
    planned = Planned(plan=plan, settings=settings, phases=phases, memory=memory, mode=choice.mode)
    if found.nearest is None or planned.peak_bytes < found.nearest.peak_bytes:
        found.nearest = planned
    return False


def _memory(space: Space, times: Times, plan: JobPlan, settings: Settings) -> dict[str, int]:
    """Peak bytes by ranks, with what schedules keep one after the other at most."""
    passes = {
        phase.name: times.runs(phase, settings.row_tokens)
        for phase in plan.phases
        if phase.name != "generate"
    }
    peaks: dict[str, dict[str, tuple[float, ...]]] = {}
    for name, runs in passes.items():
        for run in runs:
            for context in run.phase.trained:
                count = run.num_microbatches[context.role](0)
                kept = most_kept(context, run.costs[context.role], count)
                peaks.setdefault(name, {})[context.role] = kept
    some = {name: runs[0] for name, runs in passes.items()}
    inputs = replace(memory_inputs(space, plan, settings, some), peaks=peaks)
    return {ranks: parts["total"] for ranks, parts in estimate_memory(plan, inputs).items()}


def memory_inputs(
    space: Space, plan: JobPlan, settings: Settings, runs: Mapping[str, PredictedRun]
) -> MemoryInputs:
    """What the memory of a plan depends on; ``runs`` are passes by phase."""
    load, generation = space.load.generation, None
    if load is not None and any(phase.name == "generate" for phase in plan.phases):
        data = plan.context("actor", "generate").plan.data
        generation = GenerationSizes(
            prefill_tokens=settings.prefill_tokens,
            decode_batch_size=settings.decode_batch_size,
            num_sequences=-(-load.num_prompts // data) * load.num_generations,
            prompt_tokens=load.longest,
            response_tokens=0,
        )
    return MemoryInputs(
        row_tokens=settings.row_tokens,
        runs=runs,
        distributed_optimizer=settings.sharded,
        generation=generation,
        set_aside=settings.set_aside,
        overlap_switch=settings.overlap_switch,
    )
