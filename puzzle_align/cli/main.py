"""``puzzle-align COMMAND ...``: picks the command, and turns a user's mistake into one line."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from puzzle_align.cli import convert, train
from puzzle_align.spec.check import JobProblems

COMMANDS = {"train": train.main, "convert": convert.main}
USER_ERROR = 2
PATIENCE = 30  # seconds that torchrun may take to end all ranks after one


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="puzzle-align",
        description="Align large language models. 'puzzle-align COMMAND --help' says more.",
    )
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own")
    args = parser.parse_args(arguments)
    try:
        COMMANDS[args.command](args.arguments)
    except ValueError as error:
        if not _raised_here(error.__traceback__):
            raise
        _report(error)
        return USER_ERROR
    return 0


def _raised_here(traceback: TracebackType | None) -> bool:
    """Whether this package raised: that is for the user, anything else is a bug to be traced."""
    module = ""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return module.split(".")[0] == "puzzle_align"


def _report(error: ValueError) -> None:
    """Say it once: usually every rank has made the same mistake, and rank 0 speaks for all.

    A rank that erred alone speaks for itself once the launcher has had time to end it with rank 0.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(PATIENCE)
    who = "error" if rank == "0" else f"error on rank {rank}"
    problems = error.lines if isinstance(error, JobProblems) else [str(error)]
    lines = [f"{who}: {' '.join(problem.split())}" for problem in problems]
    print("\n".join(lines), file=sys.stderr, flush=True)
    _tell_launcher("; ".join(lines))


def _tell_launcher(message: str) -> None:
    """Leave the message where torchrun looks for it, to be part of its closing words."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": details}}
        Path(path).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
