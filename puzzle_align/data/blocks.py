"""Sources of records, cut into blocks that any process can read.

The cuts depend on the source alone, not on the number of processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from puzzle_align.data.errors import DataError

BLOCK_BYTES = 4 * 2**20  # of a source in a block, about; a record is never cut
BLOCK_RECORDS = 10_000  # in a block at most, where records are small, or their sizes are not known
MAX_DEPTH = 100  # of lists and mappings in each other, in a record

RawRecord = tuple[str, dict[str, Any] | DataError]  # origin, the record or what is wrong with it


@dataclass(frozen=True)
class Block:
    """Consecutive records of a source; can be pickled."""

    first: int  # number of the first record, or line
    data: Any  # what the source needs to read them
    end: int  # of the source's ``size``, what lies before the end of this block


class Source(Protocol):
    """A file or dataset of raw records; can be pickled.

    A source that cannot be read at all raises when it is opened.
    """

    @property
    def size(self) -> int:
        """End of the last block, in bytes or records."""
        ...

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Blocks in order; the last item is a DataError if the source turns out to be broken.

        Args:
            together: every block but the last holds a multiple of so many records.
            size: bytes in a block, about.
        """
        ...

    def records(self, block: Block) -> Iterator[RawRecord]:
        """Records of a block; a bad record is its DataError."""
        ...


@dataclass(frozen=True)
class GivenRecords:
    """A ``Source`` of records in memory, read once, in this process."""

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


def not_too_deep(record: dict[str, Any], origin: str) -> dict[str, Any] | DataError:
    """The record, or the DataError of one that recursive functions cannot walk."""
    level: list[Any] = [record]
    for _ in range(MAX_DEPTH + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, dict | list | tuple)]
        if not level:
            return record
    what = f"nested more than {MAX_DEPTH} levels deep"
    return DataError(origin, "nested too deep", what, "write it flat, or as text")
