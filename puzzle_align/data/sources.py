"""Sources of raw records: text files, Parquet, directories of `datasets`, the hub.

A source is divided into blocks, whose boundaries do not depend on the number of processes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from puzzle_align.data.blocks import (
    BLOCK_BYTES,
    BLOCK_RECORDS,
    Block,
    GivenRecords,
    RawRecord,
    Source,
)
from puzzle_align.data.errors import DataError, Foreign
from puzzle_align.data.text_files import CsvRecords, JsonLines, JsonListRecords, is_json_list
from puzzle_align.files.checksums import Stamp, stamp
from puzzle_align.files.messages import reading, shown

COLUMNS = (
    "prompt",
    "chosen",
    "rejected",
    "margin",
    "responses",
    "scores",
    "ranks",
    "completion",
    "label",
    "conversations",
    "system",
    "tools",
    "chat_template_kwargs",
    "instruction",
    "completions",
)
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")

_BUFFER_BYTES = 2**20  # of a Parquet column, read at once
_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # by save_to_disk


@dataclass(frozen=True)
class ParquetFile:
    """``Source`` of the rows of a Parquet file."""

    path: Path
    columns: Sequence[str]  # to read
    names: Sequence[str]  # of all columns: those not read are null, for errors to list them
    size: int  # rows

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Arrow tables."""
        try:
            yield from self._batches(together, size)
        except DataError as error:
            yield error

    def _batches(self, together: int, size: int) -> Iterator[Block]:
        import pyarrow.parquet

        library = _foreign_parquet(self.path)
        opened = partial(
            pyarrow.parquet.ParquetFile,
            page_checksum_verification=True,  # where the file's writer added checksums
            pre_buffer=False,  # true would hold a row group, which may be gigabytes, in memory
            buffer_size=_BUFFER_BYTES,
        )
        file = library.read(opened, self.path)
        num_bytes = library.read(_num_bytes, file.metadata, self.path)
        rows = _rows_together(num_bytes, self.size, together, size)
        batches = library.each(file.iter_batches(batch_size=rows, columns=self.columns))
        number = 0
        for table in _tables(batches, rows):
            yield Block(number, table, number + table.num_rows)
            number += table.num_rows

    def records(self, block: Block) -> Iterator[RawRecord]:
        """Rows of the block."""

        def take(start: int, stop: int) -> list[dict[str, Any]]:
            return block.data.slice(start - block.first, stop - start).to_pylist()

        return _rows(take, str(self.path), block.first, block.data.num_rows, self.names)


def _foreign_parquet(path: Path) -> Foreign:
    return Foreign(str(path), "not a readable Parquet file", "write it again")


