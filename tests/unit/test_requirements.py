"""The versions that setup.py and constraints.txt name are those that other packages allow."""

import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENGINE = "transformer-engine"
# Some releases of Transformer Engine, the oldest and the newest of lines among them.
RELEASES = ("2.3.0", "2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.14.1", "2.20.2")


def releases(requirement: Requirement) -> list[str]:
    return [release for release in RELEASES if release in requirement.specifier]


def named(name: str, lines: Iterable[str]) -> Requirement:
    """The only requirement of that name."""
    (requirement,) = (item for item in map(Requirement, lines) if item.name == name)
    return requirement


def test_transformer_engine_is_one_that_megatron_core_allows() -> None:
    allowed = named(ENGINE, metadata.requires("megatron-core") or ())
    quoted = re.findall(rf'"({ENGINE}[^"]*)"', (ROOT / "setup.py").read_text())
    asked = named(ENGINE, quoted)
    assert releases(asked) == releases(allowed) == ["2.9.0", "2.10.0", "2.11.0"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = named(ENGINE, (line for line in pins if not line.startswith("#")))
    assert releases(pinned) == releases(allowed)[-1:]
