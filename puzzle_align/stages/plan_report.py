"""What a run by a plan file took, beside what the file predicts of it."""

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
    """A number of which one side may be missing."""

    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, where there are both."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Medians of ``num_steps`` steps (of stage ppo: iterations), after those left out.

    ``times`` are in seconds by phase, and of the whole ``iteration``; ``memory`` are the most bytes
    that a device held, by ranks: not measured on a CPU, where a process's memory also holds the
    libraries and the data.
    """

    num_steps: int
    num_left_out: int
    times: Mapping[str, Compared]
    memory: Mapping[str, Compared]

    def table(self, title: str) -> str:
        """All of it for people."""
        lines = [("", f"{'predicted':>11} {'measured':>11} {'ratio':>7}")]
        lines += [(name, _row(own, _seconds)) for name, own in self.times.items()]
        for ranks, own in self.memory.items():
            lines.append((f"memory, ranks {ranks}", _row(own, text.num_bytes)))
        after = f" after the first {self.num_left_out}" if self.num_left_out else ""
        steps = f"median of {self.num_steps} step{'s' * (self.num_steps > 1)}{after}"
        return text.table(lines, f"{title}, predicted and measured ({steps})")


def compare(
    predicted: Predicted, steps: Sequence[StepStats], memory: Sequence[int] | None
) -> Comparison:
    """What is predicted, beside one step or more.

    The first steps of a run compile and allocate: they are left out where there are others. A step
    that reports no phases is one, ``train``.

    Args:
        memory: the most bytes of every rank's device; None: that was not measured.
    """
    num_left_out = NUM_SKIPPED if len(steps) > NUM_SKIPPED else 0
    kept = steps[num_left_out:]
    found: dict[str, list[float]] = {}
    for step in kept:
        for name, seconds in (step.phases or {"train": step.seconds}).items():
            found.setdefault(name, []).append(seconds)
    measured = {name: median(times) for name, times in found.items()}
    names = dict.fromkeys([*measured, *predicted.phases])
    times = {
        name: Compared(predicted=predicted.phases.get(name), measured=measured.get(name))
        for name in names
    }
    whole = median(step.seconds for step in kept)
    times["iteration"] = Compared(predicted=predicted.iteration, measured=whole)
    return Comparison(
        num_steps=len(kept),
        num_left_out=num_left_out,
        times=times,
        memory=dict(_memory(predicted, memory)),
    )


class PlanReport:
    """Keeps what the steps of a run took, and tells at its end; the same calls on all ranks."""

    def __init__(self, given: GivenPlan, world: World, output_dir: Path) -> None:
        self._given, self._world, self._output_dir = given, world, output_dir
        self._steps: list[StepStats] = []

    def note(self, stats: StepStats) -> None:
        """Take what a step did; rank 0's is kept."""
        if self._world.rank == 0:
            self._steps.append(stats)

    def close(self) -> None:
        """Say how it compares, and write ``plan_report.json``, on rank 0. Collective.

        A run that was resumed at its end has done no step: nothing is said or written.
        """
        device = self._world.device
        memory = gather_on_rank_zero(peak_memory(device))
        if not self._steps:
            return
        on_device = memory if device.type == "cuda" else None
        compared = compare(self._given.file.predicted, self._steps, on_device)
        _logger.info("%s", compared.table(str(self._given.path)))
        path = self._output_dir / FILE
        written = json.dumps({"plan": str(self._given.path), **asdict(compared)}, indent=1)
        try:
            path.write_text(f"{written}\n", encoding="utf-8")
        except OSError as error:  # the training is done: no reason to call it failed
            _logger.warning("%s was not written: %s", path, error)


def _memory(predicted: Predicted, memory: Sequence[int] | None) -> Iterator[tuple[str, Compared]]:
    for ranks, size in predicted.memory.items():
        most = None
        if memory is not None:
            most = max(memory[rank] for rank in ranks_named(ranks, "predicted"))
        yield ranks, Compared(predicted=size, measured=most)


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _row(own: Compared, form: Callable[[float], str]) -> str:
    shown = ("-" if value is None else form(value) for value in (own.predicted, own.measured))
    ratio = "-" if own.ratio is None else f"{own.ratio:.2f}"
    return " ".join([*(f"{value:>11}" for value in shown), f"{ratio:>7}"])
