"""Build the columns of a dataset from a source, block by block, in one process or several.

A ``Recipe`` (of pairs, single responses or prompts) converts records to columns. Columns, report
and first error do not depend on the number of processes or the size of blocks.
"""

import os
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from puzzle_align.data.blocks import BLOCK_BYTES, Block, GivenRecords, RawRecord, Source
from puzzle_align.data.cache import CURE, Arrays, ColumnWriter, cached
from puzzle_align.data.errors import DataError, LeftOut, ReadReport, value_or_error
from puzzle_align.data.records import renamed
from puzzle_align.data.sources import hash_source, open_source
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.data.workers import mapped
from puzzle_align.files.json_file import to_plain
from puzzle_align.files.messages import reading, writing
from puzzle_align.files.typed import from_plain

CACHE_VERSION = 12
MAX_WORKERS = 32  # if data.num_proc is not set
SMALL = 12  # blocks (of 4 MiB): fewer are not worth starting other processes
CHUNK = 512  # records rendered together
CHUNK_CHARACTERS = 2**20  # tokenized together, about; a longer text is tokenized alone

Item = TypeVar("Item")
Rendered = TypeVar("Rendered")


@dataclass(frozen=True)
class BlockColumns:
    """Columns of a block's records."""

    arrays: Arrays  # rows of every column
    report: ReadReport
    column_names: tuple[str, ...] = ()  # of the records, if the dataset keeps other columns
    end: int = 0  # of the block, for the display of progress


class Options(Protocol):
    """Options of a recipe that decide the columns' content."""

    @property
    def skip_errors(self) -> bool:
        """Whether a bad record is counted and skipped; else its error is raised."""
        ...

    @property
    def columns(self) -> Mapping[str, str]:
        """The source's names of columns, by ours; other columns keep their names."""
        ...


@dataclass(frozen=True)
class Recipe(ABC, Generic[Rendered, Item]):
    """Converts records to texts, texts and token ids to items, items to columns. Pickles."""

    tokenizer: Tokenizer
    options: Options
    optional: ClassVar[Sequence[str]] = ()  # columns to leave out if all values are 0

    @property
    def together(self) -> int:
        """Blocks hold a multiple of this many records."""
        return 1

    def new_report(self) -> ReadReport:
        """An empty report."""
        return ReadReport()

    def records(self, raw: Iterator[RawRecord]) -> Iterator[RawRecord]:
        """The records to convert, from the raw ones of a block."""
        return raw

    @abstractmethod
    def render(self, raw: dict[str, Any], origin: str) -> Rendered:
        """A raw record as texts; DataError if it is bad."""

    @abstractmethod
    def texts(self, rendered: Rendered) -> Sequence[str]:
        """The texts to tokenize."""

    @abstractmethod
    def finish(self, rendered: Rendered, ids: list[array]) -> Item:
        """The item of rendered texts and their token ids; DataError if it is unusable."""

    @abstractmethod
    def columns(self, items: Iterator[Item], report: ReadReport) -> BlockColumns:
        """The items as columns; counts them in the report."""

    @abstractmethod
    def fingerprint(self, arrays: Arrays) -> str:
        """Hash of the columns' content."""


@dataclass(frozen=True)
class _Values:
    """Values stored with the columns in the cache."""

    fingerprint: str
    report: ReadReport
    column_names: tuple[str, ...]


@dataclass(frozen=True)
class Columns(_Values):
    """Columns of a whole source."""

    arrays: Arrays  # memory-mapped


# Takes a source's name and size; yields a function to call with the size read so far and the rate.
Display = Callable[[str, int], AbstractContextManager[Callable[[int, str], object]]]


def show_nothing(_name: str, _size: int) -> AbstractContextManager[Callable[[int, str], object]]:
    """Show no progress."""
    return nullcontext(lambda _done, _rate: None)


@dataclass(frozen=True)
class Preparation:
    """Options of building columns that do not change their content."""

    cache_dir: Path | None = None  # None: no cache
    num_workers: int | None = None  # processes that tokenize; None: by the source's size
    display: Display = show_nothing
    verify: bool = True  # compare the checksums of cached files before use
    hashes: Mapping[str, str] = field(default_factory=dict)  # expected hashes by source
    block_bytes: int = BLOCK_BYTES  # of the source, tokenized by a process at a time


def columns_of(
    source: str | GivenRecords,
    names: Sequence[str] | None,
    key: Any,
    recipe: Recipe[Any, Any],
    how: Preparation,
) -> Columns:
    """The columns of a source, from the cache if possible; ``GivenRecords`` are not cached.

    Args:
        names: columns of the source to read; None: all.
        key: JSON of everything besides the source that decides the columns' content.

    Raises:
        ValueError: one line, for bad data, a source whose hash is not the expected one, or a cache
            that cannot be written.
    """
    if isinstance(source, GivenRecords):
        return gathered(source, recipe, source.name, replace(how, num_workers=1))
    if how.cache_dir is None:
        with reading(Path(source)):
            opened = open_source(source, names)
        return gathered(opened, recipe, source, how)
    expected_hash = how.hashes.get(source) or hash_source(source)

    def make(writer: ColumnWriter) -> dict[str, Any]:
        # The expected hash may come from another node with another copy of the file.
        if hash_source(source) != expected_hash:
            what = "its content differs from what rank 0 read at the start"
            cure = "copy it to this node again, and do not change it during a run"
            raise DataError(source, "another copy", what, cure)
        columns = _written(writer, open_source(source, names), recipe, source, how)
        if hash_source(source) != expected_hash:  # rereads only files whose stamp has changed
            cure = "run the same command again once nothing writes to it"
            raise DataError(source, "changed", "it was changed while it was read", cure)
        return to_plain(_Values(columns.fingerprint, columns.report, columns.column_names))

    kept = cached(how.cache_dir, [CACHE_VERSION, expected_hash, key], make, verify=how.verify)
    values = from_plain(_Values, kept.values, str(how.cache_dir))
    return Columns(**vars(values), arrays=kept.arrays)


