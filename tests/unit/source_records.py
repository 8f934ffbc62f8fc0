"""All records of a source, for tests of what is read."""

from collections.abc import Iterator, Sequence

from puzzle_align.data.blocks import Block, RawRecord
from puzzle_align.data.errors import DataError
from puzzle_align.data.sources import COLUMNS, open_source


def read_records(source: str, columns: Sequence[str] | None = COLUMNS) -> Iterator[RawRecord]:
    """Iterate over the records of a source; raises a DataError if the source is broken."""
    opened = open_source(source, columns)
    return (record for block in opened.blocks() for record in opened.records(_whole(block)))


def _whole(block: Block | DataError) -> Block:
    if isinstance(block, DataError):
        raise block
    return block
