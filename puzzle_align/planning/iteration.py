"""Seconds of a job's iteration under a plan, by phase, from measured times.

Passes are the job's action lists, simulated with transfers. Added are the preparation of rows, the
reduction of gradients and the optimizer steps. Phases have the names that a run reports: ``train``
of the preference stages, and ``kl`` of KTO; ``generate``, ``switch``, ``score`` and ``learn`` of
PPO. An iteration also has its share of work beside the iterations: ``precompute``, the reference's
pass over all data before the first step, and ``evaluate``, the forwards over held-out data.

Not counted: communication of hosts between phases, reward functions, logging.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from math import ceil, floor
from statistics import fmean

from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase, Settings
from puzzle_align.layout.model import without_adapters
from puzzle_align.planning.costs.generation import generation_seconds
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.costs.switch import received_seconds, switch_seconds
from puzzle_align.planning.load import Load, PassLoad
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.schedules.timing import busiest_rank, least_makespan

EVALUATE = "evaluate"  # name of the time of evaluations
_NUMBER_BYTES = 4  # size of the all-reduce that ends a switch
# Steps of a lookahead run skipped until its steady state, and steps averaged after them.
NUM_SETTLING, NUM_STEADY = 3, 3
# Most microbatches per pipeline rank that are simulated; time beyond them is extrapolated from one
# more per rank. That is within 2% of simulating all, in 9,000 random cases and 300 with lookahead.
NUM_SIMULATED = 5


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Seconds of a phase, and the idle share of its ranks.

    ``busy``: seconds of work, summed over ranks. Sampling is not counted.
    """

    seconds: float
    idle: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A predicted iteration; ``runs`` are by phase, for phases with action lists."""

    phases: Mapping[str, PhaseTime]
    runs: Mapping[str, PredictedRun]

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        return sum(phase.seconds for phase in self.phases.values())


def predict_iteration(
    plan: JobPlan, measured: Measured, load: Load, settings: Settings
) -> Iteration:
    """Predict the job's iteration in its steady state; ValueError if a time was not measured."""
    times = Times(measured, load, settings)
    phases: dict[str, PhaseTime] = {}
    with_rows = [phase for phase in plan.phases if phase.name != "generate"]
    if len(with_rows) < len(plan.phases):
        contexts = plan.context("actor", "train"), plan.context("actor", "generate")
        sizes = settings.prefill_tokens, settings.decode_batch_size
        phases |= times.generate_phases(*contexts, *sizes)
    phases |= times.phases(with_rows, settings.row_tokens)
    runs = {phase.name: times.run(phase, settings.row_tokens).run for phase in with_rows}
    return Iteration(phases=phases, runs=runs)


@dataclass(frozen=True, kw_only=True)
class PhaseRun:
    """A phase with action lists: its passes, and the time beside each of them.

    A phase that runs once in a job counts with its share of an iteration.
    """

    run: PredictedRun
    counts: Mapping[str, float]  # mean microbatches of a pass, by role
    beside: float  # seconds of row preparation, gradient reduction and optimizer steps per pass
    passes: float  # per iteration

    def seconds(self, makespan: float) -> float:
        """Seconds per iteration if every pass has this makespan."""
        return (makespan + self.beside) * self.passes