def _parquet_file(path: Path, columns: Sequence[str] | None) -> ParquetFile:
    import pyarrow.parquet

    library = _foreign_parquet(path)
    file = library.read(pyarrow.parquet.ParquetFile, path)
    names = library.read(lambda: file.schema_arrow.names)
    return ParquetFile(path, _present(columns, names), names, file.metadata.num_rows)


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
    take: Callable[[int, int], list[dict[str, Any]]],
    source: str,
    start: int,
    number: int,
    names: Sequence[str],
) -> Iterator[RawRecord]:
    """Rows ``start`` to ``start + number`` of a columnar source, read with ``take``.

    Columns among ``names`` that it does not read are null. Rows are read at once, or one by one if
    that fails: a DataError stands in for a bad row.
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
    nulls = dict.fromkeys(names)
    for row, record in enumerate(records, start):
        yield f"{source}:{row}", record if isinstance(record, DataError) else nulls | record


def _present(columns: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    return [name for name in (names if columns is None else columns) if name in names]


@dataclass(frozen=True)
class DatasetRows:
    """``Source`` of the rows of a ``datasets.Dataset``."""

    name: str
    dataset: Any  # pickled by the names of its files
    names: Sequence[str] = ()  # as for ``ParquetFile``

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

        return _rows(take, self.name, block.first, block.data - block.first, self.names)


def _foreign_dataset(source: str) -> Foreign:
    cure = (
        f"name a file ({', '.join(FILE_SUFFIXES)}), a directory of such files or written by"
        " save_to_disk, or a hub dataset"
    )
    return Foreign(source, "cannot be read as a dataset", cure, "unreadable source")


def load_dataset(source: str) -> Any:
    """A ``datasets.Dataset`` from a directory (``save_to_disk``'s, or of files) or the hub."""
    import datasets

    name, split = _name_and_split(source)
    path, library = Path(name), _foreign_dataset(source)
    if any((path / file).is_file() for file in _SAVED):
        folder = _dataset_folder(path, split, library)
        _check_arrow_files(folder, library)
        return library.read(datasets.Dataset.load_from_disk, str(folder))
    if path.is_dir():
        names = [file.name for file in _files_in(path) if file.name.endswith(FILE_SUFFIXES)]
        if names == ["meta.json"] and (path / "tokens.npy").is_file():
            what = "files that puzzle-align prepare has packed"
            raise DataError(source, library.reason, what, "set data.format=packed")
        if not names:
            what = "cannot be read as a dataset (no known file type in it)"
            raise DataError(source, library.reason, what, library.cure)
    elif path.is_file() or name.startswith(("/", "./", "../")):
        what = "neither a known file type nor a directory"
        raise DataError(source, library.reason, what, library.cure)
    try:
        loaded = library.read(datasets.load_dataset, name)
    except DataError:
        _check_files(path)  # datasets names no file
        raise
    return loaded[_chosen_split(name, split, sorted(map(str, loaded)))]


def _check_files(folder: Path) -> None:
    """Raise a DataError of a folder's first file that is broken or has other columns."""
    expected: tuple[Path, set[str]] | None = None
    for path in _files_in(folder) if folder.is_dir() else ():
        if not path.name.endswith(FILE_SUFFIXES):
            continue
        names = set[str]()
        source = open_source(str(path), None)
        for block in source.blocks():
            if isinstance(block, DataError):
                raise block
            for _, record in source.records(block):
                if isinstance(record, DataError):
                    raise record
                names |= record.keys()
        expected = expected or (path, names)
        if names != expected[1]:
            what = f"its columns ({shown(', '.join(sorted(names)))}) are not those of {expected[0]}"
            raise DataError(str(path), "other columns", what, "put it into another folder")


def _check_arrow_files(folder: Path, library: Foreign) -> None:
    """Raise a DataError if a dataset's Arrow files are damaged; Arrow crashes on wrong offsets."""
    import pyarrow

    file = folder / "state.json"
    if not file.is_file():
        return  # not a dataset: its reader raises the error
    names = library.read(
        lambda: [str(each["filename"]) for each in json.loads(file.read_bytes())["_data_files"]]
    )
    for name in names:
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
        _refuse_split(str(path), split)
        return path
    splits = library.read(lambda: sorted(map(str, json.loads(file.read_bytes())["splits"])))
    return path / _chosen_split(str(path), split, splits)


def _chosen_split(name: str, split: str, splits: list[str]) -> str:
    """The split in ``NAME#split``; by default the only one, or train."""
    split = split or (splits[0] if len(splits) == 1 else "train")
    if split not in splits:
        what = f"no split '{shown(split)}' among {shown(', '.join(splits)) or 'none'}"
        cure = f"write {name}#{shown(splits[0])}" if splits else "write the directory again"
        raise DataError(f"{name}#{split}", "no such split", what, cure)
    return split


def _refuse_split(name: str, split: str) -> None:
    """Raise a DataError if a split is asked of a source that has none."""
    if split:
        what, cure = "it has no splits", f"write {name}"
        raise DataError(f"{name}#{split}", "no such split", what, cure)


def _file_of(source: str) -> Path | None:
    """The existing file that a source names; None for a directory or a hub dataset."""
    name, split = _name_and_split(source)
    if _names_file(source):
        return _existing(Path(source))
    if _names_file(name):
        _refuse_split(name, split)
    return None


def _name_and_split(source: str) -> tuple[str, str]:
    """The parts of ``NAME#split``; a path that exists may itself have a #."""
    name, sign, split = source.rpartition("#")
    return (name, split) if sign and not Path(source).exists() else (source, "")


def _names_file(name: str) -> bool:
    """Whether a name is a file's, there or not; Spark's directories are also named x.parquet."""
    path = Path(name)
    return path.is_file() or (name.endswith(FILE_SUFFIXES) and not path.is_dir())


def open_source(source: str, columns: Sequence[str] | None = COLUMNS) -> Source:
    """Open a file, a directory (of files, or written by ``save_to_disk``), or a hub dataset.

    ``NAME#split`` picks a split of the latter two (default: the only one, or train).

    Args:
        columns: to read from columnar files; None: all.

    Raises:
        DataError: if the source cannot be read.
    """
    if (path := _file_of(source)) is not None:
        kind = path.name.removesuffix(".gz").rpartition(".")[2]
        if kind == "parquet":
            return _parquet_file(path, columns)
        if kind == "csv":
            return GivenRecords(source, CsvRecords(path))
        if kind == "json" and is_json_list(path):
            return GivenRecords(source, JsonListRecords(path))
        if kind in ("json", "jsonl"):
            return JsonLines(path)
    dataset = load_dataset(source)
    # A selection of no columns would have no rows.
    names = _present(columns, dataset.column_names) or dataset.column_names
    rows = _foreign_dataset(source).read(lambda: dataset.with_format(None).select_columns(names))
    return DatasetRows(source, rows, dataset.column_names)


_hashes: dict[tuple[str, Stamp], str] = {}  # in this process: a job needs them several times


def hash_source(source: str) -> str:
    """XXH3 (128 bits) of a source's bytes, or of a hub dataset's fingerprint."""
    with reading(Path(source)):
        return _hash(source)


def _hash(source: str) -> str:
    digest = xxhash.xxh3_128()
    name, split = _name_and_split(source)
    path = Path(name)
    if (file := _file_of(source)) is not None:
        files, folder = [file], file.parent
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
    """Files below a folder, sorted by name in each folder; follows links to folders.

    Hidden ones are no data: downloads keep their times in ``.cache``, which differ between nodes.
    """
    real = os.path.realpath(folder)
    for path in () if real in above else sorted(folder.iterdir()):  # a link may lead back up
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files_in(path, (*above, real))
        elif path.is_file():
            yield path


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(str(path), "no such file", "no such file", "check the path")
    if not os.access(path, os.R_OK):
        what, cure = "no permission to read it", "change its permissions"
        raise DataError(str(path), "unreadable", what, cure)
    return path
