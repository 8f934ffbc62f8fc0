"""Errors of records and of the files that hold them, and the report that counts them."""

import copyreg
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from puzzle_align.files.messages import shown

T = TypeVar("T")


class DataError(ValueError):
    """A record or file cannot be used: one line with the place, the problem and the cure."""

    def __init__(self, origin: str, reason: str, detail: str, cure: str) -> None:
        """Format the line; skipped records are counted by ``reason``, ``detail`` is shown."""
        super().__init__(f"{origin}: {detail}; {cure}".replace("\n", "\\n"))
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the finished message: rank 0's error is raised on every rank."""
        return copyreg.__newobj__, (type(self), str(self)), vars(self)

    def suggest(self, cure: str) -> None:
        """Add another cure to the message."""
        self.args = (f"{self}, or {cure}",)


class LeftOut(DataError):
    """A record is left out and counted; not an error in the data."""


class TooLong(LeftOut):
    """A record is left out for its length, as configured."""


class NoComparison(LeftOut):
    """A record is left out since none of its responses is better than another."""


def value_or_error(function: Callable[..., T], *arguments: object) -> T | DataError:
    """The function's value, or the DataError that it raises."""
    try:
        return function(*arguments)
    except DataError as error:
        return error


@dataclass(frozen=True)
class Foreign:
    """Calls a library on a foreign file, and raises its errors as DataError."""

    origin: str  # the file, or a place in it
    what: str  # the problem
    cure: str
    reason: str = "broken file"

    def read(self, function: Callable[..., T], *arguments: object) -> T:
        """Call the library's function; any exception becomes a DataError."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - libraries raise anything for damaged files
            message = shown(f"{type(error).__name__}: {error}")
            what = f"{self.what} ({message})"
            raise DataError(self.origin, self.reason, what, self.cure) from None

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate over the library's items; any exception becomes a DataError, even midway."""
        iterator = self.read(iter, items)
        while first := self.read(lambda: list(islice(iterator, 1))):
            yield from first


@dataclass
class ReadReport:
    """Counts of the records of a source: used, truncated, dropped and skipped."""

    unit: str = "pairs"  # name of the counted records
    num_used: int = 0
    num_truncated: int = 0
    num_cut_responses: int = 0  # pairs with a truncated response
    num_desirable: int | None = None  # unpaired responses; None for pairs
    num_equal: int = 0  # pairs with equal responses
    num_dropped: int = 0  # left out for their length, by data.truncation_mode
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> records
    first_errors: dict[str, str] = field(default_factory=dict)  # reason -> first message
    num_comparisons: int = 0  # of a better and a worse response: one in a pair
    num_uncompared: int = 0  # left out: no response is better than another

    def skip(self, error: DataError) -> None:
        """Count a record that is bad or left out."""
        self.first_errors.setdefault(error.reason, str(error))
        if isinstance(error, TooLong):
            self.num_dropped += 1
        elif isinstance(error, NoComparison):
            self.num_uncompared += 1
        else:
            self.skipped[error.reason] = self.skipped.get(error.reason, 0) + 1

    def add(self, other: "ReadReport") -> None:
        """Add the counts of the records after these."""
        self.num_used += other.num_used
        self.num_truncated += other.num_truncated
        self.num_cut_responses += other.num_cut_responses
        if other.num_desirable is not None:
            self.num_desirable = (self.num_desirable or 0) + other.num_desirable
        self.num_equal += other.num_equal
        self.num_comparisons += other.num_comparisons
        self.num_uncompared += other.num_uncompared
        self.num_dropped += other.num_dropped
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
        for reason, message in other.first_errors.items():
            self.first_errors.setdefault(reason, message)

    def summary(self) -> str:
        """One line for the log."""
        counted = f"{self.num_used} {self.unit}"
        if self.num_comparisons > self.num_used:
            counted = f"{self.num_used} examples of {self.num_comparisons} comparisons"
        line = f"{counted}, {self.num_truncated} of them truncated"
        if self.num_cut_responses:
            line += f" ({self.num_cut_responses} with a cut response)"
        if self.num_desirable is not None:
            line += f", {self.num_desirable} desirable"
        if self.num_equal:
            line += f", {self.num_equal} of them with equal responses"
        if self.num_dropped:
            line += f"; dropped {self.num_dropped} that are too long"
        if self.num_uncompared:
            line += f"; left out {self.num_uncompared} of which no response is better than another"
        if not self.skipped:
            return line
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        return f"{line}; skipped {sum(self.skipped.values())} bad records: {reasons}"
