"""Training steps measured action by action, drawn beside what was predicted of them."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.layout.job_plan import Phase
from puzzle_align.planning.costs.flops import FLOPS_PER_SECOND
from puzzle_align.planning.picture import Panel, draw_text, save_png, save_trace
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.runtime.groups.collectives import barrier, from_rank_zero, gather_on_rank_zero
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.phases import pass_name
from puzzle_align.schedules.timeline import Span, Timeline
from puzzle_align.stages.costs import JobCosts, predicted_run

NUM_SKIPPED = 2  # a run's first steps: they compile, allocate, and have nothing ahead of them
TEXT_WIDTH = 200

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """What one execution of an action list recorded: ``spans`` from ``start``, in seconds."""

    start: float
    spans: list[Span]


Passes = dict[tuple[str, int], Pass]  # by what ran, and how often it had run in the step before
# What is expected of a step (from 0), in a run that began with the first, on the drawn lanes; these
# are the passes that were measured on them.
Predict = Callable[[int, int, Sequence[Passes]], Timeline]


class Tracer:
    """Traces ``telemetry.trace_steps`` steps of a run, after its first two.

    Every rank has one, does each of its steps within ``step``, and gives what ``spans`` returns to
    each execution of an action list. Rank 0 then writes ``trace/step_N.json`` (Chrome trace) and
    ``trace/step_N.txt`` in the job's output folder, and ``.png`` where matplotlib is installed; N
    counts from 1, as in ``metrics.jsonl``.
    """

    def __init__(self, config: JobConfig, world: World, drawn: Phase, predict: Predict) -> None:
        """``drawn`` are the contexts whose work is drawn: their lanes are the picture's."""
        self._folder = Path(config.output_dir) / "trace"
        self._num_left = config.telemetry.trace_steps
        self._num_skipped = 0
        self._world = world
        self._drawn = drawn
        self._predict = predict
        self._first: int | None = None  # of the run's steps
        self._began = 0.0
        self._passes: Passes | None = None  # None: this step is not traced

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure what runs within as step ``step`` (from 0), if it is to be. Collective.

        Steps come in order, the first one being any.
        """
        if self._first is None:
            self._first = step
        if self._num_skipped < NUM_SKIPPED or self._num_left == 0:
            self._num_skipped += 1
            yield
            return
        barrier()
        self._began, self._passes = self._now(), {}
        yield
        everyone, self._passes = gather_on_rank_zero(self._passes), None
        from_rank_zero(lambda: self._try_to_write(step, everyone or []))
        self._num_left -= 1

    def spans(self, name: str) -> list[Span] | None:
        """Where the execution of ``name`` that comes next is to record; None in other steps.

        All ranks of one pipeline call it for the same executions, right before them.
        """
        if self._passes is None:
            return None
        number = sum(other == name for other, _ in self._passes)
        self._passes[name, number] = Pass(self._now() - self._began, [])
        return self._passes[name, number].spans

    def _now(self) -> float:
        """This rank's clock when all that it has launched is done."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()

    def _try_to_write(self, step: int, everyone: Sequence[Passes]) -> None:
        """Write the step; a full disk or a broken matplotlib is no reason to end the training."""
        try:
            self._write(step, everyone)
        except (OSError, ImportError) as error:
            _logger.warning("telemetry.trace_steps: step %d was not written: %s", step + 1, error)

    def _write(self, step: int, everyone: Sequence[Passes]) -> None:
        assert self._first is not None
        lanes = [everyone[rank] for rank in self._drawn.lanes]
        predicted = self._predict(self._first, step, lanes)
        panels = side_by_side(f"step {step + 1}", predicted, measured(lanes))
        panels = [replace(panel, labels=self._drawn.lane_names) for panel in panels]
        stem = self._folder / f"step_{step + 1}"
        save_trace(panels, stem.with_suffix(".json"))
        stem.with_suffix(".txt").write_text(draw_text(panels, TEXT_WIDTH), encoding="utf-8")
        if find_spec("matplotlib") is not None:
            save_png(panels, stem.with_suffix(".png"))


def in_steps(run: PredictedRun) -> Predict:
    """For steps of which each is the run's next pass."""

    def predict(first: int, step: int, _lanes: Sequence[Passes]) -> Timeline:
        return next(islice(run.passes(first), step - first, None))

    return predict


