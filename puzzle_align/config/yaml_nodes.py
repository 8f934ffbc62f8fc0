"""YAML 1.1 read within bounds: no text takes long, much memory, or runs anything.

Invariants (the tests assert them):
- values are null, booleans, numbers, texts, lists, and mappings from texts: no tag makes others;
- what aliases stand for counts as often as they stand there, so that few lines are never many
  values; nothing contains itself;
- whatever is wrong is a one-line ValueError with its place.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import yaml
from yaml.reader import Reader

from puzzle_align.files.messages import shown

T = TypeVar("T")

MOST_CHARACTERS = 2**17  # of a text
MOST_LEVELS = 32
MOST_VALUES = 5000
_MOST_DIGITS = 100  # of a number
_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}
_COLLECTIONS = {None, "!", f"{_TAG}seq", f"{_TAG}map"}
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_SURPRISING = re.compile(r"[-+]?(0[0-9_]+$|[0-9_]+:)")  # that it is base 8, or base 60


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but ``1e-6`` is a number as everywhere else, and a date is a text."""


_Loader.yaml_implicit_resolvers = {
    first: [own for own in known if own[0] not in (f"{_TAG}timestamp", f"{_TAG}value")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Dumper(yaml.SafeDumper):
    """Quotes the text that the loader would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """What stands in two places is written out in both."""
        return True


for _side in (_Loader, Dumper):
    _side.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


@dataclass
class Node:
    """A value: a scalar, a list of nodes, or by key the key's line and its node."""

    value: Any
    line: int
    size: int = 1  # values in it
    levels: int = 0  # of lists and mappings in it, itself counted
    is_open: bool = False  # not all of it is read yet


@dataclass
class _Composer:
    """Puts the parser's events together; ``prefix`` is what dotted names begin with."""

    loader: _Loader
    where: Callable[[int], str]
    prefix: str
    root: Node | None = None
    outer: list[Node] = field(default_factory=list)  # lists and mappings that are open
    keys: list[tuple[str, int] | None] = field(default_factory=list)  # of each, the one under way
    anchors: dict[str, Node] = field(default_factory=dict)

    def take(self, event: yaml.Event) -> None:
        """Go on with one more event."""
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            self._alias(event, line)
        elif isinstance(event, yaml.ScalarEvent):
            node = Node(self._scalar(event, line), line)
            self._anchor(event, node)
            self._add(node)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._begin(event, line)
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            self._end()
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            self._refuse(line, "not valid YAML: a second document; keep one")

    def _refuse(self, line: int, why: str) -> NoReturn:
        raise ValueError(f"{self.where(line)}: {why}")

    def _anchor(self, event: Any, node: Node) -> None:
        if event.anchor is not None:
            self.anchors[event.anchor] = node

    def _alias(self, event: yaml.AliasEvent, line: int) -> None:
        node, name = self.anchors.get(event.anchor), shown(event.anchor)
        if node is None:
            self._refuse(line, f"not valid YAML: nothing is named '&{name}'")
        if node.is_open:
            self._refuse(line, f"'*{name}' stands in itself; write out what is meant")
        self._add(node)

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Any:
        """A scalar's value."""
        text, tag = event.value, event.tag
        if tag in (None, "!"):
            tag = self.loader.resolve(yaml.ScalarNode, text, event.implicit)
        try:
            found = self._constructed(tag, text)
        except ValueError as error:
            self._refuse(line, f"'{shown(text)}' cannot be read: {error}")
        if isinstance(found, str) and Reader.NON_PRINTABLE.search(found):
            self._refuse(line, f"'{shown(found)}' has an unprintable character; take it out")
        return found

    def _constructed(self, tag: str, text: str) -> Any:
        """What a scalar's text means; ValueError, in some words, where that is nothing."""
        kind = tag.removeprefix(_TAG)
        if tag not in _SCALARS:
            raise ValueError(f"'{shown(kind)}' is not taken; write it out")
        if kind != "str" and len(text) > _MOST_DIGITS:
            raise ValueError("it is too long")
        if kind != "str" and _SURPRISING.match(text):
            raise ValueError("YAML 1.1 has it in base 8 or 60; write it in base 10, or quote it")
        try:
            return self.loader.construct_object(yaml.ScalarNode(tag, text))
        except (yaml.YAMLError, ValueError, LookupError):
            raise ValueError(f"it is no {kind}; write one") from None

    def _begin(self, event: Any, line: int) -> None:
        if event.tag not in _COLLECTIONS:
            self._refuse(line, f"tag '{shown(event.tag)}' is not taken; leave it out")
        if self.outer and self._awaits_key():
            self._refuse(line, "a mapping or list cannot be a key; write a name")
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        node = Node(value, line, levels=1, is_open=True)
        self._anchor(event, node)
        self.outer.append(node)
        self.keys.append(None)
        if len(self.outer) > MOST_LEVELS:
            self._refuse(line, f"nested more than {MOST_LEVELS} levels deep; flatten it")

    def _end(self) -> None:
        node = self.outer.pop()
        self.keys.pop()
        node.is_open = False
        self._add(node)

    def _awaits_key(self) -> bool:
        return isinstance(self.outer[-1].value, dict) and self.keys[-1] is None

    def _add(self, node: Node) -> None:
        """Put a value where it stands."""
        if not self.outer:
            self.root = node
            return
        parent = self.outer[-1]
        if self._awaits_key():
            self.keys[-1] = self._key(node)
            return
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif self.keys[-1] is not None:
            name, line = self.keys[-1]
            parent.value[name] = line, node
            self.keys[-1] = None
        parent.size += node.size
        parent.levels = max(parent.levels, node.levels + 1)
        if parent.size > MOST_VALUES:
            self._refuse(node.line, f"more than {MOST_VALUES} values; that is no config")
        if len(self.outer) + node.levels > MOST_LEVELS:
            self._refuse(node.line, f"nested more than {MOST_LEVELS} levels deep; flatten it")

    def _key(self, node: Node) -> tuple[str, int]:
        key = node.value
        if isinstance(key, dict | list):
            self._refuse(node.line, "a mapping or list cannot be a key; write a name")
        name = ".".join([own[0] for own in self.keys if own is not None] + [f"{key}"])
        name = shown(f"{self.prefix}{name}")
        if not isinstance(key, str):
            self._refuse(node.line, f"unknown key '{name}'; keys are texts")
        if key in self.outer[-1].value:
            self._refuse(node.line, f"'{name}' is given twice; keep one")
        return key, node.line


def compose(text: str, where: Callable[[int], str], prefix: str = "") -> Node | None:
    """The one document in ``text``; None if there is nothing in it.

    Args:
        where: what errors call a line, from 1.
        prefix: what the dotted names of its keys begin with, in errors.

    Raises:
        ValueError: one line, see the module's invariants.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{where(1)}: {len(text)} characters; at most {MOST_CHARACTERS} are read")

    def parse(step: Callable[[], T]) -> T:
        try:
            return step()
        except (yaml.YAMLError, ValueError) as error:  # of a character that there is not, say
            mark = getattr(error, "problem_mark", None)
            line = 1 if mark is None else mark.line + 1
            raise ValueError(f"{where(line)}: not valid YAML: {_problem(error)}") from error

    loader = parse(lambda: _Loader(text))
    composer = _Composer(loader, where, prefix)
    while parse(loader.check_event):
        composer.take(parse(loader.get_event))
    return composer.root


def plain(node: Node | None) -> Any:
    """A node as plain data."""
    if node is None:
        return None
    if isinstance(node.value, list):
        return [plain(item) for item in node.value]
    if isinstance(node.value, dict):
        return {key: plain(item) for key, (_, item) in node.value.items()}
    return node.value


def _problem(error: Exception) -> str:
    return shown(getattr(error, "problem", None) or str(error))
