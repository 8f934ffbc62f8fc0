"""Values as no file should have them, put into trees of mappings and lists, and into JSON text."""

import copy
import json
import math
import random
from typing import Any

_TEXTS = (
    *("", " ", "\0", "a\0b", "\n", "line\nline", "nan", "-inf", "1e999", "-1", "4096", "true"),
    *("false", "null", "auto", "..", "/", "/dev/null", "/etc/passwd", "x" * 300, "x" * 100_000),
    *("\ud800", "\U0001f600", "{{1/0}}", "%s%n{}", "<s>"),
    "\u202e\ufeff",  # right to left, and a mark of byte order
)
_NUMBERS = (
    *(0, 1, -1, 2, 4, 7, 8, 10**6, 2**31, 2**63 - 1, 2**64, 10**12, 10**18, 10**30, 10**400),
    *(-(10**400), 0.5, -0.0, 1e-5, 5e-324, 1e-39, 1e39, 1e300, -1e300),
    *(math.nan, math.inf, -math.inf),
)
_OTHERS = (
    *(None, True, False, [], {}, [[]], [None], [{}], {"": None}, {"a": {}}, [1, "1"], [True]),
    *([10**30], [0] * 999),
)
_KEYS = (
    *("", "\0", "a.b", "__class__", "x" * 1000, "\ud800", "0", "path", "name", "type", "id"),
    "é\n",
)
# JSON that ``json.dumps`` would not write; in a tree, ``"\x01N\x01"`` stands for the Nth.
_VERBATIM = (
    *("[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[" * 100_000 + "]" * 100_000),
    *("9" * 5000, "-" + "9" * 5000, "1e999", "-1e999", "0." + "0" * 5000 + "1"),
    *('{"a": 1, "a": 2}', '"\\ud800\\u0000"'),
)


def changed_json(draw: random.Random, tree: Any, most: int = 3) -> tuple[str, str]:
    """Changes in words, and JSON of the tree with values replaced, moved, taken out and so on.

    The tree, whose keys are texts, holds a value at least. There may be more in the JSON than
    ``json.dumps`` writes. ``most``: changes at most.
    """
    holder = [copy.deepcopy(tree)]  # so that the tree itself has a place, too
    done = []
    for _ in range(min(draw.choice((1, 1, 1, 2, 3)), most)):
        container, key, path = _place(draw, holder)
        done.append(f"{path}: {_change(draw, container, key, holder)}")
    text = json.dumps(holder[0])
    for number, verbatim in enumerate(_VERBATIM):
        text = text.replace(f'"\\u0001{number}\\u0001"', verbatim)
    return "; ".join(done), text


def _place(draw: random.Random, holder: list[Any]) -> tuple[Any, Any, str]:
    """Some value's place: its container, its key or index there, and its path for people."""
    places: list[tuple[Any, Any, str]] = []
    open_: list[tuple[Any, str]] = [(holder[0], "$")]
    while open_:
        container, path = open_.pop()
        keys = list(container) if isinstance(container, dict) else ()
        if isinstance(container, list):
            keys = range(min(len(container), 20))
        for key in keys:
            places.append((container, key, f"{path}.{str(key)[:40]}"))
            open_.append((container[key], places[-1][2]))
    return draw.choice(places) if places and draw.random() < 0.98 else (holder, 0, "$")


def _change(draw: random.Random, container: Any, key: Any, holder: list[Any]) -> str:
    """Do something to what stands at a place; say what."""
    was, kind = container[key], draw.random()
    if kind < 0.7 or container is holder:
        container[key] = new = copy.deepcopy(_instead(draw, was, holder))
        return f"{_shown(was)} replaced by {_shown(new)}"
    if kind < 0.8:
        del container[key]
        return "taken out"
    if isinstance(container, dict):
        name = draw.choice([other for other in (*_KEYS, *container) if other != key])
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


def _instead(draw: random.Random, was: Any, holder: list[Any]) -> Any:
    """Some value; often one that ``was``, which it replaces, has something to do with."""
    kind = draw.random()
    if kind < 0.1:  # another value of the tree
        container, key, _ = _place(draw, holder)
        return container[key]
    if kind < 0.19:
        return f"\x01{draw.randrange(len(_VERBATIM))}\x01"
    if kind < 0.43:
        return draw.choice(_relatives(was))
    return draw.choice(draw.choice((_TEXTS, _NUMBERS, _OTHERS)))


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
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
