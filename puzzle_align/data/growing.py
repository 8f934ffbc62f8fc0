"""Columns of numbers that grow on disk part by part, and go on where they were interrupted.

After every part (or a second's worth of them) a journal notes how many there are, and how long the
files were and which checksums they had by then. What has come later is cut off by who goes on.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import xxhash

from puzzle_align.files.checksums import FileSum, blocks, missing, sealed, unsealed
from puzzle_align.files.messages import reading, shown, writing
from puzzle_align.files.typed import from_plain

Arrays = Mapping[str, np.ndarray]

_logger = logging.getLogger(__name__)
_JOURNAL = "progress.json"
_JOURNAL_S = 1.0  # between two notes
_DTYPES = ("|u1", "<i4", "<i8", "<f8")


writing_cache = partial(
    writing,
    key="data.cache_dir",
    cure="free space there, make it writable, or name another folder",
)


def column_file(folder: Path, name: str) -> Path:
    """Where a column's numbers are."""
    return folder / f"{name}.bin"


@dataclass(frozen=True)
class Column:
    """What a file of raw numbers holds."""

    dtype: str  # numpy's, byte order included
    shape: tuple[int, ...]
    sum: FileSum
    least: float | None  # of all its numbers; None: it has none
    most: float | None

    def is_within(self, low: int, high: int) -> bool:
        """Whether every number is at least ``low`` and below ``high``."""
        return self.least is None or self.most is None or low <= self.least <= self.most < high

    def mapped(self, file: Path) -> np.ndarray:
        """The numbers, memory-mapped; ValueError where so many bytes cannot be those."""
        is_known = self.dtype in _DTYPES and all(size >= 0 for size in self.shape)
        if not is_known or math.prod(self.shape) * int(self.dtype[2:]) != self.sum.num_bytes:
            what = f"{shown(self.dtype)} {shown(self.shape)}"
            raise ValueError(f"{file.name} is {what} of {self.sum.num_bytes} bytes")
        if not self.sum.num_bytes:
            return np.zeros(self.shape, self.dtype)
        return np.memmap(file, self.dtype, "r", shape=self.shape)


@dataclass(frozen=True)
class _Journal:
    """What the journal says."""

    num_parts: int
    columns: dict[str, Column]
    state: dict[str, Any]


class _Writer:
    """A column at its end."""

    def __init__(self, path: Path, column: Column | None, like: np.ndarray | None = None) -> None:
        """Begin with ``like`` (not written yet), or go on; ValueError if the file is not that."""
        self._digest = xxhash.xxh3_64()
        if column is None:
            assert like is not None
            nothing = FileSum(0, self._digest.hexdigest())
            column = Column(like.dtype.str, (0, *like.shape[1:]), nothing, None, None)
        else:
            for block in blocks(path, column.sum.num_bytes):
                self._digest.update(block)
            if self._digest.hexdigest() != column.sum.xxh3_64:
                raise ValueError(f"{path.name} is not what was written")
            os.truncate(path, column.sum.num_bytes)
        self._column = column
        self._file: BinaryIO = path.open("ab", buffering=0)

    def append(self, values: np.ndarray) -> None:
        """Write rows of the column's type and shape."""
        values, old = np.ascontiguousarray(values), self._column
        assert values.dtype.str == old.dtype and values.shape[1:] == old.shape[1:]
        if not values.size:
            return
        content = values.reshape(-1).view(np.uint8).data
        self._digest.update(content)
        num_bytes = old.sum.num_bytes + len(content)
        while content:
            content = content[self._file.write(content) :]
        least, most = values.min().item(), values.max().item()
        self._column = Column(
            old.dtype,
            (old.shape[0] + len(values), *old.shape[1:]),
            FileSum(num_bytes, self._digest.hexdigest()),
            least if old.least is None else min(old.least, least),
            most if old.most is None else max(old.most, most),
        )

    @property
    def column(self) -> Column:
        """What has been written."""
        return self._column

    def close(self) -> None:
        """No more."""
        self._file.close()


