"""Text files of records: JSON lines, JSON files of one list, and CSV.

A record's origin is the file and the line on which it begins.
"""

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from puzzle_align.data.blocks import BLOCK_BYTES, Block, RawRecord
from puzzle_align.data.errors import DataError, Foreign
from puzzle_align.files.messages import shown

MOST_LINE = 256 * 2**20  # bytes: a longer line is likely a whole file on one line

_LIST = "write a list of objects, or one object a line"
_UTF8 = "invalid UTF-8", "save the file as UTF-8"
_SURROGATE = re.compile("[\udc80-\udcff]")  # a byte that was not UTF-8
_BEFORE = re.compile(r"\s*[\[,]\s*")  # an item of a list
_decode = json.JSONDecoder().raw_decode


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
        library = foreign_file(self.path)
        with library.read(lambda: self.path.open("rb")) as file:
            stream = unpacked(file, self.path)
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


def foreign_file(path: Path) -> Foreign:
    """Reads of a text file that may be compressed."""
    kind = "whole gzip" if path.suffix == ".gz" else "readable"
    return Foreign(str(path), f"not a {kind} file", "copy it again")


def unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    """The bytes of an open file, decompressed if its name ends in .gz."""
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


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
class JsonListRecords:
    """Records of a JSON file that holds one list of objects; the file is read whole."""

    path: Path

    def __iter__(self) -> Iterator[RawRecord]:
        library = foreign_file(self.path)
        with library.read(lambda: self.path.open("rb")) as file:
            content = library.read(unpacked(file, self.path).read)
        try:
            text = content.decode("utf-8-sig")
            number = len(json.loads(text))
        except UnicodeDecodeError as error:
            line = 1 + content.count(b"\n", 0, error.start)
            raise DataError(f"{self.path}:{line}", "invalid UTF-8", *_UTF8) from None
        except (ValueError, RecursionError) as error:
            place, why = str(self.path), str(error)
            if isinstance(error, json.JSONDecodeError):
                place, why = f"{place}:{error.lineno}", f"{error.msg} at column {error.colno}"
            raise DataError(place, "invalid JSON", f"invalid JSON ({why})", _LIST) from None
        end, line = 0, 1
        for _ in range(number):
            start = cast(re.Match[str], _BEFORE.match(text, end)).end()
            line += text.count("\n", end, start)
            origin = f"{self.path}:{line}"
            record, end = _decode(text, start)
            line += text.count("\n", start, end)
            what = f"the list's item is a JSON {type(record).__name__}, not an object"
            bad = DataError(origin, "invalid JSON", what, _LIST)
            yield origin, record if isinstance(record, dict) else bad


def is_json_list(path: Path) -> bool:
    """Whether a file begins as a JSON list does."""
    library = foreign_file(path)
    with library.read(lambda: path.open("rb")) as file:
        begun = library.read(unpacked(file, path).read, 4096)
    return begun.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


@dataclass(frozen=True)
class CsvRecords:
    """Records of a CSV file whose first line names the columns; every value is a text."""

    path: Path

    def __iter__(self) -> Iterator[RawRecord]:
        csv.field_size_limit(MOST_LINE)
        library, names = foreign_file(self.path), list[str]()
        with library.read(lambda: self.path.open("rb")) as file:
            lines = library.each(unpacked(file, self.path))
            # Bytes that are not UTF-8 are an error of their record alone.
            reader = csv.reader(
                (line.decode("utf-8-sig", "surrogateescape") for line in lines), strict=True
            )
            origin = f"{self.path}:1"
            try:
                for row in reader:
                    if names and row:  # not a blank line
                        yield origin, _csv_record(names, row, origin)
                    names = names or row
                    if len({*names}) < len(names):
                        what = f"two columns have one name ({shown(', '.join(names))})"
                        cure = "rename one in the file's first line"
                        raise DataError(origin, "invalid CSV", what, cure)
                    origin = f"{self.path}:{reader.line_num + 1}"
            except csv.Error as error:
                what = f"invalid CSV ({error})"
                cure = "put commas between values, and double the quotes within them"
                raise DataError(origin, "invalid CSV", what, cure) from None


def _csv_record(names: list[str], row: list[str], origin: str) -> dict[str, Any] | DataError:
    if len(row) != len(names):
        what = f"{len(row)} values for {len(names)} columns ({shown(', '.join(names))})"
        cure = "put values with commas, quotes or line breaks in double quotes"
        return DataError(origin, "invalid CSV", what, cure)
    if any(map(_SURROGATE.search, row)):
        return DataError(origin, "invalid UTF-8", *_UTF8)
    return dict(zip(names, row, strict=True))
