"""Declare config keys, and list a config class's keys by dotted name.

A config class is a frozen dataclass of ``key(...)`` and ``section(...)`` fields. A key's
declaration holds everything about it; checks, ``--help``, resuming and the commands use the
functions below, and keep no table of key names.

Keys inherit their section's declaration: only stages that read the section read them, and if the
section is binding, read by ``generate`` or shapes the data, so does every key in it.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from unicodedata import category

from puzzle_align.files.typed import LARGEST_FP32, MOST_INT32, SMALLEST_FP32

T = TypeVar("T")

LONGEST_WAIT = 2e6  # seconds: poll(2) takes milliseconds, in 31 bits
# Bytes in UTF-8; a path stays below the system's 4096 to leave room for file names under it.
MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 3000
_Type = type  # an alias: Key has a field named type
_DECLARED = "declared"  # key of a field's Declaration in its metadata


@dataclass(frozen=True, kw_only=True, eq=False)  # compared and hashed as objects
class Declaration:
    """Declared properties of a key or a section.

    Integers are also bounded by ``MOST_INT32`` (or a larger ``at_most``), floats by the range of
    fp32.
    """

    doc: str  # its meaning, in one line
    unit: str = ""  # of a number
    choices: tuple[str, ...] = ()  # allowed texts, if the type is not a Literal
    at_least: float | None = None  # inclusive bounds of a number
    at_most: float | None = None
    above: float | None = None  # exclusive bounds
    below: float | None = None
    besides: tuple[float, str] | None = None  # a number also allowed, and its meaning
    stages: tuple[str, ...] = ()  # that read it; empty: all that read its section
    # Whether a resumed run must keep its value: with another one, steps would see other data or
    # another loss, or the checkpoint's value would silently replace the config's. True: in every
    # stage that reads it; else in the stages named.
    binding: bool | tuple[str, ...] = False
    # Whether ``puzzle-align generate`` reads it; of a section also the names of the keys directly
    # in it that are read, for a class that several sections share.
    generate: bool | tuple[str, ...] = False
    shapes_data: bool = False  # whether reading and packing the data depends on the section
    is_path: bool = False  # whether it names a file or a folder
    has_lines: bool = False  # whether it may be a text of several lines


@dataclass(frozen=True, kw_only=True, eq=False)
class Key(Declaration):
    """A key (or section) under its dotted name, with the properties inherited from its section."""

    name: str  # dotted
    hint: Any  # its type hint
    type: type  # without None; a section's is its dataclass
    items: _Type | None  # type of a list's items
    or_one: bool  # whether a single item is allowed in place of a list
    optional: bool  # whether null is allowed
    default: Any

    @property
    def is_section(self) -> bool:
        """Whether the key holds further keys."""
        return is_dataclass(self.type)

    def range_problem(self, value: Any) -> str | None:
        """The allowed range, if a number (or one of a list) is outside it; else None."""
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, str) or number is None:
                continue
            if not self._holds(number):
                besides = "" if self.besides is None else ", or {}: {}".format(*self.besides)
                return f"{self._range()}{besides}"
            if type(number) is int and abs(number) > max(MOST_INT32, self.at_most or 0):
                return f"at most {MOST_INT32}" if number > 0 else f"at least -{MOST_INT32}"
            is_tiny_or_huge = type(number) is float and not (
                number == 0 or SMALLEST_FP32 <= abs(number) <= LARGEST_FP32
            )
            if is_tiny_or_huge:
                return f"from {SMALLEST_FP32:.2g} to {LARGEST_FP32:.2g}, or 0: what fp32 can hold"
        return None

    def _holds(self, number: float) -> bool:
        """Whether a number is within all bounds, or equals ``besides``."""
        return (self.besides is not None and number == self.besides[0]) or (
            (self.at_least is None or number >= self.at_least)
            and (self.at_most is None or number <= self.at_most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def _range(self) -> str:
        """The range to choose from."""
        low = self.at_least
        if self.above is not None:
            most = "" if self.at_most is None else f", at most {self.at_most}"
            return f"more than {self.above}{most}"
        if self.at_most is not None:
            return f"at most {self.at_most}" if low is None else f"from {low} to {self.at_most}"
        if self.below is not None:
            return f"{'' if low is None else f'{low} or more, '}below {self.below}"
        return f"at least {low}"

    def text_problem(self, text: str) -> str | None:
        """Why the key cannot hold a text, and the cure; None if it can."""
        breaks = (c for c in text if category(c) in ("Cc", "Zl", "Zp"))
        first = None if self.has_lines else next(breaks, None)
        if first is not None:
            return f"has {first!r} in it; take it out"
        if self.is_path and text.startswith(("~", "$")):
            return f"begins with {text[0]}, which only a shell expands; write the path out"
        data = text.encode()
        if self.is_path and len(data) > MOST_PATH_BYTES:
            return f"is longer than {MOST_PATH_BYTES} bytes; choose a shorter path"
        if self.is_path and max(map(len, data.split(b"/"))) > MOST_NAME_BYTES:
            return f"has a name of more than {MOST_NAME_BYTES} bytes in it; choose a shorter one"
        return None

    def is_read_in(self, stage: str) -> bool:
        """Whether the stage reads the key."""
        return not self.stages or stage in self.stages

    def is_binding_in(self, stage: str) -> bool:
        """Whether a resumed run of the stage must have the checkpoint's value."""
        named = self.binding is True or (self.binding is not False and stage in self.binding)
        return named and self.is_read_in(stage)


