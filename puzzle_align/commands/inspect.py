"""Show the schedules of a job's phases without running the job."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Literal

from puzzle_align.commands.summary import save_file, say
from puzzle_align.config.job import JobConfig
from puzzle_align.config.parallel import with_layers
from puzzle_align.config.resolve import Job
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.layout.job_plan import ContextPlan, Phase, sharing_obstacle
from puzzle_align.layout.plan import layers_text
from puzzle_align.planning.picture.panel import Panel, in_shares, save_trace, time_text
from puzzle_align.planning.picture.png import save_png
from puzzle_align.planning.picture.text import draw_text
from puzzle_align.planning.prediction import Count, PredictedRun
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.schedules.timing import busiest_rank
from puzzle_align.stages.costs import job_costs, predicted_run
from puzzle_align.stages.outlook import open_outlook, plural
from puzzle_align.telemetry.text import ranks_text

DEFAULT_STEPS = 3  # steps drawn by default
# Steps until the steady state (nothing has run ahead of the first ones), and steps averaged.
NUM_SETTLING, NUM_STEADY = 3, 4


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options of a picture: the width and colour of its text, and the files to write."""

    width: int
    colour: bool
    png: Path | None
    trace: Path | None


@dataclass(frozen=True)
class _Drawn:
    """A phase's run, and the same work in another order or with other layers.

    ``why_none`` is the reason if there is no other order.
    """

    run: PredictedRun
    others: tuple[PredictedRun, ...]
    why_none: str

    @property
    def all(self) -> list[PredictedRun]:
        """Runs to draw: the job's, then the alternatives."""
        return [self.run, *self.others]


@dataclass(frozen=True)
class _Usual:
    """Timelines of ``passes`` usual passes in each order of a phase, the job's first."""

    timelines: list[Timeline]
    passes: int = 1
    title: str = ""

    @property
    def times(self) -> list[float]:
        """Time of a pass in each order."""
        return [timeline.makespan / self.passes for timeline in self.timelines]


def show_schedule(
    job: Job,
    output: Output,
    *,
    num_steps: int | None,
    num_microbatches: int | None,
    compare: bool,
) -> None:
    """Draw the predicted phases of a job, and print their times.

    A phase of training steps is drawn for its first steps, with the time of a step in steady
    state; another phase for one pass.

    Args:
        num_steps: most steps to draw; None: ``DEFAULT_STEPS``.
        num_microbatches: of the first trained model in a pass; None: as the stage counts them.
        compare: below each phase, draw the same work in the other order; for training steps also
            with even or balanced layers, if they differ from the job's.

    Raises:
        ValueError: one line, if a phase cannot be drawn or compared, or a file cannot be written.
    """
    config, plan = job.config, job.plan
    if num_steps is not None and not any(phase.name == "train" for phase in plan.phases):
        raise ValueError(
            f"--steps: stage {config.stage} is drawn with one pass of each phase; leave it out"
        )
    num_steps = num_steps or DEFAULT_STEPS
    for role, context in plan.models.items():
        say(f"{role}: {context.model.model_type}, {context.plan}, {ranks_text(context.ranks)}")
    measured = config.placement.profile
    if measured is None:
        say("times: shares, by FLOPs and without transfers (--profile measures seconds)")
    else:
        say(f"times: measured, of {measured}, with transfers")
    outlook = open_outlook(config)
    if num_microbatches is None:
        say(*outlook.assumptions())
        runs = outlook.counted_runs(plan)
    else:
        runs = outlook.runs_of(plan, num_microbatches, num_steps + 1)
    drawn = [_drawn(job, run) for run in runs]
    if compare and not any(each.others for each in drawn):
        raise ValueError(f"--compare: {_why_none(drawn)}; leave it out")
    panels = [
        _panel(run, each.run, num_steps)
        for each in drawn
        for run in (each.all if compare else [each.run])
    ]
    _show_panels(panels if measured else in_shares(panels), output)
    usual = [_usual(each, min(num_steps, each.run.num_passes)) for each in drawn]
    whole = None if measured else max(each.times[0] for each in usual)
    for each, passes in zip(drawn, usual, strict=True):
        say(*_time_lines(each, passes, whole))


