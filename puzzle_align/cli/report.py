"""``puzzle-align report RUN...``: write a page about one or several runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Write the page; ValueError if a folder is no run, or the page cannot be written."""
    args = _parser().parse_args(arguments)
    output = args.output or args.runs[0] / "report.html"
    from puzzle_align.commands.report.page import write_page
    from puzzle_align.commands.summary import say

    write_page(args.runs, output)
    say(f"wrote {output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="puzzle-align report",
        description="Write one HTML file about runs, finished or not: curves over each other, "
        "times predicted and measured, traced schedules, samples, configs. The file needs nothing "
        "else, nor a network.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a job's output_dir")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in the first RUN"
    )
    return parser
