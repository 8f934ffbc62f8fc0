"""Sources of raw records: JSON lines, Parquet, directories of `datasets`, the hub, memory.

A source is divided into blocks that any process can read. Block boundaries do not depend on the
number of processes.
"""

import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import xxhash

from puzzle_align.data.errors import DataError, Foreign
from puzzle_align.files.checksums import Stamp, stamp
from puzzle_align.files.messages import quoted, shown

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

MOST_LINE = 256 * 2**20  # bytes: a longer line is likely a whole file on one line

BLOCK_BYTES = 4 * 2**20  # of a block, about; a record is never divided
BLOCK_RECORDS = 10_000  # most rows of a block, for small records or unknown sizes

RawRecord = tuple[str, dict[str, Any] | DataError]  # origin, and the record or its error
_BUFFER_BYTES = 2**20  # of a Parquet column, read at once
_SPLIT = re.compile(r"\w+([.-]\w+)*")  # split names of datasets; none leaves the directory


@dataclass(frozen=True)
class Block:
    """Consecutive records of a source; can be pickled."""

    first: int  # number of the first record, or line
    data: Any  # the records, in the source's form
    end: int  # position of the block's end, in the unit of the source's ``size``


class Source(Protocol):
    """A file or dataset of raw records; can be pickled.

    A source that cannot be read at all raises when it is opened.
    """

    @property
    def size(self) -> int:
        """End of the last block, in bytes or records; 0 if unknown."""
        ...

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Blocks in order; the last item is a DataError if the source is broken.

        Args:
            together: every block but the last holds a multiple of this many records.
            size: bytes of a block, about.
        """
        ...

    def records(self, block: Block) -> Iterator[RawRecord]:
        """Records of a block; a DataError in place of a bad one."""
        ...


@dataclass(frozen=True)
class GivenRecords:
    """A ``Source`` of records in memory, read once, in this process."""

    name: str  # in errors
    all_records: Iterator[RawRecord]

    @property
    def size(self) -> int:
        """Unknown."""
        return 0

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Lists of records."""
        del size
        first, number = 0, -(-BLOCK_RECORDS // together) * together
        while records := list(islice(self.all_records, number)):
            yield Block(first, records, 0)
            first += len(records)

    def records(self, block: Block) -> Iterator[RawRecord]:
        """The block's list."""
        return iter(block.data)


@dataclass(frozen=True)
class JsonLines:
    """``Source`` with one record per line; blank lines are skipped."""

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
            try:
                for line in library.each(iter(partial(stream.readline, MOST_LINE + 1), b"")):
                    self._check_length(line, first + len(lines))
                    lines.append(line)
                    num_bytes += len(line)
                    num_records += not line.isspace()
                    if num_bytes >= size and num_records % together == 0:
                        yield Block(first, b"".join(lines), file.tell())
                        first += len(lines)
                        lines, num_bytes, num_records = [], 0, 0
            except DataError as error:
                problem = error
            if lines:
                yield Block(first, b"".join(lines), file.tell())
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
        why = str(error)
        if isinstance(error, json.JSONDecodeError):  # some messages end with "at" themselves
            why = f"{error.msg.removesuffix(' at')} at character {error.pos}"
        what = f"invalid JSON ({why})"
        return DataError(origin, "invalid JSON", what, "write one JSON object a line")
    if not isinstance(record, dict):
        what = f"the line is a JSON {type(record).__name__}, not an object"
        return DataError(origin, "invalid JSON", what, "write one JSON object a line")
    return record


@dataclass(frozen=True)
class ParquetFile:
    """``Source`` of the rows of a Parquet file."""

    path: Path
    columns: Sequence[str] | None  # to read, if present; None: all

    @property
    def size(self) -> int:
        """Rows of the file; 0 if it cannot be read."""
        import pyarrow.parquet

        try:
            return self._foreign.read(pyarrow.parquet.read_metadata, self.path).num_rows
        except DataError:
            return 0

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Arrow tables."""
        try:
            yield from self._batches(together, size)
        except DataError as error:
            yield error

    def _batches(self, together: int, size: int) -> Iterator[Block]:
        import pyarrow.parquet

        library = self._foreign
        # Verifies page checksums, where the file's writer added them.
        checked = partial(pyarrow.parquet.ParquetFile, page_checksum_verification=True)
        # pre_buffer would hold a whole row group, which may be gigabytes, in memory.
        opened = partial(checked, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        file = library.read(opened, self.path)
        columns = _present(self.columns, library.read(lambda: file.schema_arrow.names))
        num_bytes = library.read(_num_bytes, file.metadata, self.path)
        rows = _rows_together(num_bytes, file.metadata.num_rows, together, size)
        number = 0
        for table in _tables(
            library.each(file.iter_batches(batch_size=rows, columns=columns)), rows
        ):
            yield Block(number, table, number + table.num_rows)
            number += table.num_rows

    @property
    def _foreign(self) -> Foreign:
        return Foreign(str(self.path), "not a readable Parquet file", "write it again")

    def records(self, block: Block) -> Iterator[RawRecord]:
        """Rows of the block."""

        def take(start: int, stop: int) -> list[dict[str, Any]]:
            return block.data.slice(start - block.first, stop - start).to_pylist()

        return _rows(take, str(self.path), block.first, block.data.num_rows)


def _num_bytes(metadata: Any, path: Path) -> int:
    """Approximate uncompressed bytes of a Parquet file, from its metadata.

    Counts all columns: pyarrow crashes the process on damaged metadata of a single column.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    return max(path.stat().st_size, sum(group.total_byte_size for group in groups))


def _rows_together(num_bytes: int, num_rows: int, together: int, size: int) -> int:
    """Rows in a block of about ``size`` bytes, a multiple of ``together``."""
    rows = min(size * num_rows // max(num_bytes, 1), BLOCK_RECORDS)
    return max(-(-rows // together), 1) * together


def _tables(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """Regroup batches, which may end at every row group, into tables of ``rows`` rows."""
    import pyarrow

    slices: list[Any] = []
    missing = rows
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            slices.append(batch.slice(start, missing))
            start += slices[-1].num_rows
            missing -= slices[-1].num_rows
            if not missing:
                yield pyarrow.Table.from_batches(slices)
                slices, missing = [], rows
    if slices:
        yield pyarrow.Table.from_batches(slices)


def _rows(
    take: Callable[[int, int], list[dict[str, Any]]], source: str, start: int, number: int
) -> Iterator[RawRecord]:
    """Rows ``start`` to ``start + number`` of a columnar source, read with ``take``.

    They are read at once, or one by one if that fails: a DataError stands in for a bad row.
    """

    def one(row: int) -> dict[str, Any] | DataError:
        cure = "write it as UTF-8 text, numbers, or lists of them"
        field = Foreign(f"{source}:{row}", "a field cannot be read", cure, "unreadable field")
        try:
            return field.read(take, row, row + 1)[0]
        except DataError as error:
            return error

    try:
        records = Foreign(source, "", "").read(take, start, start + number)
    except DataError:
        records = [one(row) for row in range(start, start + number)]
    for row, record in enumerate(records, start):
        yield f"{source}:{row}", record


def _present(columns: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    return [name for name in (names if columns is None else columns) if name in names]


@dataclass(frozen=True)
class DatasetRows:
    """``Source`` of the rows of a ``datasets.Dataset``."""

    name: str
    dataset: Any  # pickled by the names of its files

    @property
    def size(self) -> int:
        """Rows."""
        return len(self.dataset)

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Ranges of rows; ``data`` is the end of the range."""
        rows = _rows_together(self.dataset.data.nbytes, self.size, together, size)
        for first in range(0, self.size, rows):
            end = min(first + rows, self.size)
            yield Block(first, end, end)

    def records(self, block: Block) -> Iterator[RawRecord]:
        """Rows of the block."""

        def take(start: int, stop: int) -> list[dict[str, Any]]:
            columns = self.dataset[start:stop]
            return [{name: columns[name][row] for name in columns} for row in range(stop - start)]

        return _rows(take, self.name, block.first, block.data - block.first)


def _foreign_dataset(source: str) -> Foreign:
    cure = (
        "name a .jsonl(.gz) or .parquet file, a directory written by save_to_disk, or a hub dataset"
    )
    return Foreign(source, "cannot be read as a dataset", cure, "unreadable source")


def load_dataset(source: str) -> Any:
    """A ``datasets.Dataset`` from a directory or the hub."""
    import datasets

    name, _, split = source.partition("#")
    path, library = Path(name), _foreign_dataset(source)
    if path.is_dir():
        folder = _dataset_folder(path, split, library)
        _check_arrow_files(folder, library)
        return library.read(datasets.Dataset.load_from_disk, str(folder))
    if path.is_file() or name.startswith(("/", "./", "../")):
        what = "neither a known file type nor a directory"
        raise DataError(source, library.reason, what, library.cure)
    loaded = library.read(datasets.load_dataset, name)
    if isinstance(loaded, datasets.Dataset):
        return loaded
    return loaded[_chosen_split(name, split, sorted(map(str, loaded)))]


def _check_arrow_files(folder: Path, library: Foreign) -> None:
    """Raise a DataError if a dataset's Arrow files are damaged; Arrow crashes on wrong offsets."""
    import pyarrow

    file = folder / "state.json"
    if not file.is_file():
        return  # not a dataset: its reader raises the error
    names = library.read(
        lambda: [entry["filename"] for entry in json.loads(file.read_bytes())["_data_files"]]
    )
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            what = f"state.json has the file {quoted(name)}"
            raise DataError(library.origin, library.reason, what, "write the directory again")
        file_name = f"{folder}/{shown(name)}"
        arrow, first = Foreign(file_name, "not a whole Arrow file", "copy it again"), 0
        with arrow.read(pyarrow.memory_map, str(folder / name)) as stream:
            for batch in arrow.each(arrow.read(pyarrow.ipc.open_stream, stream)):
                last = first + batch.num_rows - 1
                rows = Foreign(arrow.origin, f"damaged in its rows {first} to {last}", arrow.cure)
                rows.read(partial(batch.validate, full=True))
                first = last + 1


def _dataset_folder(path: Path, split: str, library: Foreign) -> Path:
    """The folder of a dataset: the directory itself, or a split's folder in it."""
    file = path / "dataset_dict.json"
    if (path / "state.json").is_file() or not file.is_file():
        return path
    splits = library.read(lambda: json.loads(file.read_bytes())["splits"])
    names: list[Any] = splits if isinstance(splits, list) and splits else [None]
    for name in names:
        if not isinstance(name, str) or not _SPLIT.fullmatch(name):
            what = f"dataset_dict.json has the split {quoted(name)}"
            raise DataError(library.origin, library.reason, what, "write the directory again")
    return path / _chosen_split(str(path), split, sorted(names))


def _chosen_split(name: str, split: str, splits: list[str]) -> str:
    """The split in ``NAME#split``; by default the only one, or train."""
    split = split or (splits[0] if len(splits) == 1 else "train")
    if split not in splits:
        what = f"no split '{shown(split)}' among {shown(', '.join(splits))}"
        cure = f"write {name}#{shown(splits[0])}"
        raise DataError(f"{name}#{split}", "no such split", what, cure)
    return split


def open_source(source: str, columns: Sequence[str] | None = COLUMNS) -> Source:
    """Open a file, a directory written by ``save_to_disk``, or a hub dataset.

    ``NAME#split`` picks a split of the latter two (default: the only one, or train).

    Args:
        columns: to read from columnar files; None: all.

    Raises:
        DataError: if the source cannot be read.
    """
    path = Path(source)
    if source.endswith(JSON_SUFFIXES):
        return JsonLines(_existing(path))
    if path.suffix == ".parquet":
        return ParquetFile(_existing(path), columns)
    dataset = load_dataset(source)
    names = _present(columns, dataset.column_names)
    rows = _foreign_dataset(source).read(lambda: dataset.with_format(None).select_columns(names))
    return DatasetRows(source, rows)


_hashes: dict[tuple[str, Stamp], str] = {}  # in this process: a job needs them several times


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
        with file.open("rb", buffering=0) as stream:
            hashlib.file_digest(stream, lambda: digest)
    if files_stamp is not None:
        _hashes[split, files_stamp] = digest.hexdigest()
    return digest.hexdigest()


def _files_in(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Files below a folder, sorted by name in each folder; follows links to folders."""
    real = os.path.realpath(folder)
    for path in () if real in above else sorted(folder.iterdir()):  # a link may lead back up
        if path.is_dir():
            yield from _files_in(path, (*above, real))
        elif path.is_file():
            yield path


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(str(path), "no such file", "no such file", "check data.train and data.eval")
    if not os.access(path, os.R_OK):
        raise DataError(str(path), "unreadable", "no permission to read it", "change it")
    return path
