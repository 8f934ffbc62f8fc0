"""``puzzle-align inspect SUBJECT ...``: show a job's schedule or traffic without running it."""

import argparse
import gc
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from puzzle_align.cli.arguments import add_job, command_parser, positive, ranks_to_show, read_job
from puzzle_align.config.resolve import resolve
from puzzle_align.files.messages import shown
from puzzle_align.layout.plan import ParallelPlan

FALLBACK_WIDTH = 120  # if the output is not a terminal and COLUMNS is not set


def main(arguments: Sequence[str]) -> None:
    """Show the subject; ValueError for a wrong config or file."""
    about = "Show what a job would do."
    gc.set_threshold(100_000)  # reading data makes many objects, and hardly any cycles
    args = command_parser("puzzle-align inspect", "SUBJECT", about, SUBJECTS).parse_args(arguments)
    SUBJECTS[args.chosen][0](args.arguments)


def schedule(arguments: Sequence[str]) -> None:
    """Draw the schedule of a job's training steps at predicted costs."""
    args = _schedule_parser().parse_intermixed_args(arguments)
    config, plan = read_job(args)
    if args.profile is not None:
        placement = replace(config.placement, profile=str(args.profile))
        config = replace(config, placement=placement)
    world_size = ranks_to_show(args.world_size, config, plan)
    from puzzle_align.commands import inspect
    from puzzle_align.stages.engine import resolve_engine

    engine = resolve_engine(config.engine, elsewhere=True)
    output = inspect.Output(
        width=shutil.get_terminal_size((FALLBACK_WIDTH, 0)).columns,
        colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
        png=args.png,
        trace=args.trace,
    )
    inspect.show_schedule(
        resolve(config, engine, world_size, plan),
        output,
        num_steps=args.steps,
        num_microbatches=args.microbatches,
        compare=args.compare,
    )


def reshard(arguments: Sequence[str]) -> None:
    """Print the traffic of a switch of plans."""
    args = _reshard_parser().parse_intermixed_args(arguments)
    if (args.source is None) != (args.destination is None):
        raise ValueError("--from and --to: give both, or neither")
    if args.plan is not None and args.source is not None:
        raise ValueError("--from and --to: --plan sets both plans; leave out these, or --plan")
    if args.world_size is not None and args.source is not None:
        raise ValueError("--world-size: --from and --to say how many ranks there are; leave it out")
    config, plan = read_job(args)
    from puzzle_align.commands import inspect_reshard
    from puzzle_align.stages.engine import resolve_engine

    engine = resolve_engine(config.engine, elsewhere=True)
    engine = replace(engine, ranks_per_node=args.ranks_per_node)
    if args.source is not None:
        plans = args.source, args.destination
        switch = inspect_reshard.switch_of_plans(config, engine, plans)
    else:
        world_size = ranks_to_show(args.world_size, config, plan)
        switch = inspect_reshard.switch_of_job(resolve(config, engine, world_size, plan))
    inspect_reshard.show_reshard(
        switch, ranks_per_node=args.ranks_per_node, every_route=args.routes, png=args.png
    )


def _reshard_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align inspect reshard",
        description=(
            "Print the traffic when the actor switches from its training plan to the plan "
            "generation.parallel: bytes that every rank receives and sends, by link, beside the "
            "lower bound. Nothing is trained."
        ),
    )
    add_job(parser)
    parser.add_argument(
        "--from",
        dest="source",
        type=_plan,
        metavar="P,D,T",
        help="with --to: plans for the model that the stage trains first, in place of the "
        "config's; not beside --plan",
    )
    parser.add_argument("--to", dest="destination", type=_plan, metavar="P,D,T")
    _add_world_size(parser)
    parser.add_argument(
        "--ranks-per-node",
        type=positive,
        default=8,
        metavar="N",
        help="default: 8",
    )
    parser.add_argument("--routes", action="store_true", help="list every route")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="also draw the traffic between ranks, and the bytes each receives, as a PNG",
    )
    return parser


def _add_world_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="ranks of the job; default: those of --plan, else the config's, else the fewest that "
        "the job needs",
    )


def _plan(text: str) -> ParallelPlan:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{shown(text)}: give three sizes, as in 2,1,4")
    pipeline, data, tensor = map(int, sizes)
    return ParallelPlan(pipeline=pipeline, data=data, tensor=tensor)


def _schedule_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align inspect schedule",
        description=(
            "Draw the predicted schedule of a run's first training steps, with every microbatch of "
            "every model on each pipeline rank, and print the time of a step with the reference in "
            "the policy's pipeline bubbles and with the reference before it. Nothing is trained. "
            "In the bubbles, the reference's microbatches from M on are the next step's. For stage "
            "ppo: the score phase, and one mini-batch of the learn phase."
        ),
    )
    add_job(parser)
    _add_world_size(parser)
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="a profile.json: its measured times and transfers replace FLOPs, and set the order "
        "of the models (as placement.profile does in a run)",
    )
    parser.add_argument(
        "--microbatches",
        type=positive,
        metavar="M",
        help="microbatches of the policy in a step on a data rank (stage ppo: in a mini-batch); "
        "default: counted in the data (stage ppo: the most possible)",
    )
    parser.add_argument("--steps", type=positive, metavar="K", help="steps to draw; default: 3")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also draw the alternatives: the reference before the policy or in its bubbles "
        "(stage ppo: the other order of the phases), and even or balanced layers",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw it as a PNG")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write it as a Chrome trace, for https://ui.perfetto.dev",
    )
    return parser


SUBJECTS = {
    "schedule": (schedule, "the order and predicted times of a job's passes, as a picture"),
    "reshard": (reshard, "the bytes that move when the actor switches its plan"),
}
