#!/usr/bin/env python3
"""Measure this project on one GPU, without a network: JSON and Markdown.

    python tools/gpu_report.py                        # five calls, ten minutes each at most
    python tools/gpu_report.py --calls whole          # one of them
    python tools/gpu_report.py --parts layouts host   # some parts alone
    python tools/gpu_report.py --calls whole --steps 2 --data hh_rlhf    # about two minutes
    python tools/gpu_report.py --dry-run              # all of it on a CPU, tiny: does it run

A call is a process of its own, with its own --minutes; its parts run one after the other. A part
that fails, hangs or kills its process is noted with the reason, its last output and its results so
far; the other parts still run. gpu_report.json and gpu_report.md hold the calls of one command.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench_run import parser_of
from report.process import Save, read_parts, run_isolated, run_parts
from report.text import markdown

if TYPE_CHECKING:
    from report.setting import Setting


class Part(NamedTuple):
    """A part of the report."""

    title: str
    call: str
    limit: float  # seconds, after which it is ended


MINUTES = 9.8  # of a call: a machine may be lent for ten
START = 20.0  # seconds until a call's first part begins: imports
# In the order of running: the tests first, since what they refute need not be timed. The limits of
# a call fit MINUTES together, so that no part is ended for another one's time.
PARTS = {
    "environment": Part("Machine", "tests", 20.0),  # or with the first call there is
    "tests": Part("Tests that need a GPU", "tests", 545.0),
    "whole_model": Part("The whole model, and its memory", "whole", 545.0),
    "ceilings": Part("Ceilings", "layouts", 40.0),
    "layers": Part("A few layers alone", "layouts", 65.0),
    "layouts": Part("Layouts and backends", "layouts", 400.0),
    "kernels": Part("Kernels of a microbatch", "layouts", 40.0),
    "generation": Part("Generation", "generation", 545.0),
    "whole_model_fp8": Part("The whole model, its policy in FP8", "rest", 140.0),
    "losses": Part("Loss by precision", "rest", 200.0),
    "host": Part("Host over varied batches", "rest", 50.0),
    "switches": Part("Switches, each alone", "rest", 95.0),
}
CALLS = tuple(dict.fromkeys(part.call for part in PARTS.values()))
_DRY_RUN_LIMIT = 300.0  # of a part, on whatever machine the tests run


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's puzzle_align
    from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS  # without torch

    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--dry-run", action="store_true", help="on a CPU, with a tiny model")
    add("--calls", nargs="+", choices=CALLS, default=list(CALLS), help="these alone")
    add("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="these alone")
    add("--minutes", type=float, default=MINUTES, help=f"for each call ({MINUTES})")
    add("--steps", type=int, help="measured steps of a variant (5)")
    add("--data", nargs="+", choices=[*SYNTHETIC_LENGTHS], help="these lengths alone")
    add("--output", type=Path, default=Path(), metavar="FOLDER", help="for the two files (here)")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: give a positive number")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: give a positive number")
    return options


def measure(folder: Path, options: argparse.Namespace, names: list[str]) -> None:
    """Run parts in this process, which is a fork of the report's."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import
    from puzzle_align.runtime.groups.limits import set_cuda_defaults

    set_cuda_defaults()
    from report import generation, machine, runs, steps
    from report.counts import counts_of
    from report.setting import DRY, FULL, chosen

    modules = (generation, machine, runs, steps)
    parts = {
        name: next(getattr(module, name) for module in modules if hasattr(module, name))
        for name in names
    }
    setting = chosen(DRY if options.dry_run else FULL, options.steps, options.data)

    def run(name: str, setting: "Setting", save: Save) -> None:
        save({"counts": counts_of(setting)[name]._asdict()})
        parts[name](setting, save)

    run_parts(names, {name: partial(run, name) for name in names}, setting, folder)


def limits_by_call(options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of the chosen parts, call by call; the first call also names the machine.

    A dry run is one call, which imports once.
    """
    calls = [call for call in CALLS if call in options.calls]
    chosen = [
        {
            name: _DRY_RUN_LIMIT if options.dry_run else part.limit
            for name, part in PARTS.items()
            if name in options.parts and call == (calls[0] if name == "environment" else part.call)
        }
        for call in calls
    ]
    if options.dry_run:
        chosen = [{name: limit for limits in chosen for name, limit in limits.items()}]
    return [limits for limits in chosen if limits]


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 1 if a part has failed."""
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    calls = limits_by_call(options)
    names = [name for limits in calls for name in limits]
    titles = {name: part.title for name, part in PARTS.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def write() -> None:
            """Write the results so far, in case the report is ended early."""
            results = read_parts(names, folder)
            (options.output / "gpu_report.json").write_text(json.dumps(results, indent=1))
            text = markdown(results, titles, dry_run=options.dry_run)
            (options.output / "gpu_report.md").write_text(text)

        for limits in calls:
            deadline = time.monotonic() + 60 * options.minutes
            run_isolated(limits, partial(measure, folder, options), folder, deadline, write)
        results = read_parts(names, folder)
    failed = [f"{name}: {part['error']}" for name, part in results.items() if "error" in part]
    for line in failed:
        print(f"gpu_report: failed: {line}", file=sys.stderr)
    print(f"gpu_report: {options.output / 'gpu_report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
