"""The folder of a job's checkpoints: locks, atomic publishing, deletion and damage.

A checkpoint is a directory ``step_00000123`` with a ``job.json`` and a ``checksums.json``
(``config.saved`` reads them). Invariants (the tests assert them):
- one run at a time writes the folder;
- a checkpoint is written under a temporary name, and renamed when every rank's files are complete
  and synced to the disk, so a directory named ``step_*`` is complete;
- older checkpoints are deleted after that, renamed first; a damaged checkpoint causes no deletion;
- the latest is the one with the largest step: there is no pointer file that could be torn.
"""

import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from puzzle_align.config.saved import (
    CHECKSUMS,
    DAMAGED,
    JOB,
    DamagedError,
    Manifest,
    checkpoint_paths,
    damaged,
    last_good,
)
from puzzle_align.files.checksums import PieceSums, sealed
from puzzle_align.files.json_file import to_plain
from puzzle_align.runtime.checkpoint.sharing import PROBE
from puzzle_align.runtime.groups.collectives import from_rank_zero
from puzzle_align.runtime.liveness.failure import CannotGoOn

_logger = logging.getLogger(__name__)
_LOCK_WAIT_S = 30.0  # a killed run needs a moment to die


@contextmanager
def locked(output_dir: Path, checkpoints: Path) -> Iterator[None]:
    """Lock a run's folders during the block, and delete unfinished saves. Collective.

    A run whose launcher was killed can live on for a while: two must not write one folder.

    Raises:
        ValueError: if a folder cannot be written, or another run holds it.
    """
    keys = {output_dir.resolve(): "output_dir"}
    keys.setdefault(checkpoints.resolve(), "checkpoint.dir or output_dir")

    def claim() -> None:
        for folder, key in keys.items():
            _lock(folder, key, locks)
        for begun in (".saving_", ".deleting_", PROBE):
            for leftover in checkpoints.glob(f"{begun}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    with ExitStack() as locks:
        from_rank_zero(claim)
        yield


def _lock(folder: Path, key: str, locks: ExitStack) -> None:
    """Lock a folder by a file in it, until ``locks`` closes; do nothing if it cannot have locks.

    Args:
        key: the config's key that chooses the folder, for errors.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        locks.callback(os.close, lock)
        while not _is_free(lock):
            if time.monotonic() > deadline:
                holder = os.read(lock, 200).decode(errors="replace")
                raise ValueError(
                    f"{folder} is in use by another run ({holder}): end that run, or choose another"
                    f" {key}"
                )
            time.sleep(0.2)
        with suppress(OSError):  # on a full disk, which an unfinished save may fill
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written ({error.strerror}): choose another {key}"
        ) from error


def _is_free(lock: int) -> bool:
    """Lock an open file; False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def publish(scratch: Path, final: Path, job: dict[str, Any], sums: Mapping[str, PieceSums]) -> None:
    """Check all ranks' files, write and sync the small ones, and rename the directory.

    Args:
        job: content of ``job.json``; ``checksums.json`` repeats ``job_id`` and ``step``.
        sums: checksums of every rank's files, by name.

    Raises:
        CannotGoOn: if files are not there, or not as large as they were written.
    """
    _check_whole(scratch, sums)
    (scratch / JOB).write_text(json.dumps(job, indent=1, allow_nan=False), encoding="utf-8")
    small = [JOB, "common.pt", "metadata.json", ".metadata"]
    files = {name: PieceSums.of_bytes((scratch / name).read_bytes()) for name in small}
    manifest = Manifest(job["step"], job["job_id"], {**sums, **files})
    (scratch / CHECKSUMS).write_text(sealed(to_plain(manifest)), encoding="utf-8")
    for path in (*(scratch / name for name in (*small, CHECKSUMS)), scratch):
        _sync(path)
    if final.exists():  # the same step saved again: the first save is as good
        shutil.rmtree(scratch)
        return
    os.rename(scratch, final)
    _sync(final.parent)


def _check_whole(scratch: Path, sums: Mapping[str, PieceSums]) -> None:
    found = (s.size_problem(scratch / name) for name, s in sums.items())
    lost = [problem for problem in found if problem is not None]
    if lost:
        raise CannotGoOn(
            f"{scratch.parent}: {len(lost)} of the checkpoint's files are not as they were written "
            f"({lost[0]}): mend the disk, or if another node wrote them, put output_dir (or "
            "checkpoint.dir) on a file system that all nodes share"
        )


def delete_older(folder: Path, keep_last: int) -> None:
    """Delete the checkpoints older than the latest ``keep_last`` good ones.

    Damaged (by sizes and small files) and unreadable checkpoints do not count: the last good one
    must not be deleted in favour of them.
    """
    paths, num_good = checkpoint_paths(folder), 0
    while paths and num_good < keep_last:
        with suppress(ValueError):
            last_good([paths.pop()])
            num_good += 1
    for path in paths:
        # Renamed first: a kill amid the deletion must not leave half a checkpoint under its name.
        doomed = path.with_name(f".deleting_{path.name}")
        with suppress(OSError):  # a checkpoint that remains does no harm
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def set_aside(path: Path, why: str) -> None:
    """Rename a damaged checkpoint, so that its step can be saved again, and log a warning.

    ValueError if it cannot be renamed.
    """
    names = (f"{DAMAGED}{path.name}{end}" for end in ("", *(f".{n}" for n in range(1, 1000))))
    aside = next(new for name in names if not (new := path.with_name(name)).exists())
    try:
        os.rename(path, aside)
    except OSError as error:
        raise damaged(path, f"{why}; it cannot be moved away: {error.strerror}") from error
    _logger.warning("%s is damaged (%s): it is now %s", path, why, aside.name)


def set_aside_damaged(paths: list[Path]) -> None:
    """Rename the damaged checkpoints among ``paths`` (see ``Saved.check``)."""
    for path in paths:
        try:
            last_good([path])
        except DamagedError as error:
            set_aside(path, error.why)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_failure(error: BaseException) -> BaseException:
    """First of several ranks' errors; any other error itself."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error
