"""A config as it is written: nested mappings of plain data, and where each dotted name stands."""

import re
from collections.abc import Callable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """YAML 1.1, and ``1e-6`` is a number as everywhere else."""


class Dumper(yaml.SafeDumper):
    """Quotes the text that the loader would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """What stands in two places is written out in both."""
        return True


for _side in (_Loader, Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


class Tree:
    """Nested mappings as written, and where each dotted name was written."""

    def __init__(self) -> None:
        self.data: dict[Any, Any] = {}
        self._origins: dict[str, str] = {}

    def read(self, text: str, source: str) -> None:
        """Take in a YAML document."""

        def where(line: int) -> str:
            return f"{source}:{line}"

        node = _compose(text, where)
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{where(1)}: a config is a mapping of keys, such as 'seed: 42'")
        self.data = self._plain(node, "", where)

    def override(self, text: str) -> None:
        """Set one ``dotted.key=value``; the value is YAML."""
        name, equals, value = text.partition("=")
        origin = f"override '{text}'"
        if not equals or not name:
            raise ValueError(f"{origin}: write it as key=value, such as dpo.beta=0.05")
        self.set(name, value, origin)

    def set(self, name: str, value: str, origin: str) -> None:
        """Set the key of a dotted name, whatever it was, to a value in YAML."""
        *parents, last = name.split(".")
        section = self.data
        for depth, parent in enumerate(parents, start=1):
            outer = ".".join(parents[:depth])
            if section.get(parent) is None:
                section[parent] = {}
                self._origins[outer] = origin
            section = section[parent]
            if not isinstance(section, dict):
                raise ValueError(f"{origin}: '{outer}' is a value, not a section with '{last}'")
        for known in [known for known in self._origins if f"{known}.".startswith(f"{name}.")]:
            del self._origins[known]
        self._origins[name] = origin
        node = _compose(value, lambda _: origin)
        section[last] = None if node is None else self._plain(node, f"{name}.", lambda _: origin)

    @property
    def names(self) -> tuple[str, ...]:
        """The dotted names that are written."""
        return tuple(self._origins)

    def origin(self, name: str) -> str:
        """Where a dotted name was written."""
        return self._origins[name]

    def _plain(self, node: yaml.Node, prefix: str, where: Callable[[int], str]) -> Any:
        """A node as plain data; notes where (by line) its keys stand, under their dotted names."""
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, prefix, where) for item in node.value]
        if not isinstance(node, yaml.MappingNode):
            return _construct(node, where)
        plain = {}
        for key_node, value in node.value:
            key = _construct(key_node, where)
            name = f"{prefix}{key}"
            origin = where(key_node.start_mark.line + 1)
            if key in plain:
                raise ValueError(f"{origin}: '{name}' is given twice; keep one")
            self._origins[name] = origin
            plain[key] = self._plain(value, f"{name}.", where)
        return plain


def _compose(text: str, where: Callable[[int], str]) -> yaml.Node | None:
    """The one document in ``text``; None if there is nothing in it."""
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = 1 if mark is None else mark.line + 1
        raise ValueError(f"{where(line)}: not valid YAML: {_problem(error)}") from error


def _construct(node: yaml.Node, where: Callable[[int], str]) -> Any:
    """A scalar's value; anything else stands where only a key can."""
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"{where(line)}: a mapping or list cannot be a key")
    try:
        return _Loader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{where(line)}: '{node.value}' cannot be read: {_problem(error)}"
        ) from error


def _problem(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())
