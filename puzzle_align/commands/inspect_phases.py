"""What a job of stage ppo would do, shown without doing it: the schedules of its phases."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from puzzle_align.commands.inspect import Output, check_multiple, show_panels
from puzzle_align.commands.summary import ranks_text, say
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import phase_obstacle
from puzzle_align.planning.phases import Phase
from puzzle_align.planning.picture import Panel, idle_share, time_text
from puzzle_align.schedules.timeline import Timeline
from puzzle_align.stages.prediction import longest_lengths, phases
from puzzle_align.stages.setup import RoleSetup, resolve_engine, resolve_roles


def show_phases(
    config: JobConfig,
    world_size: int,
    output: Output,
    *,
    num_microbatches: int | None,
    compare: bool,
) -> None:
    """Draw a sound job's score phase and one mini-batch of its learn phase; tell what they take.

    Args:
        num_microbatches: of the actor in a mini-batch; None: as many as there may be.
        compare: draw, below each, the same work in the other order.

    Raises:
        ValueError: one line, for what cannot be drawn, compared or written.
    """
    setups = resolve_roles(config, resolve_engine(config.engine, elsewhere=True), world_size)
    for role, setup in setups.items():
        say(f"{role}: {setup.spec.model_type}, {setup.plan}, {ranks_text(setup.ranks)}")
    say("times: FLOPs, at 1 TFLOP/s a rank, without transfers; only their ratios mean something")
    if num_microbatches is None:
        say(f"microbatches: as many as there may be: {longest_lengths(config)}")
    own = phases(config, setups, _rows(setups, num_microbatches))
    obstacles = {phase.name: phase_obstacle(config, phase.name, world_size) for phase in own}
    if compare and all(obstacles.values()):
        why = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
        raise ValueError(f"--compare: no time-sharing ({why}); leave it out")
    panels, lines = [], []
    for phase in own:
        obstacle = obstacles[phase.name]
        orders = [phase] if obstacle else [phase, replace(phase, time_shared=not phase.streams)]
        timelines = [order.timeline() for order in orders]
        drawn = [_panel(*each) for each in zip(orders, timelines, strict=True)]
        panels += drawn if compare else drawn[:1]
        lines += _lines(orders, timelines)
        if obstacle:
            lines.append(f"    no time-sharing: {obstacle}")
    show_panels(panels, output)
    for line in lines:
        say(line)


def _rows(setups: Mapping[str, RoleSetup], num_microbatches: int | None) -> int | None:
    plan = setups["actor"].plan
    if num_microbatches is None:
        return None
    check_multiple(num_microbatches, plan)
    return num_microbatches * plan.data


def _panel(phase: Phase, timeline: Timeline) -> Panel:
    counts = {model.role: model.num_microbatches for model in phase.models}
    if len(set(counts.values())) == 1:
        number = next(iter(counts.values()))
        microbatches = f"{', '.join(counts)}: {number} microbatch{'es' * (number > 1)}"
    else:
        microbatches = ", ".join(f"{role}: {number}" for role, number in counts.items())
        microbatches += " microbatches"
    return Panel(f"{phase.name}, {phase.order}, {microbatches}", timeline, (), phase.row_names)


def _lines(orders: Sequence[Phase], timelines: Sequence[Timeline]) -> Iterator[str]:
    """What a pass of a phase takes, a line an order; the first is the job's."""
    own = timelines[0].makespan
    what = "a mini-batch" if orders[0].train else "an iteration"
    for phase, timeline in zip(orders, timelines, strict=True):
        idle = fmean(idle_share(timeline, row) for row in range(len(timeline.ranks)))
        line = f"  {phase.name:<6} {phase.order:<12} {time_text(timeline.makespan):>8} {what}"
        line += f", idle {100 * idle:.1f}%"
        yield line if phase is orders[0] else f"{line}; {timeline.makespan / own:.3f} times as long"
