"""Cache of numeric columns on disk, in folders named by a hash of everything that decides them.

A folder holds a file of raw numbers for each column (``NAME.bin``) and a sealed ``meta.json`` with
their types, shapes and checksums. Invariants (the tests assert them):
- a folder appears whole or not at all: it is written under another name and renamed, and an
  interrupted preparation starts anew;
- if several processes need the same folder, one makes it and the others wait;
- columns opened with ``verify`` are exactly those written: a damaged folder is made anew, with a
  logged warning;
- a folder that cannot be read is an error and stays as it is: its content may be intact.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, cast

import numpy as np
import xxhash

from puzzle_align.files.checksums import FileSum, Stamp, missing, sealed, stamp, unsealed
from puzzle_align.files.json_file import to_plain
from puzzle_align.files.messages import reading, writing
from puzzle_align.files.typed import from_plain

Arrays = Mapping[str, np.ndarray]
Dtype = Literal["|u1", "<i4", "<i8", "<f8"]  # numpy's, byte order included

_logger = logging.getLogger(__name__)
_LOGGED_S = 1.0  # checks that take longer are logged
_verified: set[Stamp] = set()  # in this process: a job opens its data several times

CACHE_KEY = "data.cache_dir"
CURE = "free space there, make it writable, or name another folder"
_writing = partial(writing, key=CACHE_KEY, cure=CURE)
_reading = partial(reading, key=CACHE_KEY)


@dataclass(frozen=True)
class Column:
    """Type, shape and checksum of a file of raw numbers."""

    dtype: Dtype
    shape: tuple[int, ...]
    sum: FileSum

    def mapped(self, file: Path) -> np.ndarray:
        """Memory-map the numbers."""
        if not self.sum.num_bytes:
            return np.zeros(self.shape, self.dtype)
        return np.memmap(file, self.dtype, "r", shape=self.shape)


@dataclass(frozen=True)
class CachedColumns:
    """Content of a cache folder."""

    arrays: Arrays  # memory-mapped
    values: dict[str, Any]  # JSON


@dataclass(frozen=True)
class _Meta:
    """``meta.json``."""

    name: str
    columns: dict[str, Column]
    values: dict[str, Any]


class Damaged(ValueError):
    """A cache folder differs from what was written; the message names the file and the damage."""


class ColumnWriter:
    """Writes the columns of a new folder part by part; holds at most one part in memory.

    ``key`` names the folder in errors: the config's key or the environment variable it comes from.
    """

    def __init__(self, folder: Path, key: str = CACHE_KEY) -> None:
        self.folder, self.key = folder, key
        self.columns: dict[str, Column] = {}
        self._open: dict[str, tuple[BinaryIO, Any]] = {}  # files, and digests of their content

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file, _ in self._open.values():
            file.close()

    def append(self, arrays: Arrays) -> None:
        """Write the next rows of every column; ValueError, one line, if they cannot be written."""
        with writing(self.folder, key=self.key, cure=CURE):
            for name, values in arrays.items():
                self._append(name, np.ascontiguousarray(values))

    def _append(self, name: str, values: np.ndarray) -> None:
        if name not in self._open:
            file = self._file(name).open("xb", buffering=0)
            self._open[name] = file, xxhash.xxh3_64()
            dtype, shape = cast(Dtype, values.dtype.str), (0, *values.shape[1:])
            self.columns[name] = Column(dtype, shape, FileSum(0, ""))
        (file, digest), old = self._open[name], self.columns[name]
        assert values.dtype.str == old.dtype and values.shape[1:] == old.shape[1:]
        content = values.reshape(-1).view(np.uint8).data
        digest.update(content)
        file_sum = FileSum(old.sum.num_bytes + len(content), digest.hexdigest())
        shape = (old.shape[0] + len(values), *old.shape[1:])
        while content:
            content = content[file.write(content) :]
        self.columns[name] = Column(old.dtype, shape, file_sum)

    def arrays(self) -> dict[str, np.ndarray]:
        """Memory-map the columns; ValueError, one line, if they differ from what was written."""
        with reading(self.folder, key=self.key):
            for name, column in self.columns.items():
                if (damage := column.sum.problem(self._file(name))) is not None:
                    raise _not_as_written(self.folder, self.key, damage)
            return {name: column.mapped(self._file(name)) for name, column in self.columns.items()}

    def drop(self, name: str) -> None:
        """Remove a column."""
        del self.columns[name]
        self._open.pop(name)[0].close()
        self._file(name).unlink()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.bin"


def cached(
    folder: Path,
    key: Sequence[Any],
    make: Callable[[ColumnWriter], dict[str, Any]],
    *,
    verify: bool,
) -> CachedColumns:
    """The columns and values of ``key``; made if they are missing or damaged.

    Args:
        folder: the cache.
        key: JSON values that decide columns and values.
        make: writes the columns and returns the values.
        verify: compare the checksums of all files; else only their sizes. Those of files just
            made are always compared.

    Raises:
        ValueError: one line, if the folder cannot be written or read.
    """
    if (kept := find_columns(folder, key, verify=verify)) is not None:
        return kept
    path = _path(folder, key)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{path.name}.lock") as is_locked:
        if (kept := find_columns(folder, key, verify=verify)) is not None:
            return kept  # another process has made it in the meantime
        with _writing(folder):
            for left in folder.glob(f".{path.name}.*.partial") if is_locked else ():
                shutil.rmtree(left, ignore_errors=True)  # left by a killed process
            scratch = Path(tempfile.mkdtemp(".partial", f".{path.name}.", folder))
        try:
            with ColumnWriter(scratch) as writer:
                values = make(writer)
            _publish(scratch, path, _Meta(path.name, writer.columns, values))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    with _reading(path):
        try:
            return opened(path, verify=True)
        except Damaged as error:
            raise _not_as_written(path, CACHE_KEY, str(error)) from None


def _not_as_written(folder: Path, key: str, damage: str) -> ValueError:
    return ValueError(
        f"{key}: {folder} does not hold what was just written there ({damage}): mend the disk, or"
        " name another folder"
    )


def find_columns(folder: Path, key: Sequence[Any], *, verify: bool) -> CachedColumns | None:
    """Cached columns and values; None if missing or damaged. Removes a damaged folder.

    ValueError as for ``cached``.
    """
    path = _path(folder, key)
    with _reading(path):
        try:
            return opened(path, verify=verify) if path.exists() else None
        except Damaged as error:
            _logger.warning("data.cache_dir: %s is damaged (%s): it is made anew", path, error)
    with _writing(path):
        aside = Path(tempfile.mkdtemp(".damaged", f".{path.name}.", folder))
        with suppress(FileNotFoundError):  # another process has removed it
            os.rename(path, aside / path.name)  # processes with open files keep reading them
        shutil.rmtree(aside, ignore_errors=True)
    return None


def opened(path: Path, *, verify: bool) -> CachedColumns:
    """Content of the folder ``path``; ``verify`` as for ``cached``.

    Raises:
        Damaged: if it differs from what was written.
        OSError: if it cannot be read, but may be intact.
    """
    start = time.monotonic()
    meta = _meta(path)
    known_stamp = stamp([path / "meta.json", *(path / f"{name}.bin" for name in meta.columns)])
    verify = verify and (known_stamp is None or known_stamp not in _verified)
    for name, column in meta.columns.items():
        file = path / f"{name}.bin"
        damage = column.sum.problem(file) if verify else column.sum.size_problem(file)
        if damage is not None:
            raise Damaged(damage)
    seconds = time.monotonic() - start
    if verify and seconds > _LOGGED_S:
        gigabytes = sum(column.sum.num_bytes for column in meta.columns.values()) / 1e9
        _logger.info(
            "data: checked the %.1f GB in %s in %.0f s, %.1f GB/s",
            *(gigabytes, path, seconds, gigabytes / seconds),
        )
    if verify and known_stamp is not None:
        _verified.add(known_stamp)
    arrays = {name: column.mapped(path / f"{name}.bin") for name, column in meta.columns.items()}
    return CachedColumns(arrays, meta.values)


def _path(folder: Path, key: Sequence[Any]) -> Path:
    return folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


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


def _publish(folder: Path, path: Path, meta: _Meta) -> None:
    """Rename the finished folder to ``path``, unless another process has made it already."""
    with _writing(path):
        (folder / "meta.json").write_text(sealed(to_plain(meta)), encoding="utf-8")
        folder.chmod(0o755)
        try:
            os.rename(folder, path)
        except OSError:
            if not path.is_dir():
                raise


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Hold a lock on ``file``, which is not deleted; yield False if it cannot be locked."""
    stream: BinaryIO | None = None
    with _writing(file), suppress(PermissionError):  # another user's file
        stream = file.open("ab")
        file.chmod(0o666)  # so that other users of the cache can lock it
    with stream or nullcontext():
        yield stream is not None and _lock(stream, file)


def _lock(stream: BinaryIO, file: Path) -> bool:
    """Lock an open file, after waiting if needed; False if there are no file locks."""
    try:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _logger.info("data: another process is preparing this data; waiting for it (%s)", file)
            fcntl.flock(stream, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
