"""The boundary to libraries that read foreign files: what they raise is said of the file."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from puzzle_align.data.records import DataError
from puzzle_align.files.messages import shown

T = TypeVar("T")


@dataclass(frozen=True)
class Foreign:
    """Something foreign that a library reads for us, and what to say where it cannot."""

    origin: str  # the file, or a place in it
    what: str  # is wrong with it then
    cure: str
    reason: str = "broken file"

    def read(self, function: Callable[..., T], *arguments: object) -> T:
        """What the library's function gives; DataError whatever it raises."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001 - of damage libraries know any exception
            said = shown(f"{type(error).__name__}: {error}")
            raise DataError(self.origin, self.reason, f"{self.what} ({said})", self.cure) from None

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """What the library yields; DataError whatever it raises, be it in the middle."""
        iterator = self.read(iter, items)
        while found := self.read(lambda: list(islice(iterator, 1))):
            yield from found
