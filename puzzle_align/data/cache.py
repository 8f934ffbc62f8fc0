"""Columns of numbers on disk, by the hash of what decides them: made once, then memory-mapped.

A folder holds a file of raw numbers for every column (``NAME.bin``), and ``meta.json``, sealed,
with their types, shapes, checksums and ranges. Invariants (the tests assert them):
- a folder appears whole or not at all, and of those who want the same one makes it;
- what is opened with ``verify`` is what was made: what is damaged is made anew, and that is logged;
- what cannot be read is an error, and stays: it may be whole;
- who is interrupted (killed, by a full disk) leaves a ``.NAME.partial`` behind, where the next one
  goes on. It is checked like the rest.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from puzzle_align.data.growing import Arrays, Column, Growing, column_file, writing_cache
from puzzle_align.data.records import DataError
from puzzle_align.data.stamps import Stamp, stamp
from puzzle_align.files.checksums import missing, sealed, unsealed
from puzzle_align.files.json_file import to_plain
from puzzle_align.files.messages import reading
from puzzle_align.files.typed import from_plain

_logger = logging.getLogger(__name__)
_TOLD_S = 1.0  # checks that take longer are logged
_verified: set[Stamp] = set()  # by this process: jobs open their data several times


@dataclass(frozen=True)
class Kept:
    """What a folder of the cache holds."""

    arrays: Arrays  # memory-mapped
    columns: dict[str, Column]
    values: dict[str, Any]  # JSON


@dataclass(frozen=True)
class _Meta:
    """``meta.json``."""

    name: str
    columns: dict[str, Column]
    values: dict[str, Any]


class Damaged(ValueError):
    """A folder that is not as it was made: which file, and what is wrong with it."""


def cached(
    folder: Path,
    key: Sequence[Any],
    make: Callable[[Growing], dict[str, Any]],
    problem: Callable[[Kept], str | None],
    *,
    verify: bool,
) -> Kept:
    """The columns and values that ``key`` decides; made where they are not there, or damaged.

    Args:
        key: JSON values.
        make: appends to the columns, from the parts on that they have, and gives the values. Its
            DataError leaves nothing behind.
        problem: what is wrong with such columns, in some words.
        verify: read all files and compare their checksums; else only sizes are looked at.

    Raises:
        ValueError: one line, if the folder cannot be written, or what it has cannot be read.
    """
    path = _path(folder, key)
    with suppress(Damaged):
        if (kept := _opened(path, problem, verify)) is not None:
            return kept
    absent = [place for place in (folder, *folder.parents) if not place.exists()]
    with writing_cache(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / f".{path.name}.lock") as is_locked:
            return _made(path, make, problem, is_locked, verify)
    except DataError:
        with suppress(OSError):
            for place in absent:
                place.rmdir()
        raise


def found(
    folder: Path, key: Sequence[Any], problem: Callable[[Kept], str | None], *, verify: bool
) -> Kept | None:
    """What ``cached`` has made; None where it is not there, or damaged and now taken away.

    Raises:
        ValueError: as ``cached``.
    """
    path = _path(folder, key)
    with suppress(Damaged):
        return _opened(path, problem, verify)
    with _locked(folder / f".{path.name}.lock"):
        return _found(path, problem, verify)


def _path(folder: Path, key: Sequence[Any]) -> Path:
    return folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _found(path: Path, problem: Callable[[Kept], str | None], verify: bool) -> Kept | None:
    """What the folder holds; a damaged one is taken away. For who has its lock."""
    try:
        return _opened(path, problem, verify)
    except Damaged as error:
        _logger.warning("data.cache_dir: %s is damaged (%s): it is made anew", path, error)
        with writing_cache(path):
            _remove(path)
        return None


def _opened(path: Path, problem: Callable[[Kept], str | None], verify: bool) -> Kept | None:
    """As ``opened``; None where the folder is not there, ValueError where it cannot be read."""
    with reading(path, key="data.cache_dir"):
        return opened(path, problem, verify=verify) if path.exists() else None


def opened(path: Path, problem: Callable[[Kept], str | None], *, verify: bool) -> Kept:
    """What the folder ``path`` holds. See ``cached``.

    Raises:
        Damaged: if that is not what was made.
        OSError: if it cannot be read, and may be what was made.
    """
    start = time.monotonic()
    meta = _meta(path)
    columns = meta.columns
    known = _stamp(path, columns)
    verify = verify and (known is None or known not in _verified)
    for name, column in columns.items():
        file = column_file(path, name)
        found = column.sum.problem(file) if verify else column.sum.size_problem(file)
        if found is not None:
            raise Damaged(found)
    seconds = time.monotonic() - start
    if verify and seconds > _TOLD_S:
        gigabytes = sum(column.sum.num_bytes for column in columns.values()) / 1e9
        _logger.info(
            "data: checked the %.1f GB in %s in %.0f s, %.1f GB/s",
            *(gigabytes, path, seconds, gigabytes / seconds),
        )
    try:
        arrays = {name: column.mapped(column_file(path, name)) for name, column in columns.items()}
    except ValueError as error:
        raise Damaged(f"meta.json: {error}") from None
    kept = Kept(arrays, columns, meta.values)
    if verify and (found := problem(kept)) is not None:
        raise Damaged(found)
    if verify and known is not None:
        _verified.add(known)
    return kept


def _meta(path: Path) -> _Meta:
    try:
        meta = from_plain(_Meta, unsealed((path / "meta.json").read_bytes()), "meta.json")
    except OSError as error:
        raise Damaged(missing(path / "meta.json", error)) from None
    except ValueError as error:
        raise Damaged(f"meta.json: {error}") from None
    if meta.name != path.name:
        raise Damaged("meta.json is another folder's")
    return meta


def _stamp(path: Path, columns: Iterable[str]) -> Stamp | None:
    try:
        return stamp([path / "meta.json", *(column_file(path, name) for name in columns)])
    except OSError:
        return None  # one is missing, as will be told


def _made(
    path: Path,
    make: Callable[[Growing], dict[str, Any]],
    problem: Callable[[Kept], str | None],
    is_locked: bool,
    verify: bool,
) -> Kept:
    """The folder's content, made now unless another process has made it in the meantime."""
    if (kept := _found(path, problem, verify)) is not None:
        return kept
    with writing_cache(path.parent):
        if is_locked:
            partial = path.with_name(f".{path.name}.partial")
        else:  # several may be at work
            partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with Growing(partial) as growing:
            values = make(growing)
            columns = growing.finished()
        _publish(partial, path, columns, values)
    except BaseException as error:
        if isinstance(error, DataError) or not is_locked:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    with reading(path, key="data.cache_dir"):
        return opened(path, problem, verify=False)


