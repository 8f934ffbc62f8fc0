"""Times of phases that many plans have in common, each computed once."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from puzzle_align.layout.job_plan import ContextPlan, Order, Phase
from puzzle_align.planning.bounds import least_time
from puzzle_align.planning.iteration import (
    PhaseTime,
    Settings,
    phase_time,
    sampled_seconds,
    switch_of,
)
from puzzle_align.planning.load import Load
from puzzle_align.planning.measured import Measured
from puzzle_align.planning.prediction import PredictedRun


class Times:
    """Seconds of phases under one job's settings."""

    def __init__(self, measured: Measured, load: Load, settings: Settings) -> None:
        self.measured, self.load, self.settings = measured, load, settings
        self._least, self._simulated = cache(self._least_of), cache(self._simulated_of)
        self._sampled, self._switch = cache(self._sampled_of), cache(self._switch_of)
        self.num_simulated = 0

    def least(self, phase: Phase, row_tokens: int) -> float:
        """No less than what ``phase`` takes, for what is known without simulating it."""
        return self._joined(phase, [self._least(p, row_tokens) for p in _parts(phase)])

    def phase(self, phase: Phase, row_tokens: int) -> PhaseTime:
        """What a phase takes: groups of models that have nothing in common are simulated alone."""
        parts = [self._simulated(part, row_tokens)[1] for part in _parts(phase)]
        longest = max(parts, key=lambda part: part.seconds)
        return PhaseTime(
            seconds=self._joined(phase, [part.seconds for part in parts]), idle=longest.idle
        )

    def runs(self, phase: Phase, row_tokens: int) -> list[PredictedRun]:
        """The passes of a phase, of each group of models that is on its own."""
        settings = replace(self.settings, row_tokens=row_tokens)
        return [
            phase_time(part, self.measured, self.load, settings, least_time)[0]
            for part in _parts(phase)
        ]

    def sampled(self, context: ContextPlan, prefill_tokens: int, decode_batch_size: int) -> float:
        """Seconds of sampling an iteration's responses."""
        return self._sampled(context, prefill_tokens, decode_batch_size)

    def switch(self, trained: ContextPlan, sampling: ContextPlan) -> float:
        """Seconds that an iteration's switch adds."""
        return self._switch(trained, sampling)

    def _joined(self, phase: Phase, parts: Sequence[float]) -> float:
        return max(parts) if phase.order == "concurrent" else sum(parts)

    def _least_of(self, phase: Phase, row_tokens: int) -> float:
        settings = replace(self.settings, row_tokens=row_tokens)
        return phase_time(phase, self.measured, self.load, settings, least_time)[1].seconds

    def _simulated_of(self, phase: Phase, row_tokens: int) -> tuple[PredictedRun, PhaseTime]:
        self.num_simulated += 1
        settings = replace(self.settings, row_tokens=row_tokens)
        return phase_time(phase, self.measured, self.load, settings)

    def _sampled_of(
        self, context: ContextPlan, prefill_tokens: int, decode_batch_size: int
    ) -> float:
        sizes = {"prefill_tokens": prefill_tokens, "decode_batch_size": decode_batch_size}
        settings = replace(self.settings, **sizes)
        return sampled_seconds(context, self.measured, self.load, settings)

    def _switch_of(self, trained: ContextPlan, sampling: ContextPlan) -> float:
        return switch_of(trained, sampling, self.measured, self.settings)


def _parts(phase: Phase) -> list[Phase]:
    """A phase's groups of colocated models as phases of their own; itself where they share time."""
    groups = phase.colocated
    if len(groups) == 1:
        return [phase]
    return [
        replace(
            phase, contexts=group, order=phase.order if phase.shares_time(group) else "sequential"
        )
        for group in groups
    ]


def _order(phase: Phase, group: tuple[ContextPlan, ...]) -> Order:
    return "time_shared" if phase.shares_time(group) else "sequential"
