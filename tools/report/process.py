"""Run a report's parts in a process that may die: results so far are kept, other parts run."""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

Results = dict[str, Any]
Save = Callable[[Results], None]
Part = Callable[[Any, Save], None]  # takes the setting and a function that saves results so far

_LAST_LINES = 15  # of the output, kept with a part that failed


def run_parts(names: Sequence[str], parts: Mapping[str, Part], setting: Any, folder: Path) -> None:
    """Run parts one after the other in this process; each writes ``NAME.json`` in ``folder``.

    A part that raises is noted, and the next one runs. If the device is unusable, the process ends,
    and another one goes on.
    """
    for name in names:
        results: Results = {"status": "running", "started": time.time()}
        file = folder / f"{name}.json"

        def save(more: Results, results: Results = results, file: Path = file) -> None:
            results.update(more)
            unfinished = file.with_suffix(".new")
            unfinished.write_text(json.dumps(results, indent=1))
            unfinished.replace(file)

        save({})
        print(_begin(name), flush=True)
        try:
            parts[name](setting, save)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts go on
            traceback.print_exc()
            save({"status": "failed", "error": one_line(error), **_duration(results)})
        else:
            save({"status": "done", **_duration(results)})
        # Not before: an error's traceback refers to the part's objects.
        free_device()


def run_isolated(
    limits: Mapping[str, float],
    run: Callable[[list[str]], None],
    folder: Path,
    deadline: float,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Call ``run`` with the parts' names in a fork; if it dies, again with the remaining ones.

    Args:
        limits: seconds of each part, after which its process is ended.
        run: calls ``run_parts``; it imports torch, which this process must not have used.
        deadline: of all, in seconds of ``time.monotonic``.
        on_end: called whenever parts have ended.
    """
    left = list(limits)
    while left:
        log = folder / f"{left[0]}.log"
        process = get_context("fork").Process(target=_in_a_fork, args=(run, left, log))
        process.start()
        reason = _watch(process, {name: limits[name] for name in left}, folder, deadline, on_end)
        for name in left:
            if _status(folder, name) == "failed":
                _note(folder, name, None, _last_output(log, name, left))
        unfinished = [name for name in left if _status(folder, name) in (None, "running")]
        if not unfinished:
            break
        failed = unfinished[0]
        if reason is None and len(unfinished) < len(left) and _status(folder, failed) is None:
            left = unfinished  # the part before has ended, and left the device unusable
            continue
        reason = reason or f"its process ended with {process.exitcode}"
        _note(folder, failed, reason, _last_output(log, failed, left))
        left = unfinished[1:]
        if time.monotonic() > deadline:
            for name in left:
                _note(folder, name, "the time was spent before it began", [])
            break
    on_end()


def read_parts(names: Sequence[str], folder: Path) -> dict[str, Results]:
    """Results of every part so far."""
    files = {name: folder / f"{name}.json" for name in names}
    return {
        name: json.loads(file.read_text()) if file.exists() else {"status": "not begun"}
        for name, file in files.items()
    }


def _in_a_fork(run: Callable[[list[str]], None], names: list[str], log: Path) -> None:
    os.setsid()  # Ctrl-C ends the report, which ends this
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):  # for libraries and processes that do not write through Python
        os.dup2(sys.stdout.fileno(), descriptor)
    run(names)


def _watch(
    process: BaseProcess,
    limits: Mapping[str, float],
    folder: Path,
    deadline: float,
    on_end: Callable[[], None],
) -> str | None:
    """Wait for the process; end it where a part takes too long, and return the reason."""
    shown: str | None = None
    try:
        while process.is_alive():
            process.join(0.1)
            running = next((name for name in limits if _status(folder, name) == "running"), None)
            if running is not None and running != shown:
                print(f"gpu_report: {running}", file=sys.stderr)
                shown = running
                on_end()
            if time.monotonic() > deadline:
                return "the time of the whole report was spent"
            if running is not None:
                began = json.loads((folder / f"{running}.json").read_text())["started"]
                if time.time() - began > limits[running]:
                    return f"it took longer than its {limits[running]:.0f} s"
        return None
    finally:
        _end(process)


def _end(process: BaseProcess) -> None:
    """Kill a process and its descendants, whatever sessions they are in."""
    assert process.pid is not None
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        # The parent first: it would go on once a child that it waits for has ended.
        for each in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.join()


def _status(folder: Path, name: str) -> str | None:
    file = folder / f"{name}.json"
    return json.loads(file.read_text())["status"] if file.exists() else None


def _note(folder: Path, name: str, reason: str | None, last_output: list[str]) -> None:
    """Write into a failed part's file why it failed (None: the file says so) and its last lines."""
    file = folder / f"{name}.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results["status"] = "failed"
    if reason is not None:
        results["error"] = reason
    if last_output:
        results["last_output"] = last_output
    file.write_text(json.dumps(results, indent=1))


def _last_output(log: Path, name: str, names: Sequence[str]) -> list[str]:
    """The last lines of a part in its process's log; of the whole log if it did not begin."""
    lines = log.read_text(errors="replace").splitlines()
    begins = {_begin(each) for each in names}
    first = lines.index(_begin(name)) + 1 if _begin(name) in lines else 0
    end = next((n for n in range(first, len(lines)) if lines[n] in begins), len(lines))
    return lines[first:end][-_LAST_LINES:]


def _begin(name: str) -> str:
    """The line of the log with which a part begins."""
    return f"part {name}"


def _duration(results: Results) -> Results:
    return {"seconds": time.time() - results["started"]}


def one_line(error: Exception) -> str:
    """An error's kind and message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def free_device() -> None:
    """Free memory; end this process if the device no longer answers."""
    gc.collect()  # a model is a cycle: the hooks of Megatron's wrapper hold it
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"the device is unusable: {one_line(error)}", flush=True)
        sys.exit(1)