class Times:
    """Seconds of phases under one job's settings, cached because plans share phases.

    All methods raise ValueError if a time was not measured.
    """

    def __init__(self, measured: Measured, load: Load, settings: Settings) -> None:
        self.measured, self.load, self.settings = measured, load, settings
        self.run = cache(self._run)
        self.fullest = cache(self._fullest)
        self.sampled = cache(partial(self._sampled, measured))
        self.switch = cache(self._switch)
        self._least_of = cache(self._least)
        self.simulated = cache(self._simulate)

    def phases(self, phases: Sequence[Phase], row_tokens: int) -> dict[str, PhaseTime]:
        """Times of an iteration's phases except generation, and its share of evaluations."""
        times = {phase.name: self.phase(phase, row_tokens) for phase in phases}
        passes = [self.phase(evaluated, row_tokens) for evaluated in self._evaluated(phases)]
        if passes:
            seconds = sum(time.seconds for time in passes)
            times[EVALUATE] = PhaseTime(seconds=seconds * self._evaluations)
        return times

    def least_seconds(self, phases: Sequence[Phase], row_tokens: int) -> float:
        """Lower bound of the seconds of ``phases``, without simulating them."""
        evaluated = sum(self.least(each, row_tokens) for each in self._evaluated(phases))
        seconds = sum(self.least(phase, row_tokens) for phase in phases)
        return seconds + evaluated * self._evaluations

    def phase(self, phase: Phase, row_tokens: int) -> PhaseTime:
        """Time of a phase; groups of colocated models are simulated separately."""
        return _joined(phase, [self.simulated(part, row_tokens) for part in _parts(phase)])

    def least(self, phase: Phase, row_tokens: int) -> float:
        """Lower bound of the seconds of ``phase``, without simulating it."""
        return _joined(phase, [self._least_of(part, row_tokens) for part in _parts(phase)]).seconds

    def _fullest(self, phase: Phase, row_tokens: int) -> PredictedRun:
        """A phase's pass with the most rows, all of them full: it keeps the most."""
        usual, num_rows = self._loads(phase, row_tokens), self.load.most_rows(row_tokens)
        most = {
            c.role: PassLoad(
                microbatches=max(usual[c.role].microbatches, num_rows / c.plan.data),
                row=replace(usual[c.role].row, row_tokens=row_tokens),
            )
            for c in phase.contexts
        }
        return pass_of(phase, self.measured, most)

    def generate_phases(
        self, trained: ContextPlan, sampling: ContextPlan, prefill_tokens: int, decode_batch: int
    ) -> dict[str, PhaseTime]:
        """Times of the generate phase, and of the switch to its plan if that adds any time.

        The switch to merged adapters is their merging.
        """
        samples = self._as_it_samples(trained, sampling)
        seconds = self.sampled(samples, prefill_tokens, decode_batch)
        phases = {"generate": PhaseTime(seconds=seconds)}
        if samples is sampling:
            moved = self.switch(trained, sampling)
        else:
            moved = self.measured.merge(sampling)
        return {"switch": PhaseTime(seconds=moved), **phases} if moved > 0 else phases

    def least_generated(
        self, trained: ContextPlan, sampling: ContextPlan, prefill_tokens: int, decode_batch: int
    ) -> float:
        """Lower bound of the seconds of ``generate_phases``, without routing or merging."""
        received = received_seconds(self.measured.links, trained, sampling)
        samples = self._as_it_samples(trained, sampling)
        seconds = self.sampled(samples, prefill_tokens, decode_batch)
        return seconds + self._beside_step(received, trained)

    def least_sampled(self, sampling: ContextPlan, prefill_tokens: int, decode_batch: int) -> float:
        """Lower bound of the seconds of sampling under the context's plan on any ranks."""
        fastest, either = self.measured.on_fastest_links, [sampling]
        if sampling.role in self.settings.merged:
            either.append(_merged(sampling))
        return min(self._sampled(fastest, each, prefill_tokens, decode_batch) for each in either)

    def _as_it_samples(self, trained: ContextPlan, sampling: ContextPlan) -> ContextPlan:
        """The sampling context, without adapters if they are merged."""
        is_own = trained.placed == sampling.placed
        return _merged(sampling) if is_own and sampling.role in self.settings.merged else sampling

    def _run(self, phase: Phase, row_tokens: int) -> PhaseRun:
        """A phase at measured costs.

        Times are valid only if it is one of ``_parts``; for other phases only ``run`` is.
        """
        measured, load, trains = self.measured, self.load, bool(phase.trained)
        loads = self._loads(phase, row_tokens)
        prepared = max(  # once: colocated models read the same rows
            loads[c.role].microbatches * measured.prepare(c, loads[c.role].row)
            for c in phase.contexts
        )
        passes = float(load.mini_batches * load.epochs) if trains else load.scored_batches
        return PhaseRun(
            run=pass_of(phase, measured, loads),
            counts={role: pass_load.microbatches for role, pass_load in loads.items()},
            beside=prepared + sum(self._updated(phase)),
            passes=load.data_batches / load.num_iterations if phase.once else passes,
        )

    def _loads(self, phase: Phase, row_tokens: int) -> dict[str, PassLoad]:
        batches = self.load.mini_batches if phase.trained else 1
        return {c.role: self.load.rows(row_tokens, batches, c.plan) for c in phase.contexts}

    @property
    def _evaluations(self) -> float:
        """Batches that are evaluated for an iteration, in the mean."""
        load = self.load
        return load.held_out_batches * load.num_evaluations / load.num_iterations

    def _evaluated(self, phases: Sequence[Phase]) -> Iterator[Phase]:
        """Passes over a batch of held-out data: one model after the other, forward only."""
        for phase in phases if self._evaluations > 0 else ():
            for context in () if phase.once else phase.contexts:
                forward = replace(context, workload="infer")
                yield Phase(name=EVALUATE, order="sequential", contexts=(forward,))

    def _updated(self, phase: Phase) -> Iterator[float]:
        """Seconds of every trained model's gradient reduction and optimizer step."""
        for context in phase.trained:
            sharded = context.role in self.settings.optimizers.sharded
            yield self.measured.reduce_gradients(context, sharded=sharded)
            yield self.measured.optimizer_step(context, sharded=sharded)

    def _least(self, part: Phase, row_tokens: int) -> PhaseTime:
        made = self.run(part, row_tokens)
        return PhaseTime(seconds=made.seconds(least_time(made.run, made.counts)))

    def _simulate(self, part: Phase, row_tokens: int) -> PhaseTime:
        made = self.run(part, row_tokens)
        makespan, idle = steady(made.run, made.counts)
        seconds, number = made.seconds(makespan), len(part.contexts[0].ranks)
        return PhaseTime(seconds=seconds, idle=idle, busy=seconds * (1 - idle) * number)

    def _sampled(
        self, measured: Measured, sampling: ContextPlan, prefill_tokens: int, decode_batch: int
    ) -> float:
        """Seconds of sampling an iteration's responses."""
        generation = self.load.generation
        assert generation is not None
        draws = [generation]
        if generation.greedy:
            draws.append(replace(generation, num_generations=1))
        return sum(
            generation_seconds(
                measured,
                sampling,
                each,
                prefill_tokens=prefill_tokens,
                decode_batch_size=decode_batch,
            )
            for each in draws
        )

    def _switch(self, trained: ContextPlan, sampling: ContextPlan) -> float:
        """Seconds that a switch adds: all, or if it overlaps the optimizer's step, the excess.

        At its end all ranks tell one another that they are done.
        """
        links, ranks = self.measured.links, sorted({*trained.ranks, *sampling.ranks})
        seconds = switch_seconds(links, trained, sampling)
        together = links.all_reduce(ranks, _NUMBER_BYTES) if seconds > 0 else 0.0
        return self._beside_step(seconds + together, trained)

    def _beside_step(self, moved: float, trained: ContextPlan) -> float:
        if self.settings.overlap_switch and moved > 0:
            sharded = trained.role in self.settings.optimizers.sharded
            return max(0.0, moved - self.measured.optimizer_step(trained, sharded=sharded))
        return moved


