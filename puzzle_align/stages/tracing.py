"""Traces of training steps, measured action by action and drawn beside the prediction."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from puzzle_align.config.job import JobConfig
from puzzle_align.layout.job_plan import Phase
from puzzle_align.planning.costs.flops import FLOPS_PER_SECOND
from puzzle_align.planning.picture.panel import Panel, save_trace
from puzzle_align.planning.picture.png import save_png
from puzzle_align.planning.picture.text import draw_text
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.runtime.groups.collectives import barrier, from_rank_zero, gather_on_rank_zero
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.moments import now
from puzzle_align.runtime.phases import pass_name
from puzzle_align.schedules.timeline import Span, Timeline
from puzzle_align.stages.costs import JobCosts, predicted_run

NUM_SKIPPED = 2  # first steps of a run: they compile, allocate, and nothing has run ahead of them
TEXT_WIDTH = 200

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pass:
    """Record of one execution of an action list: ``spans`` relative to ``start``, in seconds."""

    start: float
    spans: list[Span]


Passes = dict[tuple[str, int], Pass]  # by name, and number of earlier executions in the step
# (first step of the run, step from 0, measured passes of the drawn lanes) -> predicted timeline.
Predict = Callable[[int, int, Sequence[Passes]], Timeline]


class Tracer:
    """Traces ``telemetry.trace_steps`` steps of a run, after its first two.

    Every rank has one, runs each step within ``step``, and passes the result of ``spans`` to each
    execution of an action list. Rank 0 then writes ``trace/step_N.json`` (Chrome trace) and
    ``trace/step_N.txt`` in the job's output folder, and ``.png`` where matplotlib is installed; N
    counts from 1, as in ``metrics.jsonl``.
    """

    def __init__(self, config: JobConfig, world: World, drawn: Phase, predict: Predict) -> None:
        """``drawn`` has the contexts to draw; a picture has its lanes."""
        self._folder = Path(config.output_dir) / "trace"
        self._num_left = config.telemetry.trace_steps
        self._num_skipped = 0
        self._world = world
        self._drawn = drawn
        self._predict = predict
        self._by_flops = config.placement.profile is None
        self._first: int | None = None  # step of the run
        self._began = 0.0
        self._passes: Passes | None = None  # None: this step is not traced

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the block as step ``step`` (from 0), if it is to be traced. Collective.

        Steps come in order, from any first step.
        """
        if self._first is None:
            self._first = step
        if self._num_skipped < NUM_SKIPPED or self._num_left == 0:
            self._num_skipped += 1
            yield
            return
        barrier()
        self._began, self._passes = now(self._world.device), {}
        yield
        everyone, self._passes = gather_on_rank_zero(self._passes), None
        from_rank_zero(lambda: self._try_to_write(step, everyone or []))
        self._num_left -= 1

    def spans(self, name: str) -> list[Span] | None:
        """List for the next execution of ``name`` to record in; None if the step is not traced.

        All ranks of one pipeline call it right before the same executions.
        """
        if self._passes is None:
            return None
        number = sum(other == name for other, _ in self._passes)
        self._passes[name, number] = Pass(now(self._world.device) - self._began, [])
        return self._passes[name, number].spans

    def _try_to_write(self, step: int, everyone: Sequence[Passes]) -> None:
        """Write the step; a full disk or a broken matplotlib does not end the training."""
        try:
            self._write(step, everyone)
        except (OSError, ImportError) as error:
            _logger.warning("telemetry.trace_steps: step %d was not written: %s", step + 1, error)

    def _write(self, step: int, everyone: Sequence[Passes]) -> None:
        assert self._first is not None
        lanes = [everyone[rank] for rank in self._drawn.lanes]
        predicted = self._predict(self._first, step, lanes)
        title = f"step {step + 1}"
        panels = side_by_side(title, predicted, measured(lanes), by_flops=self._by_flops)
        panels = [replace(panel, labels=self._drawn.lane_names) for panel in panels]
        stem = self._folder / f"step_{step + 1}"
        save_trace(panels, stem.with_suffix(".json"))
        stem.with_suffix(".txt").write_text(draw_text(panels, TEXT_WIDTH), encoding="utf-8")
        if find_spec("matplotlib") is not None:
            save_png(panels, stem.with_suffix(".png"))


def in_steps(run: PredictedRun) -> Predict:
    """Predict steps that are successive passes of a run."""

    def predict(first: int, step: int, _lanes: Sequence[Passes]) -> Timeline:
        return next(islice(run.passes(first), step - first, None))

    return predict


def in_phases(costs: JobCosts, phases: Sequence[Phase]) -> tuple[Phase, Predict]:
    """Predict iterations of several phases: the passes that were measured, one after the other.

    Returns:
        the contexts of all these phases, and the prediction.
    """
    contexts = tuple(context for phase in phases for context in phase.contexts)
    drawn = Phase(name="iteration", order="sequential", contexts=contexts)

    def predict(_first: int, _step: int, lanes: Sequence[Passes]) -> Timeline:
        """Chain passes with the measured numbers of microbatches."""
        timeline = Timeline(((),) * len(drawn.lanes))
        for phase in phases:
            for run in _measured_runs(costs, phase, lanes):
                (predicted,) = run.passes()
                timeline = timeline.then(_on_lanes(predicted, run.phase, drawn.lanes))
        return timeline

    return drawn, predict


def _measured_runs(costs: JobCosts, phase: Phase, lanes: Sequence[Passes]) -> list[PredictedRun]:
    """Predict every measured pass of a phase; one model of a colocated group may train alone."""
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
    """Put a phase's timeline on ``lanes`` of a larger picture; the other lanes are idle."""
    by_parts = {
        tuple(context.part(rank) for context in phase.contexts): spans
        for rank, spans in zip(phase.lanes, timeline.ranks, strict=True)
    }
    return Timeline(
        tuple(by_parts.get(tuple(c.part(rank) for c in phase.contexts), ()) for rank in lanes)
    )


def _num_microbatches(lanes: Sequence[Passes], name: str) -> list[int]:
    """Numbers of microbatches that the executions of ``name`` in a step ran, in order."""
    numbers: dict[int, int] = {}
    for passes in lanes:
        for (other, number), each in passes.items():
            if other == name:
                ran = 1 + max((span.action.microbatch for span in each.spans), default=-1)
                numbers[number] = max(numbers.get(number, 0), ran)
    return [numbers[number] for number in sorted(numbers)]


def measured(lanes: Sequence[Passes]) -> Timeline:
    """Merge the records of the lanes' ranks on one clock; 0 is the start of the first execution.

    An execution starts on all ranks of its pipeline when the last of them arrives.
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


def side_by_side(
    title: str, predicted: Timeline, measured: Timeline, *, by_flops: bool
) -> list[Panel]:
    """Panels of both timelines.

    Args:
        by_flops: the prediction has only ratios of actions' times: scale it to the measured speed.
    """
    how = "by the profile"
    if by_flops:
        ranks = range(len(measured.ranks))
        busy, expected = (sum(map(t.busy, ranks)) for t in (measured, predicted))
        factor = busy / expected if busy and expected else 1.0
        speed = FLOPS_PER_SECOND / factor / 1e12
        how, predicted = f"FLOPs at the measured {speed:.3g} TFLOP/s", predicted.scaled(factor)
    return [
        Panel(f"{title}, predicted ({how})", predicted),
        Panel(f"{title}, measured", measured),
    ]
