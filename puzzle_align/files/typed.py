"""Validation of foreign values: plain data from JSON or YAML, by kinds or type hints.

A ``Kind`` validates a value and builds the program's object from it. Every type hint has a kind
(``kind_of``), so a frozen dataclass describes a mapping. Types are strict: true is not a number,
and 2.0 is not an integer. Numbers are finite; integers fit 64 bits.
"""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from puzzle_align.files.messages import quoted, shown

T = TypeVar("T")
AGAIN = "; make it again"  # ends errors about files that this package wrote
# Absolute values of normal float32 numbers.
SMALLEST_FP32, LARGEST_FP32 = 1.1754943508222875e-38, 3.4028234663852886e38
MOST_INT32, MOST_INT64 = 2**31 - 1, 2**63 - 1
_NOTHING = "no value (it is not supported)"


@dataclass(frozen=True)
class Kind:
    """A kind of values: how to validate one, build an object from it, and describe it in errors.

    ``words`` describe one value, ``plural`` several. ``fits`` checks the value without its items;
    ``build(value, place, cure)`` reads the items and returns the result of ``read``.
    """

    words: str
    fits: Callable[[Any], bool]
    build: Callable[[Any, str, str], Any] = lambda value, _where, _cure: value
    plural: str = ""

    def read(self, value: Any, where: str, cure: str = "") -> Any:
        """Validate a value and return the object built from it.

        Args:
            where: the value's name in errors: a file, a key.
            cure: the end of errors.

        Raises:
            ValueError: one line with the place of the first value that does not fit.
        """
        if not self.fits(value):
            raise ValueError(f"{where}: expected {self.words}, got {written(value)}{cure}")
        return self.build(value, where, cure)


def whole(least: int, most: int) -> Kind:
    """Integers from ``least`` to ``most``."""
    return Kind(
        f"an integer from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def real(least: float, most: float) -> Kind:
    """Numbers from ``least`` to ``most``."""
    return Kind(
        f"a number from {least:g} to {most:g}",
        lambda value: type(value) in (int, float) and least <= value <= most,
    )


def only(*values: Any) -> Kind:
    """These values only; without any, the key must be left out."""
    names = [value if isinstance(value, str) else written(value) for value in values]
    words = " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}"
    return Kind(
        words or _NOTHING,
        lambda value: any(type(value) is type(one) and value == one for one in values),
    )


def list_of(item: Kind, make: Callable[[Any], Any] = list) -> Kind:
    """Lists of values of a kind; ``make`` builds the result from an iterable."""

    def build(value: list[Any], where: str, cure: str) -> Any:
        return make(item.read(one, f"{where}[{n}]", cure) for n, one in enumerate(value))

    words = f"a list of {item.plural}" if item.plural else f"a list, each item {item.words}"
    return Kind(words, lambda value: type(value) is list, build, "lists")


def mapping_of(item: Kind) -> Kind:
    """Mappings from texts to values of a kind."""

    def build(value: Mapping[str, Any], where: str, cure: str) -> Any:
        return {k: item.read(one, f"{where}.{shown(k)}", cure) for k, one in value.items()}

    return Kind("a mapping", lambda value: isinstance(value, Mapping), build, "mappings")


def table(keys: Mapping[str, Kind]) -> Kind:
    """Mappings whose given keys hold their kind or null; other keys may hold anything."""

    def build(value: Mapping[str, Any], where: str, cure: str) -> Any:
        for name, kind in keys.items():
            if value.get(name) is not None:
                kind.read(value[name], f"{where}.{name}", cure)
        return value

    return Kind("a mapping", lambda value: isinstance(value, Mapping), build, "mappings")


def record(cls: Any, *, is_open: bool = False) -> Kind:
    """Mappings with a key for every field of a dataclass, read as the dataclass.

    Args:
        is_open: allow further keys, and leaving out fields with defaults.
    """

    def build(value: Mapping[str, Any], where: str, cure: str) -> Any:
        hints, items = get_type_hints(cls), {item.name: item for item in fields(cls)}
        for name in value.keys() ^ items.keys():
            what = "is unknown" if name in value else "is missing"
            if not is_open or (name in items and _is_required(items[name])):
                raise ValueError(f"{where}: key '{shown(name)}' {what}{cure}")
        present = [name for name in items if name in value]
        return cls(**{n: kind_of(hints[n]).read(value[n], f"{where}.{n}", cure) for n in present})

    return Kind("a mapping", lambda value: isinstance(value, Mapping), build, "mappings")


def either(*kinds: Kind) -> Kind:
    """Values of any of the kinds, read by the first that fits."""

    def build(value: Any, where: str, cure: str) -> Any:
        return next(kind for kind in kinds if kind.fits(value)).build(value, where, cure)

    named = [kind.words for kind in kinds if kind is not _NULL]
    return Kind(" or ".join(named), lambda value: any(kind.fits(value) for kind in kinds), build)


@cache
def kind_of(hint: Any) -> Kind:
    """Kind of a type hint: plain types, dataclasses, Literal, unions, lists, mappings."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return either(*map(kind_of, arms))
    if origin is Literal:
        return only(*arms)
    if origin in (tuple, list):
        return list_of(kind_of(arms[0]), origin)
    if origin is dict:
        return mapping_of(kind_of(arms[1]))
    return record(hint) if is_dataclass(hint) else _PLAIN[hint]


def from_plain(cls: type[T], data: Any, where: str, *, is_open: bool = False) -> T:
    """Rebuild a dataclass from the result of ``json_file.to_plain``.

    Args:
        where: the name of ``data`` in errors: a file.
        is_open: as for ``record``.

    Raises:
        ValueError: one line with ``where``, the place in it and the cure, for any other data.
    """
    return record(cls, is_open=is_open).read(data, where, AGAIN)


def written(value: Any) -> str:
    """A value as a user wrote it, on one short line."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return quoted(value)


def _is_required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _check_finite(value: Any, where: str, cure: str) -> Any:
    """Check that all numbers in plain data are finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value}{cure}")
    if isinstance(value, dict):
        for name, one in value.items():
            _check_finite(one, f"{where}.{shown(name)}", cure)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            _check_finite(one, f"{where}[{number}]", cure)
    return value


def _is_int(value: Any) -> bool:
    return type(value) is int and abs(value) <= MOST_INT64


def _is_number(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else _is_int(value)


_NULL = Kind("null", lambda value: value is None)
_PLAIN = {
    bool: Kind("true or false", lambda value: type(value) is bool),
    int: Kind("an integer", _is_int, plural="integers"),
    float: Kind("a number", _is_number, plural="numbers"),
    str: Kind("text", lambda value: type(value) is str, plural="texts"),
    types.NoneType: _NULL,
    Any: Kind("any value", lambda _value: True, _check_finite, "values"),
}
