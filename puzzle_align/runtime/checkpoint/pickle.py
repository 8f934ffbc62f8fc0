"""Reads the pickles that torch writes of a checkpoint's metadata, without Python's unpickler.

That one calls what a pickle names, and takes memory for what it announces: nine bytes can ask for
gigabytes. Invariants (the tests assert them):
- of what a pickle can ask for, no more is done than torch's need;
- it makes plain values, and of known classes ``Made``: nothing that it names is called;
- memory and time are bounded by its length, whatever it announces, and no value is hashed or
  compared that holds others.
"""

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

from puzzle_align.files.messages import shown


class ForeignError(Exception):
    """What is in a pickle is not what torch writes."""


class NoPickleError(ValueError):
    """Bytes are no whole pickle, or none that torch writes."""


class Made:
    """What a pickle made of a known class: the arguments and the state that it gave."""

    __slots__ = ("args", "state")

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args, self.state = args, None

    args: tuple[Any, ...]
    state: Any


def unpickle(data: bytes, known: Mapping[tuple[str, str], Any]) -> Any:
    """The value of a pickle, of the protocols 2 to 5.

    Args:
        known: by module and name, subclasses of ``Made``, or values that stand for themselves.

    Raises:
        ForeignError: if it names anything else.
        NoPickleError: if it is no whole pickle, or asks for what torch does not write.
    """
    try:
        return _Machine(data, known).run()
    except (LookupError, TypeError, ValueError, struct.error) as error:
        raise NoPickleError(str(error)) from error


class _Machine:
    """A pickle's stack, what it keeps, and how far it is read."""

    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any]) -> None:
        self.data, self.at, self.known = data, 0, known
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the marks
        self.kept: list[Any] = []

    def run(self) -> Any:
        """Do all operations, of which there are millions: the most frequent ones are done here."""
        data, kept, stack, at = self.data, self.kept, self.stack, 0
        while (code := data[at]) != _STOP:
            at += 1
            if code == _MEMOIZE:
                kept.append(stack[-1])
            elif code == _BINGET:
                stack.append(kept[data[at]])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(kept[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            else:
                self.at = at
                _OPERATIONS[code](self)
                stack, at = self.stack, self.at
        (value,) = stack
        return value

    def take(self, length: int) -> bytes:
        at, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("it ends early")
        return self.data[at : self.at]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_text(self, length: int) -> None:
        self.stack.append(self.take(length).decode("utf-8", "surrogatepass"))

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def keep(self, place: int) -> None:
        # Values are kept in order. Who keeps one far out asks for the memory up to there.
        if place != len(self.kept):
            raise ValueError("a value is kept out of order")
        self.kept.append(self.stack[-1])

    def push_known(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is no text")
        known = self.known.get((module, name))
        if known is None:
            foreign = shown(f"{module}.{name}")
            raise ForeignError(f"it holds code, or an unknown class ({foreign}): it is refused")
        self.stack.append(known)

    def make(self) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or not isinstance(cls, type):  # all known classes are ``Made``
            raise ValueError("what is called is no class")
        self.stack.append(cls(args))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Made):
            raise ValueError("a state of what has none")
        self.stack[-1].state = state

    def push_tuple(self, length: int) -> None:
        if len(self.stack) < length:
            raise ValueError("a tuple of too few")
        self.stack[-length:] = [tuple(self.stack[-length:])]

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("items of no list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        mapping, keys = self.stack[-1], items[::2]
        # Of what holds other values no hash is taken: it may hold them a billion times over.
        if type(mapping) is not dict or any(type(key) is tuple for key in keys):
            raise ValueError("items of no mapping")
        mapping.update(zip(keys, items[1::2], strict=True))


def _refuse(machine: _Machine) -> None:
    raise ValueError("an operation that torch does not ask for")


_BYTE, _SHORT, _INT, _UNSIGNED, _FLOAT = map(struct.Struct, ("<B", "<H", "<i", "<I", ">d"))
_STOP, _MEMOIZE = pickle.STOP[0], pickle.MEMOIZE[0]
_BINGET, _LONG_BINGET, _BININT1 = pickle.BINGET[0], pickle.LONG_BINGET[0], pickle.BININT1[0]
_BY_CODE: dict[bytes, Callable[[_Machine], object]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: _Machine.mark,
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.BININT: lambda m: m.push(m.number(_INT)),
    pickle.BININT2: lambda m: m.push(m.number(_SHORT)),
    pickle.LONG1: lambda m: m.push(pickle.decode_long(m.take(m.number(_BYTE)))),
    pickle.BINFLOAT: lambda m: m.push(m.number(_FLOAT)),
    pickle.SHORT_BINUNICODE: lambda m: m.push_text(m.number(_BYTE)),
    pickle.BINUNICODE: lambda m: m.push_text(m.number(_UNSIGNED)),
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.TUPLE: lambda m: m.push(tuple(m.since_mark())),
    pickle.TUPLE1: lambda m: m.push_tuple(1),
    pickle.TUPLE2: lambda m: m.push_tuple(2),
    pickle.TUPLE3: lambda m: m.push_tuple(3),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.APPEND: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.extend(m.since_mark()),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.SETITEM: lambda m: m.update([m.stack.pop(-2), m.stack.pop()]),
    pickle.SETITEMS: lambda m: m.update(m.since_mark()),
    pickle.GLOBAL: lambda m: m.push_known(m.line(), m.line()),
    pickle.STACK_GLOBAL: lambda m: m.push_known(m.stack.pop(-2), m.stack.pop()),
    pickle.REDUCE: _Machine.make,
    pickle.NEWOBJ: _Machine.make,
    pickle.BUILD: _Machine.build,
    pickle.BINPUT: lambda m: m.keep(m.number(_BYTE)),
    pickle.LONG_BINPUT: lambda m: m.keep(m.number(_UNSIGNED)),
}
_OPERATIONS = [_BY_CODE.get(bytes([code]), _refuse) for code in range(256)]