def in_phases(costs: JobCosts, phases: Sequence[Phase]) -> tuple[Phase, Predict]:
    """What is drawn of iterations with several phases: each pass as it was measured, in a row.

    Returns:
        the contexts of all these phases, and their prediction.
    """
    contexts = tuple(context for phase in phases for context in phase.contexts)
    drawn = Phase(name="iteration", order="sequential", contexts=contexts)

    def predict(_first: int, _step: int, lanes: Sequence[Passes]) -> Timeline:
        """Passes one after the other, each of the microbatches that it was measured with."""
        timeline = Timeline(((),) * len(drawn.lanes))
        for phase in phases:
            for run in _measured_runs(costs, phase, lanes):
                (predicted,) = run.passes()
                timeline = timeline.then(_on_lanes(predicted, run.phase, drawn.lanes))
        return timeline

    return drawn, predict


def _measured_runs(costs: JobCosts, phase: Phase, lanes: Sequence[Passes]) -> list[PredictedRun]:
    """One for every pass of a phase; of a trained group, one model may be trained alone."""
    counts: dict[str, list[int]] = {}
    for group in phase.colocated:
        for some in (group, *((context,) for context in group)):
            numbers = _num_microbatches(lanes, pass_name(phase, some))
            if numbers:
                counts |= {context.role: numbers for context in some}
    at_work = tuple(context for context in phase.contexts if context.role in counts)
    working = replace(phase, contexts=at_work)
    num_passes = max(map(len, counts.values()), default=0)
    return [
        predicted_run(costs, working, {r: lambda _, n=c[number]: n for r, c in counts.items()})
        for number in range(num_passes)
    ]


def _on_lanes(timeline: Timeline, phase: Phase, lanes: Sequence[int]) -> Timeline:
    """A phase's timeline on the lanes of a picture that shows more; the others are idle."""
    by_parts = {
        tuple(context.part(rank) for context in phase.contexts): spans
        for rank, spans in zip(phase.lanes, timeline.ranks, strict=True)
    }
    return Timeline(
        tuple(by_parts.get(tuple(c.part(rank) for c in phase.contexts), ()) for rank in lanes)
    )


def _num_microbatches(lanes: Sequence[Passes], name: str) -> list[int]:
    """How many microbatches each execution of ``name`` in a step ran, in order."""
    found: dict[int, int] = {}
    for passes in lanes:
        for (other, number), each in passes.items():
            if other == name:
                ran = 1 + max((span.action.microbatch for span in each.spans), default=-1)
                found[number] = max(found.get(number, 0), ran)
    return [found[number] for number in sorted(found)]


def measured(lanes: Sequence[Passes]) -> Timeline:
    """What the lanes' ranks recorded, on one clock; 0 is when the first execution began.

    An execution begins on all ranks of its pipeline when the last of them gets there.
    """
    starts: dict[tuple[str, int], float] = {}
    for passes in lanes:
        for key, each in passes.items():
            starts[key] = max(starts.get(key, 0.0), each.start)
    first = min(starts.values(), default=0.0)
    return Timeline(
        tuple(
            tuple(
                Span(s.action, starts[key] - first + s.start, starts[key] - first + s.end)
                for key, each in passes.items()
                for s in each.spans
            )
            for passes in lanes
        )
    )


def side_by_side(title: str, predicted: Timeline, measured: Timeline) -> list[Panel]:
    """Both timelines, the prediction at the speed that was measured.

    FLOPs predict how actions compare with each other; how fast they run here, their sum tells.
    """
    ranks = range(len(measured.ranks))
    busy, expected = (sum(map(t.busy, ranks)) for t in (measured, predicted))
    factor = busy / expected if busy and expected else 1.0
    scaled = Timeline(
        tuple(
            tuple(Span(s.action, s.start * factor, s.end * factor) for s in rank)
            for rank in predicted.ranks
        )
    )
    speed = FLOPS_PER_SECOND / factor / 1e12
    return [
        Panel(f"{title}, predicted (FLOPs at the measured {speed:.3g} TFLOP/s)", scaled),
        Panel(f"{title}, measured", measured),
    ]
