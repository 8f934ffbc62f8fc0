"""A config as it is written: nested mappings of plain data, and where each dotted name stands."""

from collections.abc import Callable
from typing import Any

from puzzle_align.config.yaml_nodes import MOST_LEVELS, Node, compose
from puzzle_align.files.messages import shown


class Tree:
    """Nested mappings as written, and where each dotted name was written."""

    def __init__(self) -> None:
        self.data: dict[Any, Any] = {}
        self._origins: dict[str, str] = {}

    def read(self, text: str, source: str) -> None:
        """Take in a YAML document."""

        def where(line: int) -> str:
            return f"{source}:{line}"

        node = compose(text, where)
        if node is None:
            return
        if not isinstance(node.value, dict):
            raise ValueError(f"{where(1)}: a config is a mapping of keys, such as 'seed: 42'")
        self.data = self._plain(node, "", where)

    def override(self, text: str) -> None:
        """Set one ``dotted.key=value``; the value is YAML."""
        name, equals, value = text.partition("=")
        origin = f"override '{shown(text)}'"
        if not equals or not name:
            raise ValueError(f"{origin}: write it as key=value, such as dpo.beta=0.05")
        self.set(name, value, origin)

    def set(self, name: str, value: str, origin: str) -> None:
        """Set the key of a dotted name, whatever it was, to a value in YAML."""
        *parents, last = name.split(".")
        if len(parents) >= MOST_LEVELS:
            raise ValueError(f"{origin}: a name of more than {MOST_LEVELS} parts; there is no key")
        section = self.data
        for depth, parent in enumerate(parents, start=1):
            outer = ".".join(parents[:depth])
            if section.get(parent) is None:
                section[parent] = {}
                self._origins[outer] = origin
            section = section[parent]
            if not isinstance(section, dict):
                raise ValueError(
                    f"{origin}: '{shown(outer)}' is a value, not a section with '{shown(last)}'"
                )
        for known in [known for known in self._origins if f"{known}.".startswith(f"{name}.")]:
            del self._origins[known]
        self._origins[name] = origin
        node = compose(value, lambda _: origin, f"{name}.")
        section[last] = None if node is None else self._plain(node, f"{name}.", lambda _: origin)

    @property
    def names(self) -> tuple[str, ...]:
        """The dotted names that are written."""
        return tuple(self._origins)

    def origin(self, name: str) -> str:
        """Where a dotted name was written."""
        return self._origins[name]

    def _plain(self, node: Node, prefix: str, where: Callable[[int], str]) -> Any:
        """A node as plain data; notes where (by line) its keys stand, under their dotted names."""
        if isinstance(node.value, list):
            return [self._plain(item, prefix, where) for item in node.value]
        if not isinstance(node.value, dict):
            return node.value
        plain = {}
        for key, (line, item) in node.value.items():
            self._origins[f"{prefix}{key}"] = where(line)
            plain[key] = self._plain(item, f"{prefix}{key}.", where)
        return plain
