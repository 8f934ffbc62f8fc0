#!/usr/bin/env python3
"""Measure this project on one GPU, in ten minutes and without a network: JSON and Markdown.

    python tools/gpu_report.py                        # gpu_report.json and gpu_report.md
    python tools/gpu_report.py --parts layouts host   # some parts alone
    python tools/gpu_report.py --dry-run              # all of it on a CPU, tiny: does it run

The parts run one after the other in a separate process. A part that fails, hangs or kills this
process is noted with the reason and its results so far; the other parts still run.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench_run import parser_of
from report.process import read_parts, run_isolated, run_parts
from report.text import markdown

if TYPE_CHECKING:
    from report.setting import Setting

# Title and most seconds, in the order of running: figures with goals come first. The tests take the
# remaining time.
PARTS = {
    "environment": ("Machine", 30.0),
    "ceilings": ("Ceilings", 30.0),
    "layers": ("A few layers alone", 60.0),
    "whole_model": ("The whole model, and its memory", 170.0),
    "layouts": ("Layouts and backends", 150.0),
    "losses": ("Loss by precision", 80.0),
    "host": ("Host over varied batches", 60.0),
    "whole_model_fp8": ("The whole model, its policy in FP8", 80.0),
    "switches": ("Switches, each alone", 110.0),
    "generation": ("Generation", 60.0),
    "kernels": ("Kernels of a microbatch", 40.0),
    "tests": ("Tests that need a GPU", 400.0),
}
_DRY_RUN_LIMIT = 300.0  # of a part, on whatever machine the tests run


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="on a CPU, with a tiny model")
    add("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="these alone")
    add("--minutes", type=float, default=9.8, help="for all parts together (9.8)")
    add("--output", type=Path, default=Path(), metavar="FOLDER", help="for the two files (here)")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: give a positive number")
    return options


def measure(folder: Path, dry_run: bool, names: list[str]) -> None:
    """Run parts in this process, which is a fork of the report's."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's puzzle_align
    from puzzle_align.runtime.groups.limits import set_cuda_defaults

    set_cuda_defaults()
    from report import machine, runs, steps
    from report.setting import DRY, FULL

    modules = (machine, runs, steps)
    parts = {
        name: next(getattr(module, name) for module in modules if hasattr(module, name))
        for name in names
    }
    setting: Setting = DRY if dry_run else FULL
    run_parts(names, parts, setting, folder)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 1 if a part has failed."""
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    names = [name for name in PARTS if name in options.parts]
    limits = {name: _DRY_RUN_LIMIT if options.dry_run else PARTS[name][1] for name in names}
    deadline = time.monotonic() + 60 * options.minutes
    titles = {name: title for name, (title, _) in PARTS.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def write() -> None:
            """Write the results so far, in case the report is ended early."""
            results = read_parts(names, folder)
            (options.output / "gpu_report.json").write_text(json.dumps(results, indent=1))
            text = markdown(results, titles, dry_run=options.dry_run)
            (options.output / "gpu_report.md").write_text(text)

        run_isolated(limits, partial(measure, folder, options.dry_run), folder, deadline, write)
        results = read_parts(names, folder)
    failed = [f"{name}: {part['error']}" for name, part in results.items() if "error" in part]
    for line in failed:
        print(f"gpu_report: failed: {line}", file=sys.stderr)
    print(f"gpu_report: {options.output / 'gpu_report.md'}{os.linesep}", end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
