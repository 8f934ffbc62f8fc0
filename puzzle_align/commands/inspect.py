"""What a job would do, shown without doing it: the schedule of its training steps."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from statistics import fmean

from puzzle_align.commands.summary import say
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import time_sharing_obstacle, trained_role
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.picture import (
    Panel,
    draw_text,
    idle_share,
    save_png,
    save_trace,
    time_text,
)
from puzzle_align.planning.steps import PlacedModel, PreferenceRun
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.stages.data_view import plan_view
from puzzle_align.stages.prediction import counted, forecast, same_in_every_step
from puzzle_align.stages.preference.data import prepare, total_steps, train_loader
from puzzle_align.stages.setup import resolve_engine, resolve_roles
from puzzle_align.stages.tokenizer import open_tokenizer

# The first steps of a run have another rhythm: nothing has run ahead of them.
NUM_SETTLING, NUM_STEADY = 3, 4


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a picture is shown: as text so wide, coloured or not, and in the files asked for."""

    width: int
    colour: bool
    png: Path | None
    trace: Path | None


def show_schedule(
    config: JobConfig,
    world_size: int,
    output: Output,
    *,
    num_steps: int,
    num_microbatches: int | None,
    compare: bool,
) -> None:
    """Draw the first steps of a sound job as predicted; tell what one takes in steady state.

    Args:
        num_steps: at most so many, if the job has them.
        num_microbatches: of the policy, in every step; None: counted in the data.
        compare: draw, below, the same steps with the reference placed otherwise.

    Raises:
        ValueError: one line, for what cannot be drawn, compared or written.
    """
    run = _run(config, world_size, num_steps, num_microbatches)
    others, why_none = _alternatives(config, run)
    if compare and not others:
        raise ValueError(f"--compare: {why_none}; leave it out")
    shown = [run, *others] if compare else [run]
    panels = [_panel(each, num_steps) for each in shown]
    show_panels(panels, output)
    for line in _steady_lines([run, *others], min(num_steps, run.num_steps)):
        say(line)
    if why_none:
        say(f"nothing to compare with: {why_none}")


def show_panels(panels: Sequence[Panel], output: Output) -> None:
    """Draw the panels, and write the files that are asked for.

    Raises:
        ValueError: one line, for a file that cannot be written.
    """
    say(draw_text(panels, output.width, colour=output.colour))
    for flag, path, save in (
        ("--png", output.png, save_png),
        ("--trace", output.trace, save_trace),
    ):
        if path is not None:
            _save(flag, path, save, panels)


def _run(
    config: JobConfig, world_size: int, num_steps: int, num_microbatches: int | None
) -> PreferenceRun:
    """The job's run, described."""
    engine = resolve_engine(config.engine, elsewhere=True)
    setups = resolve_roles(config, engine, world_size)
    for role, setup in setups.items():
        say(f"{role}: {setup.spec.model_type}, {setup.plan}")
    say("times: FLOPs, at 1 TFLOP/s a rank, without transfers; only their ratios mean something")
    trained = setups[trained_role(config)].plan
    if num_microbatches is not None:
        check_multiple(num_microbatches, trained)
        counts = same_in_every_step(num_microbatches, trained, setups)
        return forecast(config, setups, counts, num_steps + 1)
    data = prepare(config, open_tokenizer(config), progress=config.telemetry.progress)
    loader = train_loader(config, data, plan_view(trained, data_rank=0))
    return forecast(config, setups, counted(loader, setups), total_steps(config, loader))


def check_multiple(num_microbatches: int, plan: ParallelPlan) -> None:
    """Raise a one-line ValueError if a model of the plan cannot have so many in a step."""
    multiple = plan_view(plan, data_rank=0)["microbatch_multiple"]
    if num_microbatches % multiple:
        raise ValueError(
            f"--microbatches {num_microbatches}: with model chunks a step takes a multiple of the"
            f" {multiple} pipeline ranks; choose one"
        )


def _alternatives(config: JobConfig, run: PreferenceRun) -> tuple[list[PreferenceRun], str]:
    """The run with its reference placed otherwise on the same ranks; or why there is no such."""
    if run.reference is None:
        return [], "no reference runs while the policy trains"
    if run.placement == "concurrent":
        return [], "with placement.reference=concurrent the reference has ranks of its own"
    if run.placement == "time_shared":
        return [replace(run, placement="sequential")], ""
    obstacle = time_sharing_obstacle(config)
    if obstacle is not None:
        return [], f"no time-sharing, since {obstacle}"
    return [replace(run, placement="time_shared")], ""


def _panel(run: PreferenceRun, num_steps: int) -> Panel:
    steps = list(islice(run.steps(), num_steps))
    *marks, _ = accumulate(step.makespan for step in steps)
    return Panel(_title(run, len(steps)), _chained(steps), tuple(marks), run.row_names)


def _title(run: PreferenceRun, num_steps: int) -> str:
    counts = [run.policy.num_microbatches(step) for step in range(num_steps)]
    of_steps = ", ".join(map(str, counts)) if len(set(counts)) > 1 else f"{counts[0]}"
    steps = f"{num_steps} step{'s' * (num_steps > 1)}"
    microbatches = f"{of_steps} microbatch{'es' * (of_steps != '1')}"
    models = _alone(run) if run.reference is None else f"reference {run.placement}"
    return f"{models}, {steps} of {microbatches}"


def _alone(run: PreferenceRun) -> str:
    return "policy alone" if run.policy.role == "actor" else f"{run.policy.role} model alone"


def _chained(steps: Sequence[Timeline]) -> Timeline:
    first, *rest = steps
    for step in rest:
        first = first.then(step)
    return first


def _steady_lines(runs: Sequence[PreferenceRun], num_steps: int) -> Iterator[str]:
    """What a step takes in the middle of a long run, a line a placement; the first is the job's."""
    policy = runs[0].policy
    counts = [policy.num_microbatches(step) for step in range(num_steps)]
    usual = Counter(counts).most_common(1)[0][0]
    yield f"steady state, {usual} microbatch{'es' * (usual > 1)} a step:"
    own = _steady(runs[0], counts.index(usual)).makespan
    for run in runs:
        steady = _steady(run, counts.index(usual))
        idle = [idle_share(steady, row) for row in range(len(steady.ranks))]
        name = _alone(run) if run.reference is None else run.placement
        line = f"  {name:<12} {time_text(steady.makespan / NUM_STEADY):>8} a step"
        line += f", idle {100 * fmean(idle):.1f}%"
        yield line if run is runs[0] else f"{line}; {steady.makespan / own:.3f} times as long"


def _steady(run: PreferenceRun, like: int) -> Timeline:
    """``NUM_STEADY`` steps in the middle of a run whose steps are all like step ``like``."""

    def always(model: PlacedModel) -> PlacedModel:
        number = model.num_microbatches(like)
        return replace(model, num_microbatches=lambda step: number)

    endless = replace(
        run,
        policy=always(run.policy),
        reference=None if run.reference is None else always(run.reference),
        num_steps=NUM_SETTLING + NUM_STEADY + 1,
    )
    return _chained(list(islice(endless.steps(), NUM_SETTLING, NUM_SETTLING + NUM_STEADY)))


def _save(
    flag: str, path: Path, save: Callable[[Sequence[Panel], Path], None], panels: Sequence[Panel]
) -> None:
    try:
        save(panels, path)
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"{flag} {path}: cannot be written ({why}); name another file") from error
