"""``puzzle-align prepare``: pack a job's preference data once, for data.format=packed."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from puzzle_align.cli.arguments import add_config
from puzzle_align.config.check import check_keys
from puzzle_align.config.load import find_config, load_file


def main(arguments: Sequence[str]) -> None:
    """Pack, on one process; ValueError if config or data are wrong, or the output exists."""
    args = _parser().parse_intermixed_args(arguments)
    job = load_file(find_config(args.config), args.overrides)
    check_keys(job)
    from puzzle_align.commands import prepare

    prepare.pack_data(job, args.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align prepare",
        description=(
            "Tokenize the data.train of a job and pack it into memory-mapped rows. Prints the "
            "lengths and the fill of the rows. Training with data.format=packed "
            "data.train=OUTPUT has the batches of packing.scope=dataset on the same data and seed."
        ),
    )
    add_config(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="a new directory to write"
    )
    return parser
