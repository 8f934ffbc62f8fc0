"""Times of phases that many plans have in common, each computed once."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from puzzle_align.layout.job_plan import ContextPlan, Phase, Settings
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.costs.switch import received_seconds
from puzzle_align.planning.iteration import (
    PhaseRun,
    PhaseTime,
    beside_step,
    joined,
    least_time,
    parts,
    phase_run,
    sampled_seconds,
    steady,
    switch_of,
)
from puzzle_align.planning.load import Load
from puzzle_align.planning.prediction import PredictedRun

P = ParamSpec("P")
R = TypeVar("R")
_NOTHING = object()


def kept(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The method, run once for each of its arguments, which are hashable and given by position.

    The object keeps the results. ``functools.cache`` of a bound method would hold the object that
    holds it: a cycle, and a search leaves a hundred thousand results behind.
    """
    name = f"_kept_by_{method.__name__}"

    @wraps(method)
    def asked(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "arguments are kept by their position"
        results: dict[tuple, Any] = self.__dict__.setdefault(name, {})
        result = results.get(args, _NOTHING)  # not ``in``: to hash a plan takes its time
        if result is _NOTHING:
            result = results[args] = method(self, *args, **kwargs)
        return result

    return asked


class Times:
    """Seconds of phases under one job's settings."""

    def __init__(self, measured: Measured, load: Load, settings: Settings) -> None:
        self.measured, self.load, self.settings = measured, load, settings
        self.num_simulated = 0

    def least(self, phase: Phase, row_tokens: int) -> float:
        """No more than what ``phase`` takes, for what is known without simulating it."""
        return joined(phase, [self._least(part, row_tokens) for part in parts(phase)]).seconds

    def phase(self, phase: Phase, row_tokens: int) -> PhaseTime:
        """Time of a phase: groups of models that have nothing in common are simulated alone."""
        return joined(phase, [self._simulated(part, row_tokens) for part in parts(phase)])

    def runs(self, phase: Phase, row_tokens: int) -> list[PredictedRun]:
        """The passes of a phase, of each group of models that is on its own."""
        return [self._run(part, row_tokens).run for part in parts(phase)]

    @kept
    def sampled(self, context: ContextPlan, prefill_tokens: int, decode_batch_size: int) -> float:
        """Seconds of sampling an iteration's responses."""
        settings = self._sampling_settings(prefill_tokens, decode_batch_size)
        return sampled_seconds(context, self.measured, self.load, settings)

    def least_sampled(
        self, context: ContextPlan, prefill_tokens: int, decode_batch_size: int
    ) -> float:
        """No more than what ``sampled`` gives, on whatever ranks the context's plan lies."""
        settings = self._sampling_settings(prefill_tokens, decode_batch_size)
        return sampled_seconds(context, self.measured.on_fastest_links, self.load, settings)

    def unrouted_switch(self, trained: ContextPlan, sampling: ContextPlan) -> float:
        """No more than what ``switch`` adds: what is known without routing."""
        links = self.measured.links
        moved = received_seconds(links, trained, sampling, links.ranks_per_node)
        return beside_step(moved, trained, self.measured, self.settings)

    @kept
    def switch(self, trained: ContextPlan, sampling: ContextPlan) -> float:
        """Seconds that an iteration's switch adds."""
        return switch_of(trained, sampling, self.measured, self.settings)

    @kept
    def _run(self, phase: Phase, row_tokens: int) -> PhaseRun:
        settings = replace(self.settings, row_tokens=row_tokens)
        return phase_run(phase, self.measured, self.load, settings)

    @kept
    def _least(self, phase: Phase, row_tokens: int) -> PhaseTime:
        phase_run_here = self._run(phase, row_tokens)
        return PhaseTime(
            seconds=phase_run_here.seconds(least_time(phase_run_here.run, phase_run_here.counts))
        )

    @kept
    def _simulated(self, phase: Phase, row_tokens: int) -> PhaseTime:
        self.num_simulated += 1
        phase_run_here = self._run(phase, row_tokens)
        makespan, idle = steady(phase_run_here.run, phase_run_here.counts)
        return PhaseTime(seconds=phase_run_here.seconds(makespan), idle=idle)

    def _sampling_settings(self, prefill_tokens: int, decode_batch_size: int) -> Settings:
        return replace(
            self.settings, prefill_tokens=prefill_tokens, decode_batch_size=decode_batch_size
        )
