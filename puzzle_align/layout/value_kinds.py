"""What foreign values may be: kinds of values, each of which says what is wrong with another."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from puzzle_align.layout.shown import quoted


class Kind(Protocol):
    """Values of a kind. Types are taken strictly: True is no number, 2.0 not whole."""

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value, as the end of a sentence that begins with it; or None."""
        ...


@dataclass(frozen=True)
class Whole:
    """Whole numbers in a range."""

    least: int
    most: int

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if type(value) is int and self.least <= value <= self.most:
            return None
        return f"must be a whole number from {self.least} to {self.most}"


@dataclass(frozen=True)
class Real:
    """Finite numbers in a range."""

    least: float
    most: float

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if type(value) in (int, float) and self.least <= value <= self.most:
            return None
        return f"must be a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        return None if type(value) is bool else "must be true or false"


@dataclass(frozen=True)
class Text:
    """Any text."""

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        return None if type(value) is str else "must be a text"


@dataclass(frozen=True)
class Only:
    """A few values; where there are none, the key must not be there."""

    values: tuple[Any, ...] = ()

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if any(type(value) is type(own) and value == own for own in self.values):
            return None
        only = " or ".join(map(repr, self.values))
        return f"is not supported: only {only} is" if only else "is not supported: remove it"


@dataclass(frozen=True)
class ListOf:
    """Lists of values of a kind."""

    item: Kind

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        if type(value) is not list:
            return "must be a list"
        problems = ((item, self.item.problem(item)) for item in value)
        found = next(((item, problem) for item, problem in problems if problem), None)
        return None if found is None else f"holds {quoted(found[0])}, which {found[1]}"


@dataclass(frozen=True)
class Either:
    """Values of one kind or another."""

    one: Kind
    other: Kind

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        problems = self.one.problem(value), self.other.problem(value)
        return None if None in problems else " or ".join(map(str, problems))


@dataclass(frozen=True)
class Table:
    """Mappings: the values of these keys are of a kind each, or null; others may be anything."""

    keys: Mapping[str, Kind]

    def problem(self, value: Any) -> str | None:
        """See Kind."""
        return None if isinstance(value, Mapping) else "must be a mapping"

    def problem_inside(self, value: Mapping[str, Any], outer: str = "") -> str | None:
        """What is wrong with the first key that is, after its name and value; or None."""
        for key, kind in self.keys.items():
            own, name = value.get(key), f"{outer}{key}"
            problem = None if own is None else kind.problem(own)
            if problem is not None:
                return f"{name}={quoted(own)} {problem}"
            if isinstance(kind, Table) and own is not None:
                inside = kind.problem_inside(own, f"{name}.")
                if inside is not None:
                    return inside
        return None
