"""Traced steps: which they are, how passes of several ranks come on one clock, what is written."""

import json
import time
from pathlib import Path

import pytest
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.output import TelemetryConfig
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.runtime.groups.world import World
from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.timeline import Span, Timeline
from puzzle_align.stages.tracing import Pass, Tracer, in_steps, measured, side_by_side
from tests.dist.spawn import run_ranks
from tests.unit.job_plans import TWO, fed, uniform_run

FIRST, LAST, NUM_TRACED = 5, 10, 2  # steps of a resumed run
LATE_S = 0.6  # what one rank comes later to the policy's pass
FORWARD_S = 0.01


def test_two_steps_after_the_first_two_are_written(tmp_path: Path) -> None:
    traced = run_ranks(_train, 2, str(tmp_path))
    assert traced == [[7, 8]] * 2  # steps 5 and 6 are the run's first two
    names = ["step_8.json", "step_8.png", "step_8.txt", "step_9.json", "step_9.png", "step_9.txt"]
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == names
    events = json.loads((tmp_path / "trace" / "step_8.json").read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert (
        titles[0].startswith("step 8, predicted (FLOPs at the ") and titles[1] == "step 8, measured"
    )
    predicted, found = ([e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in (1, 2))
    assert sorted((e["tid"], e["name"]) for e in predicted) == sorted(
        (e["tid"], e["name"]) for e in found
    )
    starts = {(e["tid"], e["name"]): e["ts"] for e in found}
    # The policy's pass begins on both ranks when the late one is there, LATE_S after it began the
    # reference's (rank 0 has it recorded from 0, rank 1 from FORWARD_S on), which rank 0 may have
    # begun a little later.
    policy = starts[1, "actor:F0.0"]
    assert policy >= LATE_S / 2 * 1e6
    assert starts[2, "actor:F0.0"] - policy == pytest.approx(FORWARD_S * 1e6)
    assert starts[1, "reference:F0.0"] == 0
    shown = (tmp_path / "trace" / "step_8.txt").read_text()
    assert shown.count("\nP0 ") == shown.count("\nP1 ") == 2


def _train(rank: int, world_size: int, folder: str) -> list[int]:
    config = JobConfig(output_dir=folder, telemetry=TelemetryConfig(trace_steps=NUM_TRACED))
    run, world = _run(), World(rank, world_size, torch.device("cpu"))
    tracer = Tracer(config, world, run.phase, in_steps(run))
    traced = []
    for step in range(FIRST, LAST):
        with tracer.step(step):
            for model in ("reference", "actor"):
                time.sleep(LATE_S * (rank == 1 and model == "actor"))
                spans = tracer.spans(model)
                if spans is not None:
                    spans.extend(_recorded(model, rank))
        if spans is not None:
            traced.append(step)
    return traced


def _run() -> PredictedRun:
    """One microbatch a step, on two pipeline ranks."""
    return uniform_run(fed(TWO, TWO), counts={"reference": 1, "actor": 1}, num_passes=LAST)


def _recorded(model: str, rank: int) -> list[Span]:
    """Spans of an execution, in seconds since the pipeline's ranks met."""
    start = rank * FORWARD_S
    spans = [Span(Action(model, Kind.FORWARD, 0, 0), start, start + FORWARD_S)]
    if model == "actor":
        start = (4 - 2 * rank) * FORWARD_S
        spans.append(Span(Action(model, Kind.BACKWARD, 0, 0), start, start + 2 * FORWARD_S))
    return spans


def test_an_execution_begins_when_its_last_rank_gets_there() -> None:
    forward = Span(Action("a", Kind.FORWARD, 0, 0), 0.25, 0.5)
    ranks = [
        {("a", 0): Pass(1.0, [forward]), ("a", 1): Pass(3.0, [forward])},
        {("a", 0): Pass(2.0, [forward])},
        {("b", 0): Pass(1.5, [forward])},  # on ranks of its own, from the start
    ]
    starts = [[span.start for span in rank] for rank in measured(ranks).ranks]
    assert starts == [[0.75, 1.75], [0.75], [0.25]]


def test_a_prediction_by_flops_gets_the_speed_that_was_measured() -> None:
    forward, backward = Action("a", Kind.FORWARD, 0, 0), Action("a", Kind.BACKWARD, 0, 0)
    guess = Timeline(((Span(forward, 0, 1), Span(backward, 1, 3)),))
    found = Timeline(((Span(forward, 0, 0.5), Span(backward, 0.6, 1.6)),))
    predicted, shown = side_by_side("step 1", guess, found, by_flops=True)
    assert predicted.title.endswith("(FLOPs at the measured 2 TFLOP/s)")
    assert predicted.timeline.ranks == ((Span(forward, 0, 0.5), Span(backward, 0.5, 1.5)),)
    assert shown.timeline is found
    predicted, shown = side_by_side("step 1", guess, found, by_flops=False)
    assert predicted.title.endswith("predicted (by the profile)")
    assert predicted.timeline is guess and shown.timeline is found
