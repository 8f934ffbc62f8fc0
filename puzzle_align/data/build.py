"""From a source to the columns of a dataset: block by block, in this process or in several.

Whatever has records (pairs, single responses, prompts) goes this way: a ``Recipe`` says what
becomes of them. The columns, the report and the first error are the same for any number of
processes, and where an interrupted preparation goes on.
"""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from puzzle_align.data.blocks import BLOCK_BYTES, Block, RawRecord, Source
from puzzle_align.data.cache import Kept, cached
from puzzle_align.data.growing import Arrays, Column, Growing
from puzzle_align.data.progress import Progress
from puzzle_align.data.reading import check_not_empty, usable_items
from puzzle_align.data.records import DataError, ReadReport
from puzzle_align.data.sources import hash_source, open_source
from puzzle_align.data.workers import mapped
from puzzle_align.files.json_file import to_plain
from puzzle_align.files.typed import from_plain

CACHE_VERSION = 9
MAX_WORKERS = 32  # where their number is not given
SMALL = 12  # blocks (of 4 MiB) that are not worth the start of other processes

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """What has become of some records that follow each other."""

    arrays: Arrays  # rows of every column
    report: ReadReport
    column_names: tuple[str, ...] = ()  # of the records, where the dataset keeps them


class Recipe(Protocol[Item]):
    """What records become; can be pickled."""

    @property
    def skip_errors(self) -> bool:
        """Whether a bad record is counted; else it is raised."""
        ...

    @property
    def together(self) -> int:
        """Records are looked at in groups of so many."""
        ...

    @property
    def optional(self) -> Sequence[str]:
        """Columns that are left out where all is 0."""
        ...

    def new_report(self) -> ReadReport:
        """One that has counted nothing."""
        ...

    def records(self, raw: Iterator[RawRecord]) -> Iterator[RawRecord]:
        """Those to convert, in their order, of the raw ones of a block."""
        ...

    def convert(self, chunk: list[RawRecord]) -> list[Item | DataError]:
        """The item or the error of every record."""
        ...

    def part(self, items: Iterator[Item], report: ReadReport) -> Part:
        """The items in columns; the report counts what they are."""
        ...

    def fingerprint(
        self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Iterable[Any]]
    ) -> str:
        """The hash of a dataset of these columns, whose bytes ``read`` gives by their names."""
        ...

    def problem(self, kept: Kept) -> str | None:
        """What is wrong with columns of the cache, in some words; None: nothing."""
        ...


@dataclass(frozen=True)
class Columns:
    """All that a source gave."""

    arrays: Arrays  # memory-mapped, or here
    report: ReadReport
    column_names: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True)
class Preparation:
    """How, and where, columns are made. What they hold does not depend on it."""

    cache_dir: Path | None = None  # None: they are made anew, in memory
    num_workers: int | None = None  # processes that tokenize; None: as many as are worth it
    progress: bool = False  # whether to show it
    verify: bool = True  # read a cache's files through before they are used
    hash_of: Callable[[str], str] = hash_source  # a source's hash, where it is known
    block_bytes: int = BLOCK_BYTES  # of the source, tokenized by a process at a time


def columns_of(
    source: str, names: Sequence[str] | None, key: Any, recipe: Recipe[Any], how: Preparation
) -> Columns:
    """The columns of a source, from the cache where it has them.

    Args:
        names: the columns of the source to read; None: all.
        key: JSON that decides, beside the source, what the columns hold.

    Raises:
        ValueError: one line, for bad data, a source that has another hash than it is to have, or a
            cache that cannot be written.
    """
    if how.cache_dir is None:
        return gathered(open_source(source, names), recipe, source, how)
    wanted = how.hash_of(source)

    def make(growing: Growing) -> dict[str, Any]:
        # The hash may be another node's, whose copy need not be this one.
        if hash_source(source) != wanted:
            what = "it is not, or not any more, what rank 0 read at the start"
            raise DataError(source, "another copy", what, "copy it here again, and leave it alone")
        made = _grown(growing, open_source(source, names), recipe, source, how)
        if hash_source(source) != wanted:  # read again only where the files' times say so
            cure = "run the same command again once nothing writes to it"
            raise DataError(source, "changed", "it was changed while it was read", cure)
        return made

    whole_key = [CACHE_VERSION, wanted, key]
    problem = partial(_problem, recipe)
    kept = cached(how.cache_dir, whole_key, make, problem, verify=how.verify)
    values = from_plain(_Values, kept.values, str(how.cache_dir))
    return Columns(kept.arrays, values.report, values.column_names, values.fingerprint)


@dataclass(frozen=True)
class _Values:
    """What the cache holds beside the columns."""

    source: str
    fingerprint: str
    report: ReadReport
    column_names: tuple[str, ...]


@dataclass(frozen=True)
class _State:
    """What a preparation knows beside the columns that it has so far."""

    block_bytes: int
    report: ReadReport
    column_names: tuple[str, ...]