def _publish(partial: Path, path: Path, columns: dict[str, Column], values: dict[str, Any]) -> None:
    """Let the finished folder appear; where another process's is there already, that one stays."""
    meta = to_plain(_Meta(path.name, columns, values))
    with writing_cache(path):
        (partial / "meta.json").write_text(sealed(meta), encoding="utf-8")
        partial.chmod(0o755)
        try:
            os.rename(partial, path)
        except OSError:
            if not path.is_dir():
                raise
            shutil.rmtree(partial, ignore_errors=True)


def _remove(path: Path) -> None:
    """Take a folder away; who has its files open keeps them."""
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.damaged.", dir=path.parent))
    os.rename(path, aside / path.name)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Be the only one who holds ``file``, which is there as long; False where it has no lock."""
    descriptor, is_locked, is_ours = -1, True, False
    while not is_ours:
        with writing_cache(file):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        is_locked = _lock(descriptor, file)
        is_ours = not is_locked or _is_at(file, descriptor)
        if not is_ours:  # that of one who is done, and has removed it
            os.close(descriptor)
    try:
        yield is_locked
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(descriptor: int, file: Path) -> bool:
    """Wait for the lock; False where the file system has none."""
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.info("data: another process is preparing this data; waiting for it (%s)", file)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _is_at(file: Path, descriptor: int) -> bool:
    """Whether the open file is the one of that name."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