def _merged(context: ContextPlan) -> ContextPlan:
    return replace(context, model=without_adapters(context.model))


def _parts(phase: Phase) -> list[Phase]:
    """One phase for each of a phase's groups of colocated models."""
    groups = phase.colocated
    if len(groups) == 1:
        return [phase]
    return [
        replace(
            phase, contexts=group, order=phase.order if phase.shares_time(group) else "sequential"
        )
        for group in groups
    ]


def _joined(phase: Phase, times: Sequence[PhaseTime]) -> PhaseTime:
    """Time of a phase from those of its ``_parts``: each begins when all its ranks are free."""
    if len(times) == 1:
        return times[0]
    free: dict[int, float] = {}
    for group, time in zip(phase.colocated, times, strict=True):
        ranks = group[0].ranks
        end = max(free.get(rank, 0.0) for rank in ranks) + time.seconds
        free |= dict.fromkeys(ranks, end)
    seconds, busy = max(free.values()), sum(time.busy for time in times)
    whole = seconds * len(free)
    return PhaseTime(seconds=seconds, idle=1 - busy / whole if whole else 0.0, busy=busy)


def pass_of(phase: Phase, measured: Measured, loads: Mapping[str, PassLoad]) -> PredictedRun:
    """A phase's run at measured costs, with the microbatches of ``loads``.

    Their mean number is rounded up, to a multiple of the plan's ``microbatch_multiple``.
    """
    rows = {role: load.row for role, load in loads.items()}
    some = next(iter(rows.values()))
    units = {context.role: context.plan.microbatch_multiple for context in phase.contexts}
    counts = {
        role: max(1, ceil(load.microbatches / units[role])) * units[role]
        for role, load in loads.items()
    }
    return PredictedRun(
        phase=phase,
        num_microbatches={role: lambda _, n=n: n for role, n in counts.items()},
        costs={c.role: measured.action_costs(c, rows[c.role]) for c in phase.contexts},
        transfer=measured.transfer(phase.contexts, some),
        num_passes=NUM_SETTLING + NUM_STEADY + 1,
    )


