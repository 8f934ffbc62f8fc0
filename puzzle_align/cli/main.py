"""``puzzle-align COMMAND ...``: run the command, and report a user's mistake in one line."""

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dis import opmap
from types import TracebackType
from typing import TypeGuard

from puzzle_align import __version__
from puzzle_align.cli import convert, generate, inspect, plan, prepare, profile, report, train
from puzzle_align.cli.arguments import command_parser
from puzzle_align.config.check import JobProblems
from puzzle_align.runtime.groups.limits import set_cuda_defaults
from puzzle_align.runtime.liveness import failure, watch
from puzzle_align.runtime.liveness.launcher import end_with_launcher

COMMANDS = {
    "train": (train.main, "train a model by a config's job; or check the job (--validate)"),
    "prepare": (prepare.main, "pack a job's preference data once, for many runs"),
    "generate": (generate.main, "answer prompts with a trained model"),
    "convert": (convert.main, "turn a checkpoint into a Hugging Face directory, or back"),
    "inspect": (inspect.main, "draw a job's schedule, or list its traffic, without a run"),
    "profile": (profile.main, "measure this machine's times and memory for a job's models"),
    "plan": (plan.main, "choose the fastest parallel plans for a job, from a profile"),
    "report": (report.main, "write a page about runs: curves, times, schedules, samples"),
}
FAILURE, USER_ERROR, INTERRUPTED = 1, 2, 130


def run() -> None:
    """Entry point of the process: run the command of its arguments."""
    inspects = sys.argv[1:2] == ["inspect"]
    if inspects:  # ``| head`` ends it, as it ends other tools
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with process():
        main()
    if inspects:  # it takes a second or two, and torch's clean-up 0.3 s more
        sys.stdout.flush()
        os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; ValueError for a user's mistake, or for a bug (``is_mistake``)."""
    parser = command_parser("puzzle-align", "COMMAND", "Align large language models.", COMMANDS)
    parser.add_argument("--version", action="version", version=f"puzzle-align {__version__}")
    args = parser.parse_args(arguments)
    COMMANDS[args.chosen][0](args.arguments)


@contextmanager
def process() -> Iterator[None]:
    """Run the block as the process's work; a failure ends the process at once, without clean-up.

    A user's mistake is reported in one line. There is no clean-up because an ordinary exit waits
    for threads and tears down process groups, which needs ranks that may have failed already.
    """
    end_with_launcher()
    watch.start()
    faulthandler.enable(all_threads=False)
    set_cuda_defaults()
    show_log()
    try:
        yield
        return
    except KeyboardInterrupt:
        failure.report_text("interrupted", "interrupted")
        code = INTERRUPTED
    except Exception as error:  # any error ends the process the same way
        if is_mistake(error):
            report_mistake(error, debug="--debug" in sys.argv)
            code = USER_ERROR
        elif os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        else:
            failure.report(error)
            code = FAILURE
    with suppress(OSError):  # a full disk, which is what was reported
        sys.stdout.flush()
    os._exit(code)


def show_log() -> None:
    """Show this package's log on rank 0, and warnings on every rank, as lines on stderr."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    is_first = failure.rank() == 0
    logging.getLogger("puzzle_align").setLevel(logging.INFO if is_first else logging.WARNING)


def is_mistake(error: Exception) -> TypeGuard[ValueError]:
    """Whether an error is a user's mistake: a ValueError that this package raised."""
    if not isinstance(error, ValueError) or failure.lost_peer(error):
        return False
    # A note of liveness.activity shows that the job was running: not the user's mistake.
    in_the_work = hasattr(error, "__notes__") and not isinstance(error, failure.CannotGoOn)
    return not in_the_work and raised_here(error.__traceback__)


def raised_here(traceback: TracebackType | None) -> bool:
    """Whether this package raised the error; otherwise it is a bug, which needs its traceback.

    So is an error of a function in C that this package has called: that has no frame of its own.
    """
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    by_raise = frame.f_code.co_code[traceback.tb_lasti] == opmap["RAISE_VARARGS"]
    return by_raise and frame.f_globals.get("__name__", "").split(".")[0] == "puzzle_align"


def report_mistake(error: ValueError, *, debug: bool = False) -> None:
    """Report a mistake once: usually all ranks have the same one, and rank 0 reports it.

    Another rank waits before it reports: the launcher ends it in this time if rank 0 has reported.
    The traceback of a user's code is in a file that the line names, or with ``debug`` before it.
    """
    rank = failure.rank()
    under_way = isinstance(error, failure.CannotGoOn)
    if rank != 0:
        time.sleep(failure.SOON_S if under_way else failure.PATIENCE_S)
    who = "error" if rank == 0 else f"error on {failure.named_rank()}"
    problems = error.lines if isinstance(error, JobProblems) else [str(error)]
    lines = [f"{who}: {' '.join(problem.split())}" for problem in problems]
    if under_way and error.details and not debug:
        lines[-1] += f" ({failure.kept(error.details)})"
    message = "; ".join(lines)
    if under_way and error.details and debug:
        lines.insert(0, error.details.rstrip())
    failure.report_text(message, "\n".join(lines))


if __name__ == "__main__":
    run()
