"""Records of columnar sources: Parquet, directories of `datasets`, the hub."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from puzzle_align.data.blocks import (
    BLOCK_BYTES,
    BLOCK_RECORDS,
    Block,
    RawRecord,
    not_too_deep,
)
from puzzle_align.data.errors import DataError, Foreign
from puzzle_align.files.messages import quoted, shown

_BUFFER_BYTES = 2**20  # read together of a Parquet file's column
_SPLIT = re.compile(r"\w+([.-]\w+)*")  # as datasets names them: no way out of the directory


@dataclass(frozen=True)
class ParquetFile:
    """``Source`` of the rows of a Parquet file."""

    path: Path
    columns: Sequence[str] | None  # to read, if the file has them; None: all

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
        # Page checksums are compared; not all writers add them.
        checked = partial(pyarrow.parquet.ParquetFile, page_checksum_verification=True)
        # With pre_buffer a row group, which may be gigabytes, is held in memory at once.
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
        take = partial(_table_rows, block.data, block.first)
        return _rows(take, str(self.path), block.first, block.data.num_rows)


def _num_bytes(metadata: Any, path: Path) -> int:
    """Uncompressed bytes of the rows of a Parquet file, about, from its metadata.

    Counts all columns: asking pyarrow for a single column's metadata ends the process if they are
    damaged.
    """
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    return max(path.stat().st_size, sum(group.total_byte_size for group in groups))


def _rows_together(num_bytes: int, num_rows: int, together: int, size: int) -> int:
    """Rows in a block of about ``size`` bytes, a multiple of ``together``."""
    rows = min(size * num_rows // max(num_bytes, 1), BLOCK_RECORDS)
    return max(-(-rows // together), 1) * together


def _tables(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """Regroup batches, which may end with every row group, into tables of ``rows`` rows."""
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


def _table_rows(table: Any, first: int, start: int, stop: int) -> list[dict[str, Any]]:
    """Rows ``start`` to ``stop`` of a source, from an Arrow table that begins with ``first``."""
    return table.slice(start - first, stop - start).to_pylist()


def _rows(
    take: Callable[[int, int], list[dict[str, Any]]], source: str, start: int, number: int
) -> Iterator[RawRecord]:
    """Rows ``start`` to ``start + number`` of a columnar source, which ``take`` reads.

    They are read together, or one by one if that fails: a bad row is its DataError.
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
        origin = f"{source}:{row}"
        yield origin, record if isinstance(record, DataError) else not_too_deep(record, origin)


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
        """Ranges of rows: ``data`` is the number after the last."""
        rows = _rows_together(self.dataset.data.nbytes, self.size, together, size)
        for first in range(0, self.size, rows):
            end = min(first + rows, self.size)
            yield Block(first, end, end)

    def records(self, block: Block) -> Iterator[RawRecord]:
        """Rows of the block."""
        take = partial(_dataset_rows, self.dataset)
        return _rows(take, self.name, block.first, block.data - block.first)


def open_dataset(source: str, columns: Sequence[str] | None) -> DatasetRows:
    """Open a directory or dataset of the hub; read ``columns`` alone (None: all)."""
    dataset = load_dataset(source)
    names = _present(columns, dataset.column_names)
    library = _foreign_dataset(source)
    rows = library.read(lambda: dataset.with_format(None).select_columns(names))
    return DatasetRows(source, rows)


def _dataset_rows(dataset: Any, start: int, stop: int) -> list[dict[str, Any]]:
    """Rows ``start`` to ``stop`` of a ``datasets.Dataset``."""
    columns = dataset[start:stop]
    return [{name: columns[name][row] for name in columns} for row in range(stop - start)]


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
    """Raise a DataError if a dataset's Arrow files are damaged: Arrow crashes on wrong offsets."""
    import pyarrow

    file = folder / "state.json"
    if not file.is_file():
        return  # no dataset, as its reader will say
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
    """The folder of a dataset: the directory itself, or one of its splits."""
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
    """The split that ``NAME#split`` names; without a name the only one, or train."""
    split = split or (splits[0] if len(splits) == 1 else "train")
    if split not in splits:
        what = f"no split '{shown(split)}' among {shown(', '.join(splits))}"
        cure = f"write {name}#{shown(splits[0])}"
        raise DataError(f"{name}#{split}", "no such split", what, cure)
    return split
