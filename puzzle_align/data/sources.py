"""Open a source of raw records (JSONL, Parquet, a `datasets` directory, the hub), and hash it."""

import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from puzzle_align.config.sections.data import DataConfig
from puzzle_align.data.blocks import (
    BLOCK_BYTES,
    MAX_DEPTH,
    Block,
    RawRecord,
    Source,
    not_too_deep,
)
from puzzle_align.data.columnar import ParquetFile, load_dataset, open_dataset
from puzzle_align.data.errors import DataError, Foreign
from puzzle_align.files.checksums import Stamp, blocks, stamp

COLUMNS = (
    "prompt",
    "chosen",
    "rejected",
    "margin",
    "completion",
    "label",
    "tools",
    "chat_template_kwargs",
)
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FILE_SUFFIXES = (*JSON_SUFFIXES, ".parquet")

MOST_LINE = 256 * 2**20  # bytes: a longer line is a whole file of records, not one


def open_source(source: str, columns: Sequence[str] | None = COLUMNS) -> Source:
    """Open a file, a directory written by ``save_to_disk``, or a dataset of the hub.

    ``NAME#split`` picks a split of the latter two (default: train, or the only one).

    Args:
        columns: read from columnar files; None: all.

    Raises:
        DataError: if the source cannot be read.
    """
    path = Path(source)
    if source.endswith(JSON_SUFFIXES):
        return JsonLines(_existing(path))
    if path.suffix == ".parquet":
        return ParquetFile(_existing(path), columns)
    return open_dataset(source, columns)


def read_records(source: str, columns: Sequence[str] | None = COLUMNS) -> Iterator[RawRecord]:
    """Iterate over the records of a source; DataError if it turns out to be broken."""
    opened = open_source(source, columns)
    return (record for block in opened.blocks() for record in opened.records(_whole(block)))


def _whole(block: Block | DataError) -> Block:
    if isinstance(block, DataError):
        raise block
    return block


_hashes: dict[tuple[str, Stamp], str] = {}  # of this process: jobs ask for them several times


def hash_source(source: str) -> str:
    """XXH3 (128 bits) of a source's bytes, or of a hub dataset's fingerprint."""
    digest = xxhash.xxh3_128()
    name, _, split = source.partition("#")
    path = Path(source if Path(source).exists() else name)
    if path.is_file() or source.endswith(FILE_SUFFIXES):
        files, folder = [_existing(path)], path.parent
    elif path.is_dir():
        files, folder = list(_files_in(path)), path
        digest.update(split.encode())
    else:
        digest.update(load_dataset(source)._fingerprint.encode())
        return digest.hexdigest()
    files_stamp = stamp(files)
    if files_stamp is not None and (split, files_stamp) in _hashes:
        return _hashes[split, files_stamp]
    for file in files:
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size} ".encode())
        for block in blocks(file):
            digest.update(block)
    if files_stamp is not None:
        _hashes[split, files_stamp] = digest.hexdigest()
    return digest.hexdigest()


def _files_in(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Files below a folder in the order of their names, linked folders included."""
    real = os.path.realpath(folder)
    for path in () if real in above else sorted(folder.iterdir()):  # a link may lead back up
        if path.is_dir():
            yield from _files_in(path, (*above, real))
        elif path.is_file():
            yield path


def hash_sources(config: DataConfig) -> dict[str, str]:
    """``hash_source`` of every source that a job tokenizes, by the source's name."""
    names = (config.train, config.eval) if config.format == "auto" else ()
    return {source: hash_source(source) for source in names if source is not None}


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(str(path), "no such file", "no such file", "check data.train and data.eval")
    if not os.access(path, os.R_OK):
        raise DataError(str(path), "unreadable", "no permission to read it", "change it")
    return path


@dataclass(frozen=True)
class JsonLines:
    """``Source`` of a record a line; blank lines are skipped."""

    path: Path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Whole lines, as one text."""
        is_gzip = self.path.suffix == ".gz"
        kind = "whole gzip" if is_gzip else "readable"
        library = Foreign(str(self.path), f"not a {kind} file", "copy it again")
        with library.read(lambda: self.path.open("rb")) as file:
            stream = gzip.GzipFile(fileobj=file) if is_gzip else file
            lines: list[bytes] = []
            first, num_bytes, num_records, problem = 1, 0, 0, None
            while True:
                try:
                    line = library.read(stream.readline, MOST_LINE + 1)
                    self._check_length(line, first + len(lines))
                except DataError as error:
                    problem, line = error, b""
                lines.append(line)
                num_bytes += len(line)
                num_records += bool(line) and not line.isspace()
                is_full = num_bytes >= size and num_records % together == 0
                if num_bytes and (is_full or not line):
                    yield Block(first, b"".join(lines), file.tell())
                    first += len(lines)
                    lines, num_bytes, num_records = [], 0, 0
                if not line:
                    break
            if problem is not None:
                yield problem

    def _check_length(self, line: bytes, number: int) -> None:
        if len(line) > MOST_LINE:
            what = f"the line is longer than {MOST_LINE // 2**20} MiB"
            cure = "write one JSON object a line, and leave such records out"
            raise DataError(f"{self.path}:{number}", "line too long", what, cure)

    def records(self, block: Block) -> Iterator[RawRecord]:
        """Records of the lines that are not blank."""
        for number, line in enumerate(io.BytesIO(block.data), start=block.first):
            if line.strip():
                origin = f"{self.path}:{number}"
                yield origin, _parse_line(line, origin)


def _parse_line(line: bytes, origin: str) -> dict[str, Any] | DataError:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        what = f"invalid UTF-8 at byte {error.start} of the line"
        return DataError(origin, "invalid UTF-8", what, "save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        what = f"invalid JSON ({getattr(error, 'msg', error)}{where})"
        return DataError(origin, "invalid JSON", what, "write one JSON object a line")
    if not isinstance(record, dict):
        what = f"the line is a JSON {type(record).__name__}, not an object"
        return DataError(origin, "invalid JSON", what, "write one JSON object a line")
    may_be_deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH
    return not_too_deep(record, origin) if may_be_deep else record