def _drawn(job: Job, run: PredictedRun) -> _Drawn:
    """Add alternatives on the same ranks: the other order of contexts, and other layers."""
    obstacle = _obstacle(job, run.phase)
    others: list[PredictedRun] = []
    if obstacle is None:
        shares = run.phase.order == "time_shared"
        others.append(run.in_order("sequential" if shares else "time_shared"))
    if _is_stepwise(run):
        others += _with_other_layers(job.config, run)
    return _Drawn(run, tuple(others), obstacle or "")


def _obstacle(job: Job, phase: Phase) -> str | None:
    """Reason why the contexts have no other order; None if they have one."""
    if phase.order == "time_shared":
        return None
    if phase.order == "concurrent" and phase.is_fed:
        return "with placement.reference=concurrent the reference has separate ranks"
    if phase.name == "train" and not phase.is_fed:
        return "no reference runs while the policy trains"
    loss = job.config.reference_loss
    obstacle = None if loss is None or not phase.is_fed else loss.sequence_reason
    obstacle = obstacle or sharing_obstacle(phase.contexts)
    return f"no time-sharing, since {obstacle}" if obstacle and phase.is_fed else obstacle


def _with_other_layers(config: JobConfig, run: PredictedRun) -> list[PredictedRun]:
    """Runs with even and with balanced layers, if they differ from the job's."""
    runs = {run.phase.trained[0].plan: run}
    for layers in (None, "auto"):
        contexts = tuple(_with_layers(config, context, layers) for context in run.phase.contexts)
        phase = replace(run.phase, contexts=contexts)
        other = predicted_run(job_costs(config), phase, run.num_microbatches, run.num_passes)
        runs.setdefault(phase.trained[0].plan, other)
    return list(runs.values())[1:]


def _with_layers(
    config: JobConfig, context: ContextPlan, layers: Literal["auto"] | None
) -> ContextPlan:
    parallel = ParallelConfig(pipeline_layers=layers, recompute=context.options.recompute)
    train = context.workload == "train"
    plan = with_layers(context.plan.grid, config, parallel, context.model, train=train)
    return replace(context, plan=plan)


def _is_stepwise(run: PredictedRun) -> bool:
    """Whether the passes are training steps, of which one may run work of the next."""
    return run.phase.name == "train"


def _why_none(drawn: Sequence[_Drawn]) -> str:
    if len(drawn) == 1:
        return drawn[0].why_none
    reasons = "; ".join(f"{each.run.phase.name}: {each.why_none}" for each in drawn)
    return f"no time-sharing ({reasons})"


def _show_panels(panels: Sequence[Panel], output: Output) -> None:
    """Draw the panels, and write the requested files."""
    say(draw_text(panels, output.width, colour=output.colour))
    for flag, path, save in (
        ("--png", output.png, save_png),
        ("--trace", output.trace, save_trace),
    ):
        if path is not None:
            save_file(flag, path, partial(save, panels))


def _panel(run: PredictedRun, job_run: PredictedRun, num_steps: int) -> Panel:
    stepwise = _is_stepwise(run)
    passes = list(islice(run.passes(), num_steps if stepwise else 1))
    *marks, _ = accumulate(each.makespan for each in passes)
    title = _steps_title(run, len(passes)) if stepwise else _pass_title(run)
    title += _other_layers(run, job_run)
    return Panel(title, _chained(passes), tuple(marks), run.phase.lane_names)


def _steps_title(run: PredictedRun, num_steps: int) -> str:
    count = run.num_microbatches[run.phase.trained[0].role]
    counts = [count(step) for step in range(num_steps)]
    of_steps = ", ".join(map(str, counts)) if len(set(counts)) > 1 else f"{counts[0]}"
    steps = f"{num_steps} step{'s' * (num_steps > 1)}"
    models = f"reference {run.phase.order}" if run.phase.is_fed else _alone(run)
    return f"{models}, {steps} of {plural(of_steps)}"


def _pass_title(run: PredictedRun) -> str:
    counts = {role: count(0) for role, count in run.num_microbatches.items()}
    if len(set(counts.values())) == 1:
        work = f"{', '.join(counts)}: {plural(next(iter(counts.values())))}"
    else:
        work = ", ".join(f"{role}: {number}" for role, number in counts.items()) + " microbatches"
    return f"{run.phase.name}, {_order(run)}, {work}"


def _order(run: PredictedRun) -> str:
    return run.phase.order if len(run.phase.contexts) > 1 else "alone"