def key(default: T, doc: str, **declared: Any) -> T:
    """Declare a config key; typed as its default, so that type checkers see a plain field.

    ``declared`` are fields of ``Declaration``.
    """
    metadata = {_DECLARED: Declaration(doc=doc, **declared)}
    return field(default=default, metadata=metadata)  # type: ignore[return-value]


def section(cls: type[T], doc: str, **declared: Any) -> T:
    """Declare a nested mapping of keys, default-constructed when absent.

    Args:
        cls: the dataclass of its keys.
        doc: its content, in one line.
        declared: fields of ``Declaration``.
    """
    declaration = Declaration(doc=doc, **declared)
    if isinstance(declaration.generate, tuple):
        names = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        assert set(declaration.generate) <= names, declaration.generate
    metadata = {_DECLARED: declaration}
    return field(default_factory=cls, metadata=metadata)  # type: ignore[return-value]


@cache
def section_keys(cls: type, parent: Key | None = None) -> dict[str, Key]:
    """The keys directly in a config dataclass, by field name; ``parent`` is the section's key."""
    hints = get_type_hints(cls)
    keys = {}
    for item in fields(cls):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        declared: Declaration = item.metadata[_DECLARED]
        properties = {**vars(declared), **_arms(hints[item.name])}
        name = item.name
        if parent is not None:
            properties |= _inherited(name, declared, parent)
            name = f"{parent.name}.{name}"
        keys[item.name] = Key(**properties, name=name, default=default)
    return keys


def all_keys(cls: type, parent: Key | None = None) -> Iterator[Key]:
    """Every key of a config dataclass, a section before its keys."""
    for key in section_keys(cls, parent).values():
        yield key
        if key.is_section:
            yield from all_keys(key.type, key)


def key_values(config: Any, parent: Key | None = None) -> Iterator[tuple[Key, Any]]:
    """Every key with its value, a section before its keys; a null section has no keys."""
    for name, key in section_keys(type(config), parent).items():
        value = getattr(config, name)
        yield key, value
        if key.is_section and value is not None:
            yield from key_values(value, key)


def binding_keys(cls: type, stage: str) -> tuple[str, ...]:
    """The keys, and whole sections, that a resumed run must keep."""
    return _outermost(cls, lambda key: key.is_binding_in(stage))


def generate_keys(cls: type) -> tuple[str, ...]:
    """The keys, and whole sections, that ``puzzle-align generate`` reads."""
    return _outermost(cls, lambda key: key.generate is True)


def data_sections(cls: type) -> tuple[str, ...]:
    """The sections that decide how data is read and packed."""
    return _outermost(cls, lambda key: key.shapes_data)


def is_among(name: str, keys: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of ``keys``, or inside one that is a section."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def _outermost(
    cls: type, wanted: Callable[[Key], bool], parent: Key | None = None
) -> tuple[str, ...]:
    """Names of the wanted keys, in order; a wanted section stands for all of its keys."""
    names: list[str] = []
    for key in section_keys(cls, parent).values():
        if wanted(key):
            names.append(key.name)
        elif key.is_section:
            names += _outermost(key.type, wanted, key)
    return tuple(names)


def _inherited(name: str, declared: Declaration, parent: Key) -> dict[str, Any]:
    """The properties that a key's declaration combines with its section's."""
    stages = tuple(stage for stage in declared.stages or parent.stages if parent.is_read_in(stage))
    assert stages or not declared.stages, f"no stage reads {parent.name}.{name}"
    within = parent.generate is True or (parent.generate is not False and name in parent.generate)
    return {
        "stages": stages,
        "binding": declared.binding or parent.binding,
        "generate": declared.generate or within,
        "shapes_data": declared.shapes_data or parent.shapes_data,
    }


def _arms(hint: Any) -> dict[str, Any]:
    """The parts of a type hint ``T | list[T] | Literal[words] | None``, each arm optional.

    ``type`` is list if the hint has one, and dict for ``dict[...]``. A hint of words alone is a
    text with these choices.
    """
    is_union = get_origin(hint) in (Union, types.UnionType)
    arms = get_args(hint) if is_union else (hint,)
    kinds = [arm for arm in arms if arm is not type(None) and get_origin(arm) is not Literal]
    if not kinds:
        text = _arms(str | None if type(None) in arms else str)
        words = (word for arm in arms if get_origin(arm) is Literal for word in get_args(arm))
        return {**text, "hint": hint, "choices": tuple(words)}
    lists = [arm for arm in kinds if get_origin(arm) is list]
    kind = (lists or kinds)[0]
    return {
        "hint": hint,
        "type": get_origin(kind) or kind,
        "items": get_args(kind)[0] if lists else None,
        "or_one": bool(lists) and len(kinds) > 1,
        "optional": type(None) in arms,
    }
