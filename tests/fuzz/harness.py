"""Runs seeded cases of damaged files, each within its time, in processes that may die of them.

A case must end as the package promises a user: in a ValueError that the package itself raised, one
short line, or in a result that is what the file says. Whatever else happens is a finding:
- ``traceback``: another exception, or a ValueError that was raised outside the package;
- ``line``: an error's line that is longer than ``MAX_LINE``, or of several lines;
- ``wrong``: accepted, and not what it should be (``Case.wrong``);
- ``hang``: over the kind's seconds of a processor, or ``PATIENCE_S`` (the process is killed);
- ``died``: the process ended itself or crashed;
- ``ran code``: the mark of crafted code is there (``Case.mark``).
"""

import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol

from puzzle_align.cli.main import raised_here
from tests.fuzz import kinds

MAX_LINE = 600  # characters; a foreign value in it takes 80 at most, paths what they take
PATIENCE_S = 120.0  # seconds on the clock, which others take a part of
MEMORY = 3 * 2**30  # bytes that a process may take on top of what it has at its start
OUTCOMES = ("refused", "accepted", "traceback", "line", "wrong", "hang", "died", "ran code")
GOOD = OUTCOMES[:2]


@dataclass(frozen=True)
class Case:
    """Something damaged, and how a command would take it in."""

    what: str  # how it was damaged, for people
    use: Callable[[], Any]
    wrong: Callable[[Any], str | None] = lambda result: None  # what is wrong with ``use``'s result
    mark: Path | None = None  # a file that only code hidden in the case would write


class Kind(Protocol):
    """Foreign files of one kind. Made once a process; ``folder`` is its own, and empty."""

    limit_s: int  # seconds of a processor that a case may take
    imports: tuple[str, ...]  # modules that cases import lazily: no case's own time

    def __init__(self, folder: Path) -> None:
        """Make the good files under ``folder``."""
        ...

    def case(self, draw: random.Random) -> Case:
        """The case that ``draw`` decides, its files written; the one before is over."""
        ...


@dataclass
class Report:
    """Outcomes of a kind's cases."""

    kind: str
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def note(self, number: int, outcome: str, detail: str) -> None:
        """Count a case; keep what is needed to look at it again."""
        self.counts[outcome] += 1
        if outcome not in GOOD:
            self.findings.append(f"{self.kind} --only {number}: {outcome}: {detail}")


def kind_names() -> list[str]:
    """The kinds there are."""
    return sorted(module.name for module in iter_modules(kinds.__path__))


def run_kind(name: str, cases: range, seed: int, tick: Callable[[], object]) -> Report:
    """Run the cases of a kind by their numbers; ``tick`` is called after each."""
    report = Report(name)
    kind = import_module(f"{kinds.__name__}.{name}").Kind
    for module in kind.imports:
        import_module(module)  # before the forks, which then need not
    numbers = iter(cases)
    following = next(numbers, None)
    while following is not None:
        following = _one_process(kind, report, following, numbers, seed, tick)
    return report


def _one_process(
    kind: type[Kind],
    report: Report,
    number: int,
    numbers: Iterator[int],
    seed: int,
    tick: Callable[[], object],
) -> int | None:
    """Run cases from ``number`` on in a process until they or it end; the next number, or None."""
    ours, theirs = get_context("fork").Pipe()
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz_{report.kind}_"))
    process = get_context("fork").Process(
        target=_serve, args=(kind, report.kind, folder, seed, theirs, ours), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if _answer(ours) is None:
            raise RuntimeError(f"{report.kind}: its good files could not be made")
        while True:
            ours.send(number)
            answer = _answer(ours)
            outcome, detail = answer or _ending(process, kind.limit_s)
            report.note(number, outcome, detail)
            tick()
            following = next(numbers, None)
            if answer is None or following is None:
                return following
            number = following
    finally:
        process.kill()
        process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _answer(connection: Connection) -> Any:
    """Message that the process sends; None if it takes too long, or has ended."""
    try:
        return connection.recv() if connection.poll(PATIENCE_S) else None
    except EOFError:
        return None


def _ending(process: Any, limit_s: int) -> tuple[str, str]:
    process.join(0.5)
    if process.exitcode in (None, -signal.SIGXCPU):
        return "hang", f"over {limit_s} s of a processor, or {PATIENCE_S:g} s"
    return "died", f"exit code {process.exitcode}"


def _serve(
    kind: type[Kind], name: str, folder: Path, seed: int, connection: Connection, other: Connection
) -> None:
    other.close()
    os.chdir(folder)
    own = kind(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    connection.send(True)  # ready
    while True:
        number = connection.recv()
        case = own.case(random.Random(f"{name} {seed} {number}"))
        end = math.ceil(time.process_time()) + kind.limit_s
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        connection.send(outcome_of(case))


def outcome_of(case: Case) -> tuple[str, str]:
    """Outcome of a case, one of ``OUTCOMES``, and its explanation."""
    outcome, detail = _outcome(case)
    if case.mark is not None and case.mark.exists():
        case.mark.unlink()
        outcome = "ran code"
    return outcome, f"{case.what}: {detail}"


def _outcome(case: Case) -> tuple[str, str]:
    try:
        result = case.use()
        wrong = case.wrong(result)
    except ValueError as error:
        if not raised_here(error.__traceback__):
            return "traceback", _trace(error)
        line = str(error)
        if len(line) > MAX_LINE or len(line.splitlines()) != 1:
            return "line", f"{len(line)} characters: {line[:1000]!r}"
        return "refused", line
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
        return "traceback", _trace(error)
    return ("accepted", "") if wrong is None else ("wrong", wrong)


def _trace(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:200]} ({places})"


def show(kind_name: str, number: int, seed: int) -> None:
    """Run one case here, and print what became of it, with a traceback where there is one."""
    kind = import_module(f"{kinds.__name__}.{kind_name}").Kind
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz_{kind_name}_"))
    here = os.getcwd()
    os.chdir(folder)
    case = kind(folder).case(random.Random(f"{kind_name} {seed} {number}"))
    print(f"{case.what}\nfiles: {folder}")
    signal.alarm(60)
    try:
        result = case.use()
        print(f"accepted: {case.wrong(result) or 'and right'}")
    except BaseException:  # noqa: BLE001 - to be looked at
        traceback.print_exc(file=sys.stdout)
    os.chdir(here)
