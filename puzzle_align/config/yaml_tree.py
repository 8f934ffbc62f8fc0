"""Read a config's YAML into plain data, with the place of every dotted name.

YAML 1.1 by PyYAML's safe loader, with these invariants (the tests assert them):
- values are null, booleans, numbers, texts, lists, and mappings from texts; tags for others fail;
- duplicate keys and numbers in base 8 or 60 are errors;
- an error is a one-line ValueError with its place.
"""

import re
from collections.abc import Callable
from typing import Any, NoReturn

import yaml
from yaml.reader import Reader

from puzzle_align.files.messages import shown

_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str")}
_COLLECTIONS = {f"{_TAG}seq", f"{_TAG}map"}
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
_SURPRISING = re.compile(r"[-+]?(0[0-9_]+$|[0-9_]+:)")  # numbers in base 8 or 60


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that ``1e-6`` is a number and a date is a text."""


_Loader.yaml_implicit_resolvers = {
    first: [item for item in items if item[0] not in (f"{_TAG}timestamp", f"{_TAG}value")]
    for first, items in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Dumper(yaml.SafeDumper):
    """Quotes texts that the loader would read as numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write no aliases: repeat the value."""
        return True


for _side in (_Loader, Dumper):
    _side.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


class Tree:
    """Nested mappings as written (``data``), and the place of each dotted name (``origins``)."""

    def __init__(self) -> None:
        self.data: dict[Any, Any] = {}
        self.origins: dict[str, str] = {}

    def read(self, text: str, source: str) -> None:
        """Read a YAML document; ``source`` names it in errors."""
        data = read_yaml(text, lambda line: f"{source}:{line}", "", self.origins)
        if data is None:
            return
        if not isinstance(data, dict):
            raise ValueError(f"{source}:1: a config is a mapping of keys, such as 'seed: 42'")
        self.data = data

    def override(self, text: str) -> None:
        """Set one ``dotted.key=value``; the value is YAML."""
        name, equals, value = text.partition("=")
        origin = f"override '{shown(text)}'"
        if not equals or not name:
            raise ValueError(f"{origin}: write it as key=value, such as dpo.beta=0.05")
        *parents, last = name.split(".")
        section = self.data
        for depth, parent in enumerate(parents, start=1):
            outer = ".".join(parents[:depth])
            if section.get(parent) is None:
                section[parent] = {}
                self.origins[outer] = origin
            section = section[parent]
            if not isinstance(section, dict):
                raise ValueError(
                    f"{origin}: '{shown(outer)}' is a value, not a section with '{shown(last)}'"
                )
        for written in [key for key in self.origins if f"{key}.".startswith(f"{name}.")]:
            del self.origins[written]
        self.origins[name] = origin
        section[last] = read_yaml(value, lambda _: origin, f"{name}.", self.origins)

    def default(self, name: str, value: Any, origin: str) -> None:
        """Set a dotted name that is not set, where nothing else is in its place."""
        *parents, last = name.split(".")
        section: Any = self.data
        for depth, parent in enumerate(parents, start=1):
            if section.get(parent) is None:
                section[parent] = {}
                self.origins.setdefault(".".join(parents[:depth]), origin)
            section = section[parent]
            if not isinstance(section, dict):
                return
        if last not in section:
            section[last] = value
            self.origins[name] = origin


def read_yaml(
    text: str,
    where: Callable[[int], str],
    prefix: str = "",
    origins: dict[str, str] | None = None,
) -> Any:
    """Plain data of the single document in ``text``; None if it is empty.

    Args:
        where: names a line, counted from 1, in errors.
        prefix: of the dotted names of its keys.
        origins: output: the place of every key, by dotted name.

    Raises:
        ValueError: one line, see the module's invariants.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an escape of no valid character
        mark = getattr(error, "problem_mark", None)
        problem = shown(getattr(error, "problem", None) or str(error))
        line = 1 if mark is None else mark.line + 1
        raise ValueError(f"{where(line)}: not valid YAML: {problem}") from error
    except RecursionError:
        raise ValueError(f"{where(1)}: nested too deep; flatten it") from None
    if node is None:
        return None
    try:
        return _Plain(loader, where, {} if origins is None else origins).value(node, prefix)
    except RecursionError:
        raise ValueError(f"{where(1)}: an alias stands in itself; write out its value") from None


class _Plain:
    """Converts nodes to plain data, and records the places of their keys."""

    def __init__(
        self, loader: _Loader, where: Callable[[int], str], origins: dict[str, str]
    ) -> None:
        self._loader, self._where, self._origins = loader, where, origins

    def value(self, node: yaml.Node, prefix: str) -> Any:
        """Plain data of a node; ``prefix`` begins the dotted names of its keys."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in _COLLECTIONS:
            self._refuse(node, f"tag '{shown(node.tag)}' is not taken; leave it out")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, prefix) for item in node.value]
        plain: dict[str, Any] = {}
        for key_node, item in node.value:
            key = self._key(key_node, prefix, plain)
            self._origins[f"{prefix}{key}"] = self._where(key_node.start_mark.line + 1)
            plain[key] = self.value(item, f"{prefix}{key}.")
        return plain

    def _key(self, node: yaml.Node, prefix: str, earlier: dict[str, Any]) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, "a mapping or list cannot be a key; write a name")
        key = self._scalar(node)
        name = shown(f"{prefix}{key}")
        if not isinstance(key, str):
            self._refuse(node, f"unknown key '{name}'; keys are texts")
        if key in earlier:
            self._refuse(node, f"'{name}' is given twice; keep one")
        return key

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if node.tag not in _SCALARS:
            self._refuse(node, f"'{shown(text)}': tag '{shown(kind)}' is not taken; leave it out")
        if kind != "str" and _SURPRISING.match(text):
            self._refuse(
                node,
                f"'{shown(text)}': YAML 1.1 reads it in base 8 or 60; write it in base 10, or "
                "quote it",
            )
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError):
            self._refuse(node, f"'{shown(text)}' is not a valid {kind}; write one")
        if isinstance(value, str) and Reader.NON_PRINTABLE.search(value):
            self._refuse(node, f"'{shown(value)}' has an unprintable character; take it out")
        return value

    def _refuse(self, node: yaml.Node, why: str) -> NoReturn:
        raise ValueError(f"{self._where(node.start_mark.line + 1)}: {why}")
