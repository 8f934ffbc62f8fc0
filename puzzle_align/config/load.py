"""Read a job's config from YAML and dotted overrides, strictly; write it back as YAML.

Invariants (the tests assert them):
- every key is known, set once, of its type and among its choices, and read by the job's stage;
  else a one-line ValueError gives its place (``file:line``, or the override), its dotted name and
  the cure;
- ``load_job(dump_job(job)) == job`` for every loaded job.
"""

import difflib
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml

from puzzle_align.config.elsewhere import OURS, SECTIONS
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import ROLES
from puzzle_align.config.schema import Key, all_keys, generate_keys, is_among, section_keys
from puzzle_align.config.stages import STAGES
from puzzle_align.config.yaml_tree import Dumper, Tree
from puzzle_align.files.messages import shown, shown_path
from puzzle_align.files.typed import kind_of, written

GENERATE_KEYS = generate_keys(JobConfig)
CONFIG_FOLDERS = (
    Path(__file__).resolve().parents[2] / "configs",  # a checkout
    Path(sysconfig.get_path("data")) / "share" / "puzzle-align" / "configs",  # an installed wheel
)


def find_config(name: str) -> Path:
    """The file named by ``--config NAME``: a path, or the name of a shipped config.

    Otherwise a one-line ValueError that lists the searched folders and the known names.
    """
    for candidate in (name, f"{name}.yaml"):
        for folder in (Path(), *CONFIG_FOLDERS):
            if isfile(folder / candidate):  # unlike Path.is_file, accepts a name of any length
                return folder / candidate
    folders = [folder for folder in CONFIG_FOLDERS if folder.is_dir()]
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    places = ", ".join(["the current folder", *(str(folder) for folder in folders)])
    raise ValueError(
        f"--config {shown_path(name)}: no such file in {places}; give a path, or one of "
        f"{', '.join(names)}"
    )