def gathered(source: Source, recipe: Recipe[Any, Any], name: str, how: Preparation) -> Columns:
    """The columns of a source in deleted, memory-mapped files; ``name`` is for errors."""
    with writing(Path(os.environ.get("TMPDIR", "/tmp")), key="TMPDIR", cure=CURE):
        temporary = TemporaryDirectory(ignore_cleanup_errors=True)
    with temporary as folder, ColumnWriter(Path(folder), "TMPDIR") as writer:
        return _written(writer, source, recipe, name, how)


def _written(
    writer: ColumnWriter, source: Source, recipe: Recipe[Any, Any], name: str, how: Preparation
) -> Columns:
    """Write the columns of a source block by block, and map them."""
    report, names = recipe.new_report(), dict[str, None]()
    with closing(parts(source, recipe, name, how)) as all_parts:
        for part in all_parts:
            report.add(part.report)
            names.update(dict.fromkeys(part.column_names))
            writer.append(part.arrays)
    if report.num_used == 0:
        first = next(iter(report.first_errors.values()), "it has no records")
        what = f"no usable {report.unit} ({first})"
        raise DataError(name, f"no {report.unit}", what, "check its records")
    arrays = writer.arrays()
    for key in recipe.optional:
        if not arrays[key].any():
            del arrays[key]
            writer.drop(key)
    return Columns(recipe.fingerprint(arrays), report, tuple(names), arrays)


def parts(
    source: Source, recipe: Recipe[Any, Any], name: str, how: Preparation
) -> Generator[BlockColumns, None, None]:
    """Columns of every block of the source, in order; raises its first DataError."""
    num_workers, blocks = _workers(how.num_workers, source.blocks(recipe.together, how.block_bytes))
    convert = partial(convert_block, source=source, recipe=recipe)
    num_used, start_s = 0, time.monotonic()
    with (
        how.display(f"tokenize {name}", source.size) as show,
        closing(mapped(convert, blocks, num_workers)) as results,
    ):
        for part in results:
            if isinstance(part, DataError):
                raise part
            num_used += part.report.num_used
            rate = num_used / max(time.monotonic() - start_s, 1e-3)
            show(part.end, f"{rate:,.0f} {part.report.unit}/s")
            yield part


def _workers(
    num_asked: int | None, blocks: Iterator[Block | DataError]
) -> tuple[int, Iterator[Block | DataError]]:
    """Number of processes (one for little data), and the blocks."""
    first = list(islice(blocks, SMALL))
    if len(first) < SMALL:
        number = 1 if num_asked is None else min(num_asked, max(len(first), 1))
    else:
        cpus = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        number = cpus if num_asked is None else num_asked
    return number, chain(first, blocks)


def convert_block(
    block: Block | DataError, source: Source, recipe: Recipe[Any, Any]
) -> BlockColumns | DataError:
    """Columns of a block, or the DataError that ends the build."""
    if isinstance(block, DataError):
        return block
    report = recipe.new_report()
    raw = (renamed(record, recipe.options.columns) for record in source.records(block))
    items = _usable_items(recipe.records(raw), recipe, report)
    try:
        return replace(recipe.columns(items, report), end=block.end)
    except DataError as error:
        return error


def _usable_items(
    records: Iterator[RawRecord], recipe: Recipe[Any, Item], report: ReadReport
) -> Iterator[Item]:
    """Usable items of the records, in order; counts all records in the report.

    A bad record raises its DataError unless the recipe skips errors; one to leave out never raises.
    """
    while chunk := list(islice(records, CHUNK)):
        for item in _tokenized(chunk, recipe):
            if not isinstance(item, DataError):
                report.num_used += 1
                yield item
            elif recipe.options.skip_errors or isinstance(item, LeftOut):
                report.skip(item)
            else:
                item.suggest("leave bad records out with data.on_error=skip")
                raise item


def _tokenized(
    chunk: Sequence[RawRecord], recipe: Recipe[Rendered, Item]
) -> list[Item | DataError]:
    """The item or error of every record; tokenizes the texts of all records in few calls."""
    rendered = [
        raw if isinstance(raw, DataError) else value_or_error(recipe.render, raw, origin)
        for origin, raw in chunk
    ]
    all_texts = [
        () if isinstance(item, DataError) else tuple(recipe.texts(item)) for item in rendered
    ]
    ids = _encoded(list(chain.from_iterable(all_texts)), recipe.tokenizer)
    return [
        item
        if isinstance(item, DataError)
        else value_or_error(recipe.finish, item, list(islice(ids, len(item_texts))))
        for item, item_texts in zip(rendered, all_texts, strict=True)
    ]


def _encoded(texts: list[str], tokenizer: Tokenizer) -> Iterator[array]:
    """Token ids of every text as int32 arrays, tokenized in calls of bounded size.

    A tokenizer needs some hundred bytes a token while it works, and a list of ids 8 to 36.
    """
    first = 0
    while first < len(texts):
        end, room = first + 1, CHUNK_CHARACTERS - len(texts[first])
        while end < len(texts) and (room := room - len(texts[end])) >= 0:
            end += 1
        yield from [array("i", ids) for ids in tokenizer.encode_batch(texts[first:end])]
        first = end