def steady(run: PredictedRun, counts: Mapping[str, float]) -> tuple[float, float]:
    """Seconds and idle share of a pass with ``counts`` mean microbatches by role.

    Times are linear between whole numbers of microbatches, and beyond ``NUM_SIMULATED`` per rank,
    where a second simulation extends the first.
    """
    ranks = max(context.plan.pipeline for context in run.phase.contexts)
    unit = max(context.plan.microbatch_multiple for context in run.phase.contexts)
    most, limit = max(counts.values()), NUM_SIMULATED * ranks // unit * unit
    low = max(unit, min(floor(most / unit) * unit, limit))
    at_low, idle = _simulated(run, _scaled(counts, low / most))
    seconds = at_low
    if most > low:
        step = unit if low < limit else max(unit, ranks)
        more, _ = _simulated(run, _scaled(counts, (low + step) / most))
        seconds += (more - at_low) * (most - low) / step
    if _runs_ahead(run):  # the averaged steps may leave work to others
        seconds = max(seconds, most * busiest_rank(run.costs, ranks))
    return seconds, idle


def least_time(run: PredictedRun, counts: Mapping[str, float]) -> float:
    """Lower bound of ``steady`` without simulating, for any order of actions."""
    phase, transfer = run.phase, run.transfer
    number = phase.contexts[0].plan.pipeline
    if phase.is_fed and phase.order == "time_shared":
        trained = {context.role: counts[context.role] for context in phase.trained}
        work = max(counts.values()) * busiest_rank(run.costs, number)  # equally many microbatches
        return max(least_makespan(run.costs, trained, number, transfer), work)
    return least_makespan(run.costs, counts, number, transfer)


def _scaled(counts: Mapping[str, float], scale: float) -> dict[str, int]:
    return {role: max(1, round(number * scale)) for role, number in counts.items()}


def _simulated(run: PredictedRun, counts: Mapping[str, int]) -> tuple[float, float]:
    """Seconds and idle share of a steady-state pass with whole numbers of microbatches."""
    whole_run = replace(run, num_microbatches={r: lambda _, n=n: n for r, n in counts.items()})
    if _runs_ahead(run):
        passes = list(islice(whole_run.passes(), NUM_SETTLING, NUM_SETTLING + NUM_STEADY))
    else:
        passes = list(islice(whole_run.passes(), 1))
    return fmean(each.makespan for each in passes), fmean(each.idle_share() for each in passes)


def _runs_ahead(run: PredictedRun) -> bool:
    """Whether a model computes another's inputs during that model's passes (lookahead)."""
    return run.phase.is_fed and run.phase.order != "sequential"