def _problem(recipe: Recipe[Any], kept: Kept) -> str | None:
    """What is wrong with what the cache holds, in some words."""
    try:
        from_plain(_Values, kept.values, "its values")
    except ValueError as error:
        return str(error)
    return _columns_problem(recipe, kept.columns) or recipe.problem(kept)


def _columns_problem(recipe: Recipe[Any], columns: Mapping[str, Column]) -> str | None:
    """Where columns are not the recipe's, in some words."""
    empty = recipe.part(iter(()), recipe.new_report()).arrays
    wanted = {name: (array.dtype.str, array.shape[1:]) for name, array in empty.items()}
    found = {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
    left_out = {name for name in recipe.optional if name not in found}
    if found != {name: own for name, own in wanted.items() if name not in left_out}:
        return f"its columns are not {', '.join(wanted)}"
    return None


def gathered(source: Source, recipe: Recipe[Any], name: str, how: Preparation) -> Columns:
    """The columns in memory."""
    report, found = recipe.new_report(), list[Part]()
    with closing(parts(source, recipe, name, how)) as made:
        for part in made:
            report.add(part.report)
            found.append(part)
    check_not_empty(report, name)
    arrays = {key: np.concatenate([part.arrays[key] for part in found]) for key in found[0].arrays}
    for key in recipe.optional:
        if not arrays[key].any():
            del arrays[key]
    shapes = {key: values.shape for key, values in arrays.items()}
    fingerprint = recipe.fingerprint(shapes, lambda key: [arrays[key].data])
    names = dict.fromkeys(chain.from_iterable(part.column_names for part in found))
    return Columns(arrays, report, tuple(names), fingerprint)


def _grown(
    growing: Growing, source: Source, recipe: Recipe[Any], name: str, how: Preparation
) -> dict[str, Any]:
    """Fill a folder of the cache; the values that are kept beside the columns."""
    report, names = recipe.new_report(), dict[str, None]()
    if (state := _going_on(growing, recipe, how)) is not None:
        report, names = state.report, dict.fromkeys(state.column_names)
    with closing(parts(source, recipe, name, how, num_done=growing.num_parts)) as made:
        for part in made:
            report.add(part.report)
            names.update(dict.fromkeys(part.column_names))
            growing.append(part.arrays, to_plain(_State(how.block_bytes, report, tuple(names))))
    check_not_empty(report, name)
    for key in recipe.optional:
        column = growing.columns[key]
        if column.least == column.most == 0:
            growing.drop(key)
    shapes = {key: column.shape for key, column in growing.columns.items()}
    return to_plain(_Values(name, recipe.fingerprint(shapes, growing.read), report, tuple(names)))


def _going_on(growing: Growing, recipe: Recipe[Any], how: Preparation) -> _State | None:
    """What there is to go on from; None to begin."""
    if not growing.num_parts:
        return None
    try:
        state = from_plain(_State, growing.state, "its state")
        if state.block_bytes != how.block_bytes:
            raise ValueError("it is in parts of another size")
        if (wrong := _columns_problem(recipe, growing.columns)) is not None:
            raise ValueError(wrong)
    except ValueError as error:
        growing.begin_anew(str(error))
        return None
    return state


def parts(
    source: Source, recipe: Recipe[Any], name: str, how: Preparation, *, num_done: int = 0
) -> Generator[Part, None, None]:
    """What becomes of every block of the source but the first ``num_done``, in order.

    Raises:
        DataError: what is wrong with the source at its first place.
    """
    ends: list[int] = []  # of the blocks that are under way, or done

    def noted(block: Block | DataError) -> Block | DataError:
        ends.append(block.end if isinstance(block, Block) else 0)
        return block

    blocks = source.blocks(recipe.together, how.block_bytes)
    start = 0
    for block in islice(blocks, num_done):
        start = block.end if isinstance(block, Block) else 0
    num_workers, blocks = _team(how.num_workers, blocks)
    convert = partial(convert_block, source=source, recipe=recipe)
    with (
        Progress(name, source.size, start, shown=how.progress) as progress,
        closing(mapped(convert, map(noted, blocks), num_workers)) as results,
    ):
        for number, part in enumerate(results):
            if isinstance(part, DataError):
                raise part
            progress.update(ends[number], part.report)
            yield part


def convert_block(
    block: Block | DataError, source: Source, recipe: Recipe[Any]
) -> Part | DataError:
    """What becomes of a block, or the error that ends the preparation."""
    if isinstance(block, DataError):
        return block
    report = recipe.new_report()
    records = recipe.records(source.records(block))
    items = usable_items(records, recipe.convert, report, skip_errors=recipe.skip_errors)
    try:
        return recipe.part(items, report)
    except DataError as error:
        return error


def _team(
    asked: int | None, blocks: Iterator[Block | DataError]
) -> tuple[int, Iterator[Block | DataError]]:
    """How many processes, and the blocks: one where there is little to do."""
    first = list(islice(blocks, SMALL))
    if len(first) < SMALL:
        number = 1 if asked is None else min(asked, max(len(first), 1))
    else:
        number = min(len(os.sched_getaffinity(0)), MAX_WORKERS) if asked is None else asked
    return number, chain(first, blocks)
