"""``puzzle-align plan``: choose a job's plans from a profile, and explain the choice."""

import argparse
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path

from puzzle_align.cli.arguments import add_config, positive, positives
from puzzle_align.config.check import check_unplanned
from puzzle_align.config.load import find_config, load_file
from puzzle_align.files.messages import shown

SEARCHES = ("auto", "exhaustive", "similarity")


def main(arguments: Sequence[str]) -> None:
    """Plan a job; ValueError if config, data or profile are wrong, or no plan fits."""
    args = _parser().parse_intermixed_args(arguments)
    job = load_file(find_config(args.config), args.overrides)
    check_unplanned(job)
    from puzzle_align.commands import plan

    asked = plan.Asked(
        num_ranks=args.gpus,
        ranks_per_node=args.ranks_per_node,
        memory_bytes=None if args.memory is None else int(args.memory * 2**30),
        margin=args.margin,
        search=args.search,
        response_tokens=args.response_tokens,
        keep=args.top,
        output=args.output,
        png=args.png,
    )
    plan.make_plan(args.overrides, job, args.profile, asked)


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)}: give a number of at least 0, below 1")
    return value


def _above_zero(text: str) -> float:
    value = _number(text)
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{shown(text)}: give a number above 0")
    return value


def _number(text: str) -> float:
    """Parse a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return nan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align plan",
        description=(
            "Choose the parallel plan of every model and phase of a job, the sizes of its "
            "microbatches and how models share ranks, for the fastest iteration according to the "
            "measurements of launch/profile.py. Nothing is trained, no GPU is needed; the plans "
            "in the config are ignored."
        ),
    )
    add_config(parser)
    parser.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="of launch/profile.py"
    )
    _add_cluster(parser)
    parser.add_argument(
        "--output", type=Path, default=Path("plan.json"), metavar="FILE", help="default: plan.json"
    )
    parser.add_argument(
        "--search",
        choices=SEARCHES,
        default="auto",
        help="exhaustive: tries all plans; similarity: only plans near that of training; auto: "
        "exhaustive on up to 512 ranks",
    )
    parser.add_argument(
        "--response-tokens",
        type=_above_zero,
        metavar="N",
        help="mean length of a sampled response; default: generation.max_new_tokens",
    )
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="plans to report (5)")
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="also draw the passes (for several numbers of ranks: the throughput)",
    )
    return parser


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the cluster."""
    parser.add_argument(
        "--gpus",
        type=positives,
        required=True,
        metavar="N[,N...]",
        help="ranks to plan for; several: print how throughput grows, and write no plan",
    )
    parser.add_argument(
        "--ranks-per-node", type=positive, metavar="N", help="default: the profile's"
    )
    parser.add_argument(
        "--memory", type=_above_zero, metavar="GiB", help="memory of a rank; default: the profile's"
    )
    parser.add_argument(
        "--margin",
        type=_share,
        default=0.05,
        metavar="SHARE",
        help="share of the memory kept free, for fragments (0.05)",
    )
