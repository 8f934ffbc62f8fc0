"""``puzzle-align profile``: measure a config's models and the machine's links."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from puzzle_align.cli.arguments import WIDTH, add_config, positive, positives
from puzzle_align.config.load import find_config, load_file

_DESCRIPTION = (
    "Measure the times of a config's models on this hardware, and the links between its ranks, and "
    "write them to profile.json, from which plans are chosen. One device is enough for the models "
    "under any plan: one tensor rank's share is measured alone, with a few layers. Links are "
    "measured between the ranks that torchrun started; others can be declared."
)
DEFAULT_REPEATS = 7


def main(arguments: Sequence[str]) -> None:
    """Measure on the ranks that torchrun started; ValueError for a wrong argument or file."""
    args = _parser().parse_intermixed_args(arguments)
    job = load_file(find_config(args.config), args.overrides)
    from puzzle_align.commands.profile import ProfileRequest, declare_profile, profile_job

    request = ProfileRequest(
        output=args.output,
        tensor=args.tensor,
        tokens=args.tokens,
        links=args.links,
        repeats=args.repeats or DEFAULT_REPEATS,
    )
    if args.declare is not None:
        if args.repeats is not None:
            raise ValueError("--repeats: --declare measures nothing; leave it out")
        declare_profile(job, request, args.declare)
    else:
        profile_job(job, request)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align profile",
        description=textwrap.fill(_DESCRIPTION, WIDTH),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="default: profile.json; an existing file is replaced",
    )
    parser.add_argument(
        "--tensor",
        type=positives,
        default=(),
        metavar="N,N,...",
        help="tensor sizes; default: those of 1, 2, 4, 8 (without a GPU: 1, 2) that divide the "
        "models",
    )
    parser.add_argument(
        "--tokens",
        type=positives,
        default=(),
        metavar="N,N,...",
        help="tokens of a row; default: packing.row_tokens times 1/4, 1/2, 1 and 2, where that "
        "holds the longest example",
    )
    parser.add_argument(
        "--declare",
        metavar="NAME",
        help="measure nothing and take the figures of a data sheet: a100-sxm, a100-pcie, h100 or "
        "h200, in nodes of 8, with links of the same name unless --links names others; for "
        "planning without such a machine",
    )
    parser.add_argument(
        "--links",
        metavar="NAME|FILE",
        help="declare the links that cannot be measured here: a100-sxm, a100-pcie, h100, h200, or "
        "a YAML file with bandwidth (bytes a second and direction) and latency (seconds) of node "
        "and of network",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        metavar="R",
        help=f"measurements, after a warm-up, of which the median is taken; default: "
        f"{DEFAULT_REPEATS}, more for short ones",
    )
    return parser