class Growing:
    """Columns in a folder of their own, to be filled by one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Go on with what is there; whatever of it is damaged is begun anew.

        Raises:
            ValueError: one line, if the folder cannot be written, or what it has cannot be read.
        """
        self.folder = folder
        self.num_parts = 0
        self.state: dict[str, Any] = {}  # the caller's, JSON, as of the last part
        self._columns: dict[str, _Writer] = {}
        self._checked: set[str] = set()
        self._noted_s = time.monotonic()
        with writing_cache(folder):
            folder.mkdir(exist_ok=True)
            if os.path.lexists(folder / _JOURNAL):
                self._go_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._columns.values():
            writer.close()

    @property
    def columns(self) -> dict[str, Column]:
        """What has been written."""
        return {name: writer.column for name, writer in self._columns.items()}

    def append(self, arrays: Arrays, state: dict[str, Any]) -> None:
        """Write the next part: rows for every column; ``state`` is there for who goes on."""
        with writing_cache(self.folder):
            for name, values in arrays.items():
                if name not in self._columns:
                    file = column_file(self.folder, name)
                    file.unlink(missing_ok=True)
                    self._columns[name] = _Writer(file, None, like=values)
                self._columns[name].append(values)
            self.num_parts += 1
            self.state = state
            if time.monotonic() - self._noted_s > _JOURNAL_S:
                self._note()

    def read(self, name: str) -> Iterator[bytes]:
        """A column from its beginning, in blocks.

        Raises:
            ValueError: after the last, one line, if that is not what was written.
        """
        file, column = column_file(self.folder, name), self.columns[name]
        digest = xxhash.xxh3_64()
        for block in blocks(file, column.sum.num_bytes):
            digest.update(block)
            yield block
        if digest.hexdigest() != column.sum.xxh3_64:
            raise ValueError(
                f"data.cache_dir: {file} does not hold what was written: the disk is faulty, or "
                "another process writes there; name another folder"
            )
        self._checked.add(name)

    def drop(self, name: str) -> None:
        """Leave a column out."""
        self._columns.pop(name).close()
        column_file(self.folder, name).unlink()

    def finished(self) -> dict[str, Column]:
        """The columns, each read again to be sure (see ``read``); the journal is gone."""
        with reading(self.folder, key="data.cache_dir"):
            for name in self._columns.keys() - self._checked:
                for _ in self.read(name):
                    pass
        with writing_cache(self.folder):
            (self.folder / _JOURNAL).unlink(missing_ok=True)
        return self.columns

    def begin_anew(self, why: str) -> None:
        """Leave nothing of what has been written."""
        _logger.warning("data.cache_dir: %s is begun anew (%s)", self.folder, why)
        self.__exit__()
        self._columns, self.num_parts, self.state = {}, 0, {}
        with writing_cache(self.folder):
            shutil.rmtree(self.folder)
            self.folder.mkdir()

    def _note(self) -> None:
        described = {name: asdict(column) for name, column in self.columns.items()}
        values = {"num_parts": self.num_parts, "columns": described, "state": self.state}
        new = self.folder / f"{_JOURNAL}.new"
        new.write_text(sealed(values), encoding="utf-8")
        os.replace(new, self.folder / _JOURNAL)
        self._noted_s = time.monotonic()

    def _go_on(self) -> None:
        journal = self.folder / _JOURNAL
        with reading(self.folder, key="data.cache_dir"):
            try:
                noted = from_plain(_Journal, unsealed(journal.read_bytes()), _JOURNAL)
                for name, column in noted.columns.items():
                    self._columns[name] = _Writer(column_file(self.folder, name), column)
                self.num_parts, self.state = noted.num_parts, noted.state
            except OSError as error:
                self.begin_anew(missing(Path(error.filename or journal), error))
            except ValueError as error:
                self.begin_anew(str(error))
