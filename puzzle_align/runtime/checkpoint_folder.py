"""The folder of a job's checkpoints: one job's at a time, whole ones under good names.

A checkpoint is a directory ``step_00000123`` with a ``job.json`` (``config.saved`` reads it).
Invariants (the tests assert them):
- it is written under a temporary name and gets its own when every rank's files are there and
  synced to the disk, so a directory of that name is whole;
- older ones are deleted after that, and lose their names first;
- the latest is the one with the largest step: there is no pointer file that could be torn.
"""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from puzzle_align.config import saved
from puzzle_align.runtime.reduce import from_rank_zero

_LOCK_WAIT_S = 30.0  # a killed run needs a moment to die


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder`` this job's own while the block runs; clear it of half saves. Collective.

    A run whose launcher was killed can live on for a while: two must not write one folder.

    Raises:
        ValueError: if it cannot be written, or another run is at work in it.
    """
    lock = from_rank_zero(lambda: _claim(folder))
    try:
        yield
    finally:
        if lock is not None and dist.get_rank() == 0:
            os.close(lock)


def _claim(folder: Path) -> int | None:
    """Lock ``folder`` (None where its file system has no locks) and clear it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        holds = _lock(lock, folder)
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:
        raise ValueError(
            f"checkpoint folder {folder} cannot be written ({error.strerror}): choose another"
            " checkpoint.dir or output_dir"
        ) from error
    for leftover in [*folder.glob(".saving_*"), *folder.glob(".deleting_*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    if not holds:
        os.close(lock)
    return lock if holds else None


def _lock(lock: int, folder: Path) -> bool:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.read(lock, 200).decode(errors="replace")
                os.close(lock)
                raise ValueError(
                    f"checkpoint folder {folder} is in use by another run ({holder}): end that run,"
                    " or choose another output_dir"
                ) from None
        except OSError:
            return False
        time.sleep(0.2)


def publish(scratch: Path, final: Path, job: dict[str, Any]) -> None:
    """Check that all ranks' files are here, sync what is not, and give the directory its name.

    Raises:
        ValueError: if a rank wrote its files where this one cannot see them.
    """
    _check_whole(scratch)
    (scratch / "job.json").write_text(json.dumps(job, indent=1))
    for path in (scratch / "job.json", scratch / "common.pt", scratch / "metadata.json", scratch):
        _sync(path)
    if final.exists():  # the same step saved again: what is there is as good
        shutil.rmtree(scratch)
        return
    os.rename(scratch, final)
    _sync(final.parent)


def _check_whole(scratch: Path) -> None:
    stored = FileSystemReader(scratch).read_metadata().storage_data.values()
    missing = {info.relative_path for info in stored} - {path.name for path in scratch.iterdir()}
    if missing:
        raise ValueError(
            f"{scratch.parent}: {len(missing)} of the checkpoint's files were written on another"
            " node: put output_dir (or checkpoint.dir) on a file system that all nodes share"
        )


def delete_older(folder: Path, keep_last: int) -> None:
    """Delete all but the ``keep_last`` latest."""
    for path in saved.checkpoint_paths(folder)[:-keep_last]:
        # Renamed first: a kill amid the deletion must not leave half of it under a good name.
        doomed = path.with_name(f".deleting_{path.name}")
        with suppress(OSError):  # one that stays for now is in nobody's way
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cause(error: BaseException) -> str:
    """What went wrong, in one short line; of several ranks' errors, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return saved.cause(error)
