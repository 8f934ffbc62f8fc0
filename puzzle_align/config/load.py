"""A job's config from YAML, keys that are decided, and dotted overrides, strictly; back to YAML.

Invariants (the tests assert them):
- every key is known, set once, of its type and among its choices, else one ValueError line says
  where it stands (``file:line``, or which override), its dotted name, and the cure;
- what is decided holds: an override of it is such an error too;
- ``load_job(dump_job(job)) == job`` for every job.
"""

import difflib
import json
import math
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from puzzle_align.config.job import JobConfig
from puzzle_align.config.schema import Key, all_keys, is_among, section_keys

CONFIG_FOLDERS = (
    Path(__file__).resolve().parents[2] / "configs",  # a checkout
    Path(sysconfig.get_path("data")) / "share" / "puzzle-align" / "configs",  # an installed wheel
)
TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "a mapping",
}
_ITEM_NAMES = {int: "integers", float: "numbers", str: "texts"}


class _Loader(yaml.SafeLoader):
    """YAML 1.1, and ``1e-6`` is a number as everywhere else."""


class _Dumper(yaml.SafeDumper):
    """Quotes the text that the loader would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


@dataclass(frozen=True)
class Decided:
    """Keys that ``source``, a file, decides whatever the YAML says, by dotted name, in order.

    Null unsets a key, and empties a section before the keys of it that follow.
    """

    source: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def check(self, override: str) -> None:
        """Raise a one-line ValueError if an override sets what is decided, or some of it."""
        name = override.partition("=")[0]
        for key in self.values:
            if is_among(name, (key,)) or is_among(key, (name,)):
                raise ValueError(
                    f"override '{override}': {self.source} decides '{key}'; leave the override "
                    "out, or plan the job again with it"
                )


NOTHING = Decided()


def find_config(name: str) -> Path:
    """The file that ``--config NAME`` means: a path, or a file of the shipped configs.

    Raises:
        ValueError: where it looked, and which names there are.
    """
    for candidate in (name, f"{name}.yaml"):
        for folder in (Path(), *CONFIG_FOLDERS):
            if (folder / candidate).is_file():
                return folder / candidate
    folders = [folder for folder in CONFIG_FOLDERS if folder.is_dir()]
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    places = ", ".join(["the current folder", *(str(folder) for folder in folders)])
    raise ValueError(
        f"--config {name}: no such file in {places}; give a path, or one of {', '.join(names)}"
    )


def load_file(path: Path, overrides: Sequence[str] = (), decided: Decided = NOTHING) -> JobConfig:
    """The job described by a YAML file and ``dotted.key=value`` overrides.

    Raises:
        ValueError: see the module's invariants.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a UTF-8 text: {error}") from error
    return load_job(text, overrides, source=str(path), decided=decided)


def load_job(
    text: str,
    overrides: Sequence[str] = (),
    *,
    source: str = "config",
    decided: Decided = NOTHING,
) -> JobConfig:
    """The job described by YAML text, keys that are decided, and ``dotted.key=value`` overrides.

    Args:
        source: names the text.

    Raises:
        ValueError: see the module's invariants.
    """
    tree = _Tree()
    tree.read(text, source)
    for name, value in decided.values.items():
        tree.set(name, json.dumps(value, ensure_ascii=False), decided.source)
    for override in overrides:
        tree.override(override)
        decided.check(override)
    return _build(JobConfig, tree.data, None, tree)


def dump_job(job: JobConfig) -> str:
    """The job as YAML, with every key, that ``load_job`` reads back equal."""
    return yaml.dump(asdict(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Tree:
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


def _build(cls: type, data: dict[Any, Any], parent: Key | None, tree: _Tree) -> Any:
    """A config dataclass from plain data; ``parent`` is its key."""
    keys = section_keys(cls, parent)
    values = {}
    for name, value in data.items():
        if name not in keys:
            dotted = f"{name}" if parent is None else f"{parent.name}.{name}"
            raise ValueError(
                f"{tree.origin(dotted)}: unknown key '{dotted}'; "
                f"the nearest known one is '{_nearest(dotted, keys)}'"
            )
        values[name] = _value(keys[name], value, tree)
    return cls(**values)


def _value(key: Key, value: Any, tree: _Tree) -> Any:
    """A key's value, checked against its type and choices."""
    if value is None and key.optional:
        return None
    where = f"{tree.origin(key.name)}: {key.name}"
    if value is None:
        raise ValueError(f"{where}: null is not a value here; leave the key out for its default")
    if key.is_section:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a mapping of keys, got {_shown(value)}")
        return _build(key.type, value, key, tree)
    if key.type is float:
        return _number(value, where)
    if isinstance(value, str) and value in key.words:
        return value
    is_list = key.items is not None and isinstance(value, list)
    if is_list and key.items is float:
        return [_number(item, where) for item in value]
    if is_list:
        fits = all(type(item) is key.items for item in value)
    else:
        fits = key.type is not list and type(value) is key.type
    if not fits:
        got = f"{_shown(value)}{_other_writing(key, value)}"
        raise ValueError(f"{where}: expected {type_name(key)}, got {got}")
    for chosen in value if is_list else (value,):
        if key.choices and chosen not in key.choices:
            near = difflib.get_close_matches(chosen, key.choices, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{where}: '{chosen}' is not one of {', '.join(key.choices)}{hint}")
    return value


def type_name(key: Key) -> str:
    """What a key's value is, for people: ``a list of integers or auto``."""
    names = [] if key.type is list else [TYPE_NAMES[key.type]]
    if key.items is not None:
        names.append(f"a list of {_ITEM_NAMES[key.items]}")
    return " or ".join((*names, *key.words))


def _other_writing(key: Key, value: Any) -> str:
    """How a value of the wrong type becomes one of the key's, where that is likely meant."""
    if key.items is not None and isinstance(value, list):
        return " of other things"
    if key.type is list:
        return f"; write '[{value}]'" if type(value) in (int, float) else ""
    return f"; write '\"{value}\"'" if key.type is str and not _is_nested(value) else ""


def _number(value: Any, where: str) -> float:
    """A finite float from an int, a float, or text that reads as one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a finite number, got {_shown(value)}")
    return number


def _shown(value: Any) -> str:
    """A value as the user wrote it, kept to one short line."""
    if _is_nested(value):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (str, int, float)) else str(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _nearest(dotted: str, siblings: dict[str, Key]) -> str:
    """The known key most like an unknown one: of the same name elsewhere, a sibling, or any."""
    last = dotted.rpartition(".")[2]
    known = [key.name for key in all_keys(JobConfig)]
    same = [name for name in known if name.rpartition(".")[2] == last]
    if same:
        return same[0]
    close = difflib.get_close_matches(last, siblings, 1)
    return siblings[close[0]].name if close else difflib.get_close_matches(dotted, known, 1, 0.0)[0]
