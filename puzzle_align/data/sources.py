"""Raw records, each with its origin: from JSONL(.gz), Parquet, `datasets` directories, the hub."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from puzzle_align.config.sections.data import DataConfig
from puzzle_align.data.records import DataError

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

RawRecord = tuple[str, dict[str, Any] | DataError]  # origin, the record or what is wrong with it


def read_records(source: str, columns: Sequence[str] | None = COLUMNS) -> Iterator[RawRecord]:
    """Records of a file, a directory written by ``save_to_disk``, or a dataset of the hub.

    ``NAME#split`` picks a split of the latter two (default: train, or the only one). A bad one is
    yielded as its DataError; a source that cannot be read at all raises one. Of columnar files
    only ``columns`` are read; None: all.
    """
    path = Path(source)
    if source.endswith(JSON_SUFFIXES):
        return _read_json_lines(_existing(path))
    if path.suffix == ".parquet":
        return _read_parquet(_existing(path), columns)
    return _read_dataset(source, columns)


def hash_source(source: str) -> str:
    """SHA-256 of a source's bytes; of a hub dataset, its fingerprint."""
    digest = hashlib.sha256()
    name, _, split = source.partition("#")
    path = Path(source if Path(source).exists() else name)
    if path.is_file() or source.endswith(FILE_SUFFIXES):
        files = [_existing(path)]
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digest.update(split.encode())
    else:
        digest.update(_load_dataset(source)._fingerprint.encode())
        return digest.hexdigest()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def hash_sources(config: DataConfig) -> dict[str, str]:
    """``hash_source`` of all that a job reads and tokenizes, by its name in the config."""
    named = (config.train, config.eval) if config.format == "auto" else ()
    return {source: hash_source(source) for source in named if source is not None}


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(str(path), "no such file", "no such file", "check data.train and data.eval")
    if not os.access(path, os.R_OK):
        raise DataError(str(path), "unreadable", "it may not be read", "change its permissions")
    return path


def _read_json_lines(path: Path) -> Iterator[RawRecord]:
    """One record a line; blank lines are passed over."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        lines = enumerate(stream, start=1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise DataError(
                    str(path), "broken file", f"not a whole gzip file ({error})", "copy it again"
                ) from None
            if line.strip():
                origin = f"{path}:{number}"
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
    return record


def _read_parquet(path: Path, wanted: Sequence[str] | None) -> Iterator[RawRecord]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = _present(wanted, file.schema_arrow.names)
        number = 0
        for batch in file.iter_batches(columns=columns):
            for value in _batch_records(batch, path, number):
                yield f"{path}:{number}", value
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        what = f"not a readable Parquet file ({error})"
        raise DataError(str(path), "broken file", what, "write it again") from None


def _batch_records(batch: Any, path: Path, first: int) -> Iterator[dict[str, Any] | DataError]:
    """Records of an Arrow batch, one by one only where some text is not UTF-8."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            what = f"invalid UTF-8 at byte {error.start} of a field"
            yield DataError(
                f"{path}:{first + number}", "invalid UTF-8", what, "save the text as UTF-8"
            )


def _present(wanted: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    return [name for name in (names if wanted is None else wanted) if name in names]


def _read_dataset(source: str, wanted: Sequence[str] | None) -> Iterator[RawRecord]:
    dataset = _load_dataset(source)
    dataset = dataset.select_columns(_present(wanted, dataset.column_names))
    for number, record in enumerate(dataset):
        yield f"{source}:{number}", record


def _load_dataset(source: str) -> Any:
    """A ``datasets.Dataset`` from a directory or the hub."""
    import datasets

    name, _, split = source.partition("#")
    cure = (
        "name a .jsonl(.gz) or .parquet file, a directory written by save_to_disk, or a hub dataset"
    )
    if Path(name).is_file() or (name.startswith(("/", "./", "../")) and not Path(name).is_dir()):
        raise DataError(
            source, "unreadable source", "neither a known file type nor a directory", cure
        )
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        what = f"cannot be read as a dataset ({type(error).__name__}: {error})"
        raise DataError(source, "unreadable source", what, cure) from None
    if isinstance(loaded, datasets.Dataset):
        return loaded
    splits = sorted(map(str, loaded))
    split = split or (splits[0] if len(splits) == 1 else "train")
    if split not in loaded:
        what = f"no split '{split}' among {', '.join(splits)}"
        raise DataError(source, "no such split", what, f"write {name}#{splits[0]}")
    return loaded[split]
