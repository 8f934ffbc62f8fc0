"""Read JSON files with one-line errors, write them atomically, and compare their values."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from puzzle_align.files.messages import shown

MAX_BYTES = 32 * 2**20  # the index of a model with 100,000 tensors takes a third of it


def read_object(path: Path, cure: str) -> dict[str, Any]:
    """Read a JSON object from a UTF-8 file, in which no object has a key twice.

    Args:
        cure: the advice that ends every error.

    Raises:
        ValueError: one line with the path, for any other content or more than ``MAX_BYTES``.
    """
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; {cure}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {cure}") from error
    if len(text) > MAX_BYTES:
        raise ValueError(f"{path} has over {MAX_BYTES} bytes; {cure}")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is not JSON ({why}); {cure}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object; {cure}")
    return value


def read_versioned(path: Path, version: int, cure: str) -> dict[str, Any]:
    """Read an object as ``read_object`` does; ValueError unless its ``format`` is ``version``."""
    data = read_object(path, cure)
    if type(data.get("format")) is not int or data["format"] != version:
        written = shown(data.get("format"))
        raise ValueError(f"{path}: format {written}, and this version reads {version}; {cure}")
    return data


def write_dataclass(value: Any, path: Path) -> None:
    """Write a dataclass as a JSON file atomically; ValueError if a number is not finite."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(asdict(value), indent=1, allow_nan=False), encoding="utf-8")
    partial.replace(path)


def to_plain(value: Any) -> dict[str, Any]:
    """Convert a dataclass to the values that its JSON file would read back as."""
    return as_json(asdict(value))


def as_json(value: Any) -> Any:
    """Convert plain values to what JSON reads back: lists for tuples, texts for keys."""
    return json.loads(json.dumps(value))


def differences(
    name: str, old: Any, new: Any, unknown: Any = None
) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``(place, old value, new value)`` for every difference, in mappings and lists too.

    Args:
        name: prefix of the places.
        unknown: the old value of a key that ``old`` lacks.
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"'{shown(double)}' is given twice")
    return value
