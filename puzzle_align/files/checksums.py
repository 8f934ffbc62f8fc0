"""Sizes and checksums of files, and sealed JSON files, which contain a checksum.

Every flipped bit of a sealed file is noticed: the text must be exactly what ``sealed`` writes for
the values in it, and the checksum in it (XXH3, 64 bits) must match them.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

_CACHED_BYTES = 2**20  # a buffer that stays in a core's cache: hashing costs no memory traffic
_SEAL = "xxh3_64"
_FRESH_S = 2.0  # some file systems give two changes within it the same time

Stamp = tuple[tuple[str, int, int, int, int, int], ...]


@dataclass(frozen=True)
class FileSum:
    """A file's size in bytes and checksum (XXH3, 64 bits, in hexadecimal).

    Checks return one line for a missing or different file, and raise OSError, with the file's name,
    for one that exists but cannot be read.
    """

    num_bytes: int
    xxh3_64: str

    @classmethod
    def of(cls, path: Path) -> "FileSum":
        """Compute a file's size and checksum; OSError if it cannot be read."""
        num_bytes = path.stat().st_size
        return cls(num_bytes, _checksum_of(path, 0, num_bytes))

    def problem(self, path: Path) -> str | None:
        """One line if the file at ``path`` is missing or differs; else None."""
        return self.size_problem(path) or _problem(path, 0, self.num_bytes, self.xxh3_64)

    def size_problem(self, path: Path) -> str | None:
        """One line if the file at ``path`` is missing or its size differs; else None."""
        return _size_problem(path, self.num_bytes)


@dataclass(frozen=True)
class PieceSums:
    """Checksums of a file's consecutive pieces, each of which can be verified alone.

    ``ends``: each piece's end, in bytes from the file's start; ``xxh3_64``: its checksum. Checks
    report errors like ``FileSum``'s.
    """

    ends: tuple[int, ...]
    xxh3_64: tuple[str, ...]

    def __post_init__(self) -> None:
        steps = [end - start for start, end in pairwise((0, *self.ends))]
        if len(self.ends) != len(self.xxh3_64) or any(step <= 0 for step in steps):
            raise ValueError("the ends of a file's pieces do not grow")

    @classmethod
    def of_bytes(cls, data: bytes) -> "PieceSums":
        """Checksums of a file that holds ``data`` as one piece."""
        return cls((len(data),), (xxhash.xxh3_64_hexdigest(data),)) if data else cls((), ())

    def has(self, data: bytes) -> bool:
        """Whether the file is one piece that holds ``data``."""
        return self == PieceSums.of_bytes(data)

    def size_problem(self, path: Path) -> str | None:
        """One line if the file at ``path`` is missing or its size differs; else None."""
        return _size_problem(path, self.ends[-1] if self.ends else 0)

    def problem(self, path: Path) -> str | None:
        """One line if the file at ``path`` is missing or differs; else None."""
        wrong = self.size_problem(path)
        for (start, end), checksum in self._pieces.items():
            wrong = wrong or _problem(path, start, end - start, checksum)
        return wrong

    def piece_problem(self, name: str, start: int, data: bytes) -> str | None:
        """One line if ``data`` is not the piece at ``start`` of this file, ``name``; else None."""
        saved = self.piece_sum(start, len(data))
        if saved is None:
            return f"{name} has no piece of {len(data)} bytes at {start}"
        return None if xxhash.xxh3_64_hexdigest(data) == saved else _differs(name, start)

    def piece_sum(self, start: int, length: int) -> str | None:
        """The checksum of a piece; None if there is no such piece."""
        return self._pieces.get((start, start + length))

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], str]:
        """Checksums by start and end."""
        return dict(zip(pairwise((0, *self.ends)), self.xxh3_64, strict=True))


def missing(path: Path, error: OSError) -> str:
    """Message for a file that is missing or a directory.

    Raises:
        OSError: with the file's name, for any other error: a disk or a network is at fault, and
            the file may be intact.
    """
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path.name} is missing"
    if isinstance(error, IsADirectoryError):
        return f"{path.name} is a directory"
    raise OSError(error.errno, error.strerror, str(path)) from error


def _size_problem(path: Path, num_bytes: int) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return missing(path, error)
    return None if size == num_bytes else f"{path.name} has {size} bytes, not {num_bytes}"


def _problem(path: Path, start: int, length: int, checksum: str) -> str | None:
    try:
        if _checksum_of(path, start, length) == checksum:
            return None
    except OSError as error:
        return missing(path, error)
    return _differs(path.name, start)


def _differs(name: str, start: int) -> str:
    place = f", from byte {start} on" if start else ""
    return f"{name} has another checksum than when it was made{place}"


def _checksum_of(path: Path, start: int, length: int) -> str:
    """Checksum (XXH3, 64 bits, in hexadecimal) of ``length`` bytes, or fewer at the file's end.

    OSError if the file cannot be read.
    """
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(length, _CACHED_BYTES)))
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        while length > 0 and (count := stream.readinto(buffer[:length])):
            digest.update(buffer[:count])
            length -= count
    return digest.hexdigest()


def sealed(values: dict[str, Any]) -> str:
    """JSON of ``values`` with their checksum; ValueError if a number is not finite."""
    return _text({**values, _SEAL: _checksum(values)})


def unsealed(text: bytes) -> dict[str, Any]:
    """Values of a text that ``sealed`` wrote; ValueError, in a few words, for any other text."""
    try:
        values = json.loads(text.decode())
        same_text = _text(values).encode() == text
    except (ValueError, RecursionError):
        raise ValueError("it is not a complete JSON file") from None
    if not isinstance(values, dict) or _SEAL not in values:
        raise ValueError(f"it has no checksum ('{_SEAL}')")
    seal = values.pop(_SEAL)
    if not same_text or seal != _checksum(values):
        raise ValueError("it has another checksum than when it was made")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(_text(values).encode())


def _text(values: Any) -> str:
    return json.dumps(values, indent=1, allow_nan=False)


def stamp(files: Iterable[Path]) -> Stamp | None:
    """Times and sizes of files, to detect changes.

    They include the time of the last status change (ctime), which no program can set. Take the
    stamp before reading the files. None if a file is missing, or changed too recently.
    """
    now, states = time.time(), []
    for file in files:
        try:
            state = os.stat(file)
        except OSError:
            return None
        if abs(now - state.st_ctime) < _FRESH_S:
            return None
        times = (state.st_mtime_ns, state.st_ctime_ns)
        states.append((str(file), state.st_dev, state.st_ino, state.st_size, *times))
    return tuple(states)
