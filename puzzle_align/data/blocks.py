"""Blocks of raw records, which any process can read, and sources that are divided into them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from puzzle_align.data.errors import DataError

BLOCK_BYTES = 4 * 2**20  # of a block, about; a record is never divided
BLOCK_RECORDS = 10_000  # most rows of a block, for small records
_GIVEN_RECORDS = 2_000  # of a block, if sizes are unknown

RawRecord = tuple[str, dict[str, Any] | DataError]  # origin, and the record or its error


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
    """A ``Source`` of records that this process iterates over; pickles if the iterable does."""

    name: str  # in errors
    all_records: Iterable[RawRecord]

    @property
    def size(self) -> int:
        """Unknown."""
        return 0

    def blocks(self, together: int = 1, size: int = BLOCK_BYTES) -> Iterator[Block | DataError]:
        """Lists of records; a DataError of the iterable is the last item."""
        del size
        first, number = 0, -(-_GIVEN_RECORDS // together) * together
        rest, problem = iter(self.all_records), None
        while problem is None:
            records: list[RawRecord] = []
            try:
                for record in islice(rest, number):
                    records.append(record)  # those before an error are kept
            except DataError as error:
                problem = error
            if records:
                yield Block(first, records, 0)
                first += len(records)
            elif problem is None:
                return
        yield problem

    def records(self, block: Block) -> Iterator[RawRecord]:
        """The block's list."""
        return iter(block.data)