def load_file(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The job described by a YAML file and overrides; see ``load_job``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a UTF-8 text: {error}") from error
    return load_job(text, overrides, source=str(path))


def load_job(text: str, overrides: Sequence[str] = (), *, source: str = "config") -> JobConfig:
    """The job described by YAML text and ``dotted.key=value`` overrides.

    ``source`` names the text in errors. A critic's optimizer has the actor's values where it sets
    none; ``reference.lora=off`` is ``reference.base=actor``. ValueError: see the module's
    invariants.
    """
    tree = Tree()
    tree.read(text, source)
    for override in overrides:
        tree.override(override)
    stage = tree.data.get("stage")
    if isinstance(stage, str) and stage in STAGES:
        for name, value in STAGES[stage].defaults.items():
            tree.default(name, value, f"stage {stage}")
    reference = tree.data.get("reference")
    if isinstance(reference, dict) and reference.get("lora") is False:  # YAML's off
        del reference["lora"]
        tree.default("reference.base", "actor", tree.origins.pop("reference.lora"))
    job = _build(JobConfig, tree.data, None, tree)
    _check_read(job.stage, tree)
    if job.critic.optimizer is None:
        return job
    own = {name: getattr(job.critic.optimizer, name) for name in tree.data["critic"]["optimizer"]}
    return replace(job, critic=replace(job.critic, optimizer=replace(job.optimizer, **own)))


def check_generate_keys(overrides: Sequence[str]) -> None:
    """Raise a one-line ValueError for an override that ``puzzle-align generate`` does not read."""
    for override in overrides:
        name = override.partition("=")[0]
        if not is_among(name, GENERATE_KEYS):
            raise ValueError(
                f"override '{shown(override)}': generate does not read '{shown(name)}'; it reads "
                f"{', '.join(GENERATE_KEYS)}"
            )


def dump_job(job: JobConfig) -> str:
    """The job as YAML, with every key that its stage reads; ``load_job`` reads it back."""
    read = _read_keys(job, job.stage, None)
    return yaml.dump(read, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _read_keys(config: Any, stage: str, parent: Key | None) -> dict[str, Any]:
    """A section's values for the keys that a stage reads."""
    values = {}
    for name, key in section_keys(type(config), parent).items():
        value = getattr(config, name)
        if key.is_section and value is not None:
            inner = _read_keys(value, stage, key)
            values |= {name: inner} if inner else {}
        elif _is_read(key, stage):
            values[name] = value
    return values


def _is_read(key: Key, stage: str) -> bool:
    """Whether a job reads a key, in its stage or when generating from its actor."""
    return key.is_read_in(stage) or (key.generate is True and "actor" in STAGES[stage].trained)


def _check_read(stage: str, tree: Tree) -> None:
    """Raise a one-line ValueError for a key that is set but not read."""
    keys = {key.name: key for key in all_keys(JobConfig)}
    for name in tree.origins:
        key = keys.get(name)
        if key is None or key.is_section or _is_read(key, stage):
            continue
        raise ValueError(
            f"{tree.origins[name]}: stage {stage} does not read '{name}' (of stage "
            f"{', '.join(key.stages)}); {_replacement(key, stage, keys)}"
        )


def _replacement(key: Key, stage: str, keys: Mapping[str, Key]) -> str:
    """The cure for another stage's key: set this stage's key of the same name, or leave it out."""
    section, _, last = key.name.partition(".")
    traits = STAGES[stage]
    candidates = (  # a base is the actor's: nothing that a stage without it could have instead
        [f"{role}.{last}" for role in traits.trained if last != "base"]
        if section in ROLES
        else [f"{traits.loss}.{last}"]
    )
    for name in candidates:
        if name in keys and _is_read(keys[name], stage):
            return f"set '{name}'"
    if section in {other.loss for other in STAGES.values()}:
        return f"leave it out: the loss of this stage is set in '{traits.loss}'"
    return "leave it out"


def _build(cls: type, data: dict[Any, Any], parent: Key | None, tree: Tree) -> Any:
    """A config dataclass from plain data; ``parent`` is the section's key, None at the top."""
    keys = section_keys(cls, parent)
    values = {}
    for name, value in data.items():
        if name not in keys:
            dotted = name if parent is None else f"{parent.name}.{name}"
            raise _unknown(dotted, value, keys, tree)
        values[name] = _value(keys[name], value, tree)
    return cls(**values)


def _value(key: Key, value: Any, tree: Tree) -> Any:
    """A key's value, checked against its type and choices."""
    if value is None and key.optional:
        return None
    where = f"{tree.origins[key.name]}: {key.name}"
    if value is None:
        raise ValueError(f"{where}: null is not a value here; leave the key out for its default")
    if key.is_section:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a mapping of keys, got {written(value)}")
        return _build(key.type, value, key, tree)
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            _check_text(key, text, where)
    return kind_of(key.hint).read(_as_number(key, value), where, _other_writing(key, value))


def _check_text(key: Key, value: str, where: str) -> None:
    """Raise a one-line ValueError if the key cannot hold the text."""
    if (problem := key.text_problem(value)) is not None:
        raise ValueError(f"{where}: '{shown(value)}' {problem}")
    if key.choices and value not in key.choices:
        near = difflib.get_close_matches(shown(value), key.choices, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{where}: '{shown(value)}' is not one of {', '.join(key.choices)}{hint}")


def _as_number(key: Key, value: Any) -> Any:
    """The value as a float, if the key holds floats and it can be converted; else unchanged."""
    if isinstance(value, list):
        return [_as_number(key, item) for item in value]
    if float in (key.type, key.items) and type(value) in (int, str):
        with suppress(ValueError, OverflowError):
            return float(value)
    return value


def _other_writing(key: Key, value: Any) -> str:
    """A hint for errors: how to write a value of the wrong type; may be empty."""
    if isinstance(value, dict | list | bool):
        return ""
    if key.items is not None and not key.or_one:
        is_item = kind_of(key.items).fits(value)
        return f"; write '[{shown(value)}]'" if is_item else ""
    return f"; write '\"{shown(value)}\"'" if str in (key.type, key.items) else ""


def _unknown(dotted: str, value: Any, siblings: Mapping[str, Key], tree: Tree) -> ValueError:
    """The error of an unknown key or section, with the key that is meant."""
    leaf = dotted
    while isinstance(value, dict) and value:
        last, value = next(iter(value.items()))
        leaf = f"{leaf}.{last}"
    if leaf in OURS or _last(leaf) in OURS or leaf.partition(".")[0] in SECTIONS:
        dotted = leaf
    stage = str(tree.data.get("stage"))
    known = {key.name: key for key in all_keys(JobConfig)}
    name = _nearest(dotted, stage if stage in STAGES else "dpo", siblings, known)
    hint = f"the nearest known one is '{name}'" if name else "none is like it; --help lists all"
    if name and name in (OURS.get(dotted), OURS.get(_last(dotted))):
        hint = f"its name here is '{name}': {known[name].doc}"
    return ValueError(f"{tree.origins[dotted]}: unknown key '{shown(dotted)}'; {hint}")


def _nearest(
    dotted: str, stage: str, siblings: Mapping[str, Key], known: Mapping[str, Key]
) -> str | None:
    """The key that is meant: by its name elsewhere, its last name, or similar letters."""
    last, section = _last(dotted), dotted.partition(".")[0]
    same = [name for name in known if _last(name) == last]
    same.sort(key=lambda name: (name.partition(".")[0] != section, len(name)))
    read = [name for name in same if known[name].is_read_in(stage)]
    exact = OURS.get(dotted) if "." in dotted else None
    meant = [exact, *read[:1], OURS.get(last), *same[:1]]
    for name in filter(None, meant):
        return name
    flat = {**OURS, **{name: key.name for name, key in siblings.items()}}
    for close in difflib.get_close_matches(shown(last), flat, 1):
        return flat[close]
    return next(iter(difflib.get_close_matches(shown(dotted), known, 1)), None)


def _last(dotted: str) -> str:
    """The last part of a dotted name."""
    return dotted.rpartition(".")[2]
