"""Values as no file should have them, put into trees of mappings and lists, and into JSON text."""

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\n",
    "line\nline",
    "nan",
    "-inf",
    "1e999",
    "-1",
    "4096",
    "true",
    "false",
    "null",
    "auto",
    "..",
    "/",
    "/dev/null",
    "/etc/passwd",
    "x" * 300,
    "x" * 100_000,
    "\ud800",
    "\u202e\ufeff",  # right to left, and a mark of byte order
    "\U0001f600",
    "{{1/0}}",
    "%s%n{}",
    "<s>",
)
_NUMBERS = (
    0,
    1,
    -1,
    2,
    4,
    7,
    8,
    10**6,
    2**31,
    2**63 - 1,
    2**64,
    10**12,
    10**18,
    10**30,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    1e-5,
    5e-324,
    1e-39,
    1e39,
    1e300,
    -1e300,
    math.nan,
    math.inf,
    -math.inf,
)
_OTHERS = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    {"a": {}},
    [1, "1"],
    [True],
    [10**30],
    [0] * 999,
)
KEYS = (
    "",
    "\0",
    "a.b",
    "__class__",
    "x" * 1000,
    "\ud800",
    "0",
    "path",
    "name",
    "type",
    "id",
    "é\n",
)


@dataclass(frozen=True)
class Verbatim:
    """JSON that ``json.dumps`` would not write; YAML reads the most of it, too."""

    text: str


_VERBATIM = tuple(
    Verbatim(text)
    for text in (
        "[" * 900 + "]" * 900,
        '{"a":' * 900 + "1" + "}" * 900,
        "[" * 100_000 + "]" * 100_000,
        "9" * 5000,
        "-" + "9" * 5000,
        "1e999",
        "-1e999",
        "0." + "0" * 5000 + "1",
        '{"a": 1, "a": 2}',
        '"\\ud800\\u0000"',
    )
)


def nasty(draw: random.Random, was: Any = None) -> Any:
    """Some value; often one that ``was``, which it replaces, has something to do with."""
    if draw.random() < 0.3:
        return draw.choice(_relatives(was))
    return draw.choice(draw.choice((_TEXTS, _NUMBERS, _OTHERS)))


def changed_json(draw: random.Random, tree: Any, most: int = 3) -> tuple[str, str]:
    """What was done, and JSON of the tree with some values replaced, moved, taken out and so on.

    The tree, whose keys are texts, holds a value at least. There may be more in the JSON than
    ``json.dumps`` writes. ``most``: changes at most.
    """

    def value(was: Any) -> Any:
        return draw.choice(_VERBATIM) if draw.random() < 0.1 else nasty(draw, was)

    what, result = _changed(draw, tree, value, most)
    return what, json_text(result)


def json_text(tree: Any) -> str:
    """JSON of a tree with ``Verbatim`` values in it."""
    found: list[Verbatim] = []

    def stand_in(value: Verbatim) -> str:
        found.append(value)
        return f"\x01{len(found) - 1}\x01"

    text = json.dumps(tree, default=stand_in)
    for number, value in enumerate(found):
        text = text.replace(f'"\\u0001{number}\\u0001"', value.text)
    return text


class _Root(list[Any]):
    """A list of the whole tree alone."""


def _changed(
    draw: random.Random, tree: Any, value: Callable[[Any], Any], most: int = 3
) -> tuple[str, Any]:
    holder = _Root([copy.deepcopy(tree)])  # so that the tree itself has a place, too
    done = []

    def own_or_new(was: Any) -> Any:
        if draw.random() < 0.9:
            return value(was)
        other, at, _ = _place(draw, holder)
        return other[at]

    for _ in range(min(draw.choice((1, 1, 1, 2, 3)), most)):
        container, key, path = _place(draw, holder)
        done.append(f"{path}: {_apply(draw, container, key, own_or_new)}")
    return "; ".join(done), holder[0]


def _place(draw: random.Random, holder: list[Any]) -> tuple[Any, Any, str]:
    """Some value's place: its container, its key or index there, and its path for people."""
    found: list[tuple[Any, Any, str]] = []
    open_: list[tuple[Any, str]] = [(holder[0], "$")]
    while open_:
        container, path = open_.pop()
        if isinstance(container, dict):
            keys = list(container)
        else:
            keys = range(min(len(container), 20)) if isinstance(container, list) else ()
        for key in keys:
            place = f"{path}.{str(key)[:40]}"
            found.append((container, key, place))
            open_.append((container[key], place))
    return draw.choice(found) if found and draw.random() < 0.98 else (holder, 0, "$")


def _apply(draw: random.Random, container: Any, key: Any, value: Callable[[Any], Any]) -> str:
    """Do something to what stands at a place; say what."""
    was, kind, is_root = container[key], draw.random(), type(container) is _Root
    if kind < 0.7 or is_root:
        container[key] = new = copy.deepcopy(value(was))
        return f"{_shown(was)} replaced by {_shown(new)}"
    if kind < 0.8:
        del container[key]
        return "taken out"
    if isinstance(container, dict):
        name = draw.choice([other for other in (*KEYS, *container) if other != key])
        container[name] = copy.deepcopy(was)
        if kind < 0.9:
            del container[key]
            return f"renamed {_shown(name)}"
        return f"there as {_shown(name)}, too"
    if kind < 0.9:
        container.insert(draw.randrange(len(container) + 1), copy.deepcopy(was))
        return "there twice"
    draw.shuffle(container)
    return "put in another order"


def _relatives(was: Any) -> list[Any]:
    """Values that take after one: of another type, of the wrong sign, too large, in a list."""
    found: list[Any] = [[was], {"value": was}, not was]
    if isinstance(was, bool | int | float):
        found += [str(was), str(was).lower(), -was, was + 1, was - 1]
        if abs(was) < 1e30:
            found += [float(was), was + 0.5, was * 1000, was * 10**12, int(was)]
    if isinstance(was, str):
        found += [was.upper(), f"{was} ", f"{was}\0", was[:-1], was * 50, was[::-1], f"../{was}"]
    if isinstance(was, list):
        found += [was * 2, was[:-1], was[::-1], [*was, None], dict(enumerate(map(str, was[:20])))]
    if isinstance(was, dict):
        found += [list(was.items())[:20], list(was), dict(list(was.items())[:-1])]
    return found


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, Verbatim) else value.text
    return text if len(text) <= 60 else f"{text[:57]}..."
