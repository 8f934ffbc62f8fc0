"""Parts of a report in a process that may die: what they found stays, and the rest goes on."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Found = dict[str, Any]
Save = Callable[[Found], None]

_LAST_LINES = 15  # of a part's output, told where it failed


@dataclass(frozen=True)
class Part:
    """One part: its title, the seconds it may take, and what it does, saving as it goes."""

    title: str
    limit: float
    run: Callable[[Any, Save], None]


def run_parts(names: Sequence[str], parts: Mapping[str, Part], setting: Any, folder: Path) -> None:
    """Run parts one after the other in this process, each leaving ``NAME.json`` in ``folder``.

    A part that raises is noted, and the next one runs, unless the device is beyond use: then the
    process ends, for another one to go on.
    """
    for name in names:
        found: Found = {"status": "running", "started": time.time()}
        file = folder / f"{name}.json"

        def save(more: Found, found: Found = found, file: Path = file) -> None:
            found.update(more)
            unfinished = file.with_suffix(".new")
            unfinished.write_text(json.dumps(found, indent=1))
            unfinished.replace(file)

        save({})
        print(f"part {name}", flush=True)
        try:
            parts[name].run(setting, save)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts go on
            traceback.print_exc()
            save({"status": "failed", "error": one_line(error), **_duration(found)})
        else:
            save({"status": "done", **_duration(found)})
        # Not before: an error's traceback holds what the part had made.
        free_device()


def run_isolated(
    names: Sequence[str],
    limits: Mapping[str, float],
    command: Sequence[str],
    folder: Path,
    deadline: float,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Run ``command NAME,NAME,...`` until every part has left its file, one way or another.

    Args:
        limits: seconds of a part, after which its process is ended.
        deadline: of all, in seconds of ``time.monotonic``.
        on_end: called whenever parts have ended.
    """
    left = list(names)
    while left:
        log = folder / f"{left[0]}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, ",".join(left)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            reason = _watch(process, left, limits, folder, deadline, on_end)
        unfinished = [name for name in left if _status(folder, name) in (None, "running")]
        if not unfinished:
            break
        failed = unfinished[0]
        if reason is None and len(unfinished) < len(left) and _status(folder, failed) is None:
            left = unfinished  # the part before has ended, and left a device that is beyond use
            continue
        _note(folder, failed, reason or f"its process ended with {process.returncode}", log)
        left = unfinished[1:]
        if time.monotonic() > deadline:
            for name in left:
                _note(folder, name, "the time was spent before it began", None)
            break
    on_end()


def read_parts(names: Sequence[str], folder: Path) -> dict[str, Found]:
    """What every part has left so far."""
    files = {name: folder / f"{name}.json" for name in names}
    return {
        name: json.loads(file.read_text()) if file.exists() else {"status": "not begun"}
        for name, file in files.items()
    }


def _watch(
    process: subprocess.Popen[bytes],
    names: Sequence[str],
    limits: Mapping[str, float],
    folder: Path,
    deadline: float,
    on_end: Callable[[], None],
) -> str | None:
    """Wait for the process, which a part may not hold for too long; why it was ended, if it was."""
    told: str | None = None
    while process.poll() is None:
        time.sleep(0.1)
        running = next((name for name in names if _status(folder, name) == "running"), None)
        if running is not None and running != told:
            print(f"gpu_report: {running}", file=sys.stderr)
            told = running
            on_end()
        reason = None
        if time.monotonic() > deadline:
            reason = "the time of the whole report was spent"
        elif running is not None:
            began = json.loads((folder / f"{running}.json").read_text())["started"]
            if time.time() - began > limits[running]:
                reason = f"it took longer than its {limits[running]:.0f} s"
        if reason is not None:
            _end(process)
            return reason
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that came of it; launchers put their workers into other sessions."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        parents[int(stat.parent.name)] = int(after_name[1])
    ending = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in ending} - ending:
        ending |= more
    for pid in ending:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _status(folder: Path, name: str) -> str | None:
    file = folder / f"{name}.json"
    return json.loads(file.read_text())["status"] if file.exists() else None


def _note(folder: Path, name: str, reason: str, log: Path | None) -> None:
    """Say in a part's file why it did not end; what it had found stays there."""
    file = folder / f"{name}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    found |= {"status": "failed", "error": reason}
    if log is not None:
        found["last_output"] = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    file.write_text(json.dumps(found, indent=1))


def _duration(found: Found) -> Found:
    return {"seconds": time.time() - found["started"]}


def one_line(error: Exception) -> str:
    """An error's kind and message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def free_device() -> None:
    """Give memory back; where the device answers nothing any more, end this process."""
    gc.collect()  # a model is a cycle: the hooks of Megatron's wrapper hold it
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"the device is beyond use: {one_line(error)}", flush=True)
        sys.exit(1)
