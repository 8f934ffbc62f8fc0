"""Frozen dataclasses of plain values as JSON and back, every key and type checked.

Numbers are finite, and integers fit 64 bits.
"""

import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from puzzle_align.layout.limits import MOST_INT64
from puzzle_align.layout.shown import quoted, shown

T = TypeVar("T")
AGAIN = "; make it again"  # how ``from_plain``'s errors end


def to_plain(value: Any) -> dict[str, Any]:
    """A dataclass as mappings, lists and plain values."""
    return _plain(asdict(value))


def from_plain(cls: type[T], data: Any, where: str) -> T:
    """The dataclass that ``to_plain`` gave.

    Args:
        where: what errors call ``data``: a file.

    Raises:
        ValueError: one line with ``where``, the place in it and the cure, for anything else.
    """
    return _build(cls, data, where)


def as_json(value: Any) -> Any:
    """Plain values as they come back from a JSON file: lists for tuples, texts for keys."""
    return json.loads(json.dumps(value))


def differences(
    name: str, old: Any, new: Any, unknown: Any = None
) -> Iterator[tuple[str, Any, Any]]:
    """``(place, old value, new value)`` of every value that differs, in mappings and lists too.

    Args:
        name: what the two are called.
        unknown: stands for what ``old`` does not have.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            inner = f"{name}.{key}" if name else str(key)
            yield from differences(inner, old.get(key, unknown), new.get(key), unknown)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(f"{name}[{number}]", *pair, unknown)
    elif old != new:
        yield name, old, new


def write_plain(value: Any, path: Path) -> None:
    """Write a dataclass as a JSON file, whole or not at all. ValueError for numbers not finite."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(to_plain(value), indent=1, allow_nan=False), encoding="utf-8")
    partial.replace(path)


def read_plain(path: Path, version: int, cure: str) -> Any:
    """What is in a JSON file of a format's version, to be given to ``from_plain``.

    Raises:
        ValueError: one line with the file and the cure, where it is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {cure}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {shown(str(error))}; {cure}") from error
    except RecursionError:
        raise ValueError(f"{path}: nested too deep; {cure}") from None
    found = data.get("format") if isinstance(data, dict) else None
    if type(found) is not int or found != version:
        raise ValueError(f"{path}: format {shown(found)}, and this version reads {version}; {cure}")
    return data


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{shown(double)}' is given twice")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _build(hint: Any, value: Any, where: str) -> Any:
    """``value`` as what a type hint asks for: dataclasses, tuples, mappings, literals, plain."""
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        fitting = [arm for arm in arms if _fits(arm, value)]
        if not fitting:
            raise _wrong(hint, value, where)
        return _build(fitting[0], value, where)
    if not _fits(hint, value):
        raise _wrong(hint, value, where)
    if origin is tuple:
        return tuple(_build(arms[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is dict:
        return {key: _build(arms[1], item, f"{where}.{shown(key)}") for key, item in value.items()}
    return _build_dataclass(hint, value, where) if is_dataclass(hint) else value


def _build_dataclass(cls: Any, value: Mapping[str, Any], where: str) -> Any:
    hints, names = get_type_hints(cls), [item.name for item in fields(cls)]
    for name in value.keys() ^ set(names):
        what = "is unknown" if name in value else "is missing"
        raise ValueError(f"{where}: key '{shown(name)}' {what}{AGAIN}")
    return cls(**{name: _build(hints[name], value[name], f"{where}.{name}") for name in names})


def _fits(hint: Any, value: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list)
    if origin is dict:
        return isinstance(value, Mapping)
    if is_dataclass(hint):
        return isinstance(value, Mapping)
    if type(value) is int and hint in (int, float):
        return abs(value) <= MOST_INT64
    return type(value) is hint and (hint is not float or math.isfinite(value))


def _wrong(hint: Any, value: Any, where: str) -> ValueError:
    return ValueError(f"{where}: {quoted(value)} is not {shown(hint)}{AGAIN}")
