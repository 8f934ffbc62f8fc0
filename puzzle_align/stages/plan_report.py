"""Comparison of a run's measured times and memory with the predictions of its plan file."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from puzzle_align.planning.memory.job import ranks_named
from puzzle_align.planning.plan_file import GivenPlan, Predicted
from puzzle_align.runtime.groups.collectives import gather_on_rank_zero
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.tracing import NUM_SKIPPED
from puzzle_align.telemetry import StepStats, text
from puzzle_align.telemetry.throughput import peak_memory

FILE = "plan_report.json"  # in output_dir

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Predicted and measured value of a number; either may be missing."""

    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if either is missing."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Medians over ``num_steps`` steps (stage ppo: iterations), without the first ones.

    ``times`` are in seconds by phase, with the whole as ``iteration``, then work beside the
    iterations. ``memory`` is a device's peak in bytes, by ranks: not measured on a CPU, where a
    process's memory also holds libraries and data.
    """

    num_steps: int
    num_left_out: int
    times: Mapping[str, Compared]
    memory: Mapping[str, Compared]

    def table(self, title: str) -> str:
        """Format the comparison as a table."""
        lines = [("", f"{'predicted':>11} {'measured':>11} {'ratio':>7}")]
        lines += [(name, _row(number, _seconds)) for name, number in self.times.items()]
        for ranks, number in self.memory.items():
            lines.append((f"memory, ranks {ranks}", _row(number, text.num_bytes)))
        after = f" after the first {self.num_left_out}" if self.num_left_out else ""
        steps = f"median of {self.num_steps} step{'s' * (self.num_steps > 1)}{after}"
        return text.table(lines, f"{title}, predicted and measured ({steps})")


def compare(
    predicted: Predicted,
    steps: Sequence[StepStats],
    memory: Sequence[int] | None,
    beside: Mapping[str, Sequence[float]] | None = None,
) -> Comparison:
    """Compare predictions with one or more measured steps.

    The first steps of a run compile and allocate: they are left out if there are others. A step
    that reports no phases counts as the phase ``train``.

    Args:
        memory: peak bytes of every rank's device; None if not measured.
        beside: seconds of work beside the steps, each time that it was done, by name.
    """
    num_left_out = NUM_SKIPPED if len(steps) > NUM_SKIPPED else 0
    kept = steps[num_left_out:]
    seconds_by_phase: dict[str, list[float]] = {}
    for step in kept:
        for name, seconds in (step.phases or {"train": step.seconds}).items():
            seconds_by_phase.setdefault(name, []).append(seconds)
    measured = {name: median(times) for name, times in seconds_by_phase.items()}
    names = dict.fromkeys([*measured, *predicted.phases])
    times = {
        name: Compared(predicted=predicted.phases.get(name), measured=measured.get(name))
        for name in names
    }
    whole = median(step.seconds for step in kept)
    times["iteration"] = Compared(predicted=predicted.iteration, measured=whole)
    for name, seconds in predicted.beside.items():
        done = (beside or {}).get(name)
        times[name] = Compared(predicted=seconds, measured=median(done) if done else None)
    return Comparison(
        num_steps=len(kept),
        num_left_out=num_left_out,
        times=times,
        memory=dict(_memory(predicted, memory)),
    )


class PlanReport:
    """Collects times of a run's steps, and reports at its end; all ranks make the same calls."""

    def __init__(self, plan_file: GivenPlan, world: World, output_dir: Path) -> None:
        self._plan_file, self._world, self._output_dir = plan_file, world, output_dir
        self._steps: list[StepStats] = []
        self._beside: dict[str, list[float]] = {}

    def note(self, stats: StepStats) -> None:
        """Record a step's statistics, on rank 0."""
        if self._world.rank == 0:
            self._steps.append(stats)

    def note_beside(self, name: str, seconds: float) -> None:
        """Record work beside the steps: an evaluation, or the reference's pass before the first."""
        self._beside.setdefault(name, []).append(seconds)

    def close(self) -> None:
        """Log the comparison and write ``plan_report.json``, on rank 0. Collective.

        A run that was resumed at its end has no step: nothing is logged or written.
        """
        device = self._world.device
        memory = gather_on_rank_zero(peak_memory(device))
        if not self._steps:
            return
        on_device = memory if device.type == "cuda" else None
        compared = compare(self._plan_file.predicted, self._steps, on_device, self._beside)
        _logger.info("%s", compared.table(self._plan_file.source))
        path = self._output_dir / FILE
        written = json.dumps({"plan": self._plan_file.source, **asdict(compared)}, indent=1)
        try:
            path.write_text(f"{written}\n", encoding="utf-8")
        except OSError as error:  # the training is done, and must not fail now
            _logger.warning("%s was not written: %s", path, error)


def _memory(predicted: Predicted, memory: Sequence[int] | None) -> Iterator[tuple[str, Compared]]:
    for ranks, size in predicted.memory.items():
        most = None
        if memory is not None:
            most = max(memory[rank] for rank in ranks_named(ranks, "predicted", len(memory)))
        yield ranks, Compared(predicted=size, measured=most)


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _row(number: Compared, form: Callable[[float], str]) -> str:
    shown = ("-" if value is None else form(value) for value in (number.predicted, number.measured))
    ratio = "-" if number.ratio is None else f"{number.ratio:.2f}"
    return " ".join([*(f"{value:>11}" for value in shown), f"{ratio:>7}"])