def _alone(run: PredictedRun) -> str:
    role = run.phase.trained[0].role
    return "policy alone" if role == "actor" else f"{role} model alone"


def _other_layers(run: PredictedRun, job_run: PredictedRun) -> str:
    """Text on a run's split of layers; empty if it is the job's."""
    plans = [[context.plan for context in each.phase.trained] for each in (run, job_run)]
    if plans[0] == plans[1]:
        return ""
    return f", layers {layers_text(plans[0][0]) or 'even'}"


def _chained(passes: Sequence[Timeline]) -> Timeline:
    first, *rest = passes
    for each in rest:
        first = first.then(each)
    return first


def _usual(drawn: _Drawn, num_steps: int) -> _Usual:
    """A usual pass in each order: a training step in steady state, or a pass of another phase."""
    if not _is_stepwise(drawn.run):
        return _Usual([next(run.passes()) for run in drawn.all])
    count = drawn.run.num_microbatches[drawn.run.phase.trained[0].role]
    counts = [count(step) for step in range(num_steps)]
    microbatches = Counter(counts).most_common(1)[0][0]
    timelines = [_steady_steps(run, counts.index(microbatches)) for run in drawn.all]
    return _Usual(timelines, NUM_STEADY, f"steady state, {plural(microbatches)} a step:")


def _time_lines(drawn: _Drawn, usual: _Usual, whole: float | None) -> Iterator[str]:
    """Lines of a usual pass in each order, the job's first; in shares of ``whole``, if given."""
    stepwise = _is_stepwise(drawn.run)
    if stepwise:
        yield usual.title
        names = [
            (run.phase.order if run.phase.is_fed else _alone(run)) + _other_layers(run, drawn.run)
            for run in drawn.all
        ]
        what, nothing = "a step", "nothing to compare with"
    else:
        names = [f"{run.phase.name:<6} {_order(run)}" for run in drawn.all]
        nothing = "    no time-sharing"
        what = "a mini-batch" if drawn.run.phase.trained else "an iteration"
    width, first = max(12 if stepwise else 19, *map(len, names)), usual.times[0]
    for name, timeline, time in zip(names, usual.timelines, usual.times, strict=True):
        shown = time_text(time) if whole is None else f"{100 * time / whole:.0f}%"
        line = f"  {name:<{width}} {shown:>8} {what}, idle {100 * timeline.idle_share():.1f}%"
        if timeline is not usual.timelines[0]:
            line += f"; {time / first:.3f} times as long"
        yield line
    if not drawn.others:
        yield f"{nothing}: {drawn.why_none}"
    elif not stepwise:
        yield from _limit_lines(drawn, usual.times)


def _limit_lines(drawn: _Drawn, makespans: Sequence[float]) -> Iterator[str]:
    """Say that with fewer microbatches than ranks sharing stays below Equation (1), and why."""
    run = drawn.run
    number = min(count(0) for count in run.num_microbatches.values())
    num_ranks = run.phase.contexts[0].plan.pipeline
    if len(run.phase.trained) != 2 or number >= num_ranks:
        return
    orders = dict(zip((each.phase.order for each in drawn.all), makespans, strict=True))
    reached = orders["sequential"] / orders["time_shared"]
    work = [busiest_rank({role: costs}, num_ranks) for role, costs in run.costs.items()]
    allowed = (number + num_ranks - 1) * sum(work)
    allowed /= number * sum(work) + (num_ranks - 1) * max(work)
    yield (
        f"    {plural(number)} on {num_ranks} pipeline ranks: {reached:.2f} times faster, by "
        f"PUZZLE's Equation (1) {allowed:.2f} times, which would keep more activations on a rank "
        "than the models one after the other do"
    )


def _steady_steps(run: PredictedRun, like: int) -> Timeline:
    """``NUM_STEADY`` steps in the middle of a run whose steps are all like step ``like``."""

    def always(count: Count) -> Count:
        number = count(like)
        return lambda _: number

    counts = {role: always(count) for role, count in run.num_microbatches.items()}
    num_passes = NUM_SETTLING + NUM_STEADY + 1
    endless = replace(run, num_microbatches=counts, num_passes=num_passes)
    return _chained(list(islice(endless.passes(), NUM_SETTLING, NUM_SETTLING + NUM_STEADY)))
