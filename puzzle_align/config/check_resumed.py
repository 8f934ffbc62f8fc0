"""Comparison of a job's keys with those of the run that it resumes, without models or data."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.saved import Saved
from puzzle_align.config.schema import binding_keys
from puzzle_align.files.json_file import as_json, differences
from puzzle_align.files.messages import shown

CURE = "restore it, or start anew with another output_dir"
_SAME_DATA = ("data.cache_dir", "data.num_proc")  # keys with which the data are the same
UNKNOWN = "unknown"  # the value of a key that an older version did not have


def check_same_config(config: JobConfig, saved: Saved) -> None:
    """Raise a one-line ValueError if a key that a resumed run must keep has changed."""
    old, new = _configs(saved, config)
    stage = old.get("stage", UNKNOWN)
    if stage != config.stage:
        raise ValueError(f"stage is {config.stage}, but {shown(stage)} in {saved.path}: {CURE}")
    # Then packing decides which examples a step holds.
    by_row = _samples_by_row(old), _samples_by_row(new)
    packing = ("data.format",) * (by_row[0] != by_row[1]) + ("packing",) * any(by_row)
    # The critic's last: without an optimizer of its own it has the actor's.
    kept = sorted(binding_keys(JobConfig, config.stage), key=lambda name: name.startswith("critic"))
    for name in (*kept, *packing):
        name = _present(name, old, new)
        for key, was, value in _changes(name, old, new):
            values = f"{shown(key)} is {written(value)}, but {written(was)}"
            raise ValueError(f"{values} in {saved.path}: {CURE}")


def check_same_data(config: JobConfig, saved: Saved, fingerprint: str) -> None:
    """Raise a one-line ValueError with the changed keys if the data to train on have changed.

    No key is named if the content of a file has changed.
    """
    if saved.job["data"] == fingerprint:
        return
    what = f"{saved.path} was trained on other data (data.*, tokenizer.*)"
    old, new = _configs(saved, config)
    for name in ("data", "tokenizer"):
        for key, was, value in _changes(name, old, new):
            if key not in _SAME_DATA:
                what += f"; {shown(key)} is {written(value)}, but {written(was)} there"
    raise ValueError(f"{what}: {CURE}")


def written(value: Any) -> str:
    """A value as a config has it, on one line."""
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _present(name: str, *configs: dict[str, Any]) -> str:
    """The key, or the section of it that is null in one of the configs."""
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((each for each in above if None in (_value(c, each) for c in configs)), name)


def _configs(saved: Saved, config: JobConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The saved job's config, and this one's."""
    return _whole(saved.job["config"]), _whole(asdict(config))


def _changes(name: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield ``differences`` of a key or section; one that ``old`` lacks had its stage's default."""
    defaults = _whole(asdict(load_job(f"stage: {new['stage']}")))
    for key, was, value in differences(name, _value(old, name), _value(new, name), UNKNOWN):
        if was is not UNKNOWN or value != _value(defaults, key):
            yield key, was, value


def _samples_by_row(config: dict[str, Any]) -> bool:
    scope = _value(config, "packing.scope")
    return scope == "dataset" or _value(config, "data.format") == "packed"


def _whole(config: dict[str, Any]) -> dict[str, Any]:
    """Config as JSON values, with the critic's optimizer filled in."""
    whole = as_json(config)
    critic = whole.get("critic", {})
    critic["optimizer"] = critic.get("optimizer") or whole.get("optimizer")
    return whole


def _value(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree.get(part, UNKNOWN) if isinstance(tree, dict) else UNKNOWN
    return tree
