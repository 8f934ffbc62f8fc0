"""The versions that setup.py and constraints.txt name are those that other packages allow."""

import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENGINE, MEGATRON, TRITON = "transformer-engine", "megatron-core", "triton"
# Some releases, the oldest and the newest of lines among them.
RELEASES = {
    ENGINE: ("2.3.0", "2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.14.1", "2.20.2", "2.21"),
    MEGATRON: ("0.15.3", "0.16.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2", "0.20.0"),
    TRITON: ("3.3.1", "3.4.0", "3.7.1"),
}


def releases(name: str, lines: Iterable[str], python: str) -> list[str]:
    """Releases that the only requirement of that name allows on that Python."""
    where = {"python_version": python, "platform_system": "Linux", "extra": "dev"}
    (requirement,) = (
        item
        for item in map(Requirement, lines)
        if item.name == name and (item.marker is None or item.marker.evaluate(where))
    )
    return [release for release in RELEASES[name] if release in requirement.specifier]


def asked(name: str, python: str) -> list[str]:
    source = (ROOT / "setup.py").read_text()
    return releases(name, re.findall(rf'"({name}[^"]*)"', source), python)


def test_transformer_engine_is_one_that_megatron_core_allows() -> None:
    assert asked(ENGINE, "3.11") == ["2.9.0", "2.10.0", "2.11.0"]
    if metadata.version(MEGATRON).startswith("0.16."):  # later versions name no bounds
        assert releases(ENGINE, metadata.requires(MEGATRON) or (), "3.11") == asked(ENGINE, "3.11")


@pytest.mark.parametrize(
    ("name", "python", "pinned"),
    [
        (MEGATRON, "3.11", "0.16.1"),
        (MEGATRON, "3.12", "0.19.2"),
        (MEGATRON, "3.13", "0.19.2"),
        (ENGINE, "3.11", "2.11.0"),
        (ENGINE, "3.13", "2.20.2"),
        (TRITON, "3.11", "3.7.1"),  # of the extra "test": without it the kernels' tests are skipped
    ],
)
def test_constraints_pin_an_allowed_release(name: str, python: str, pinned: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert releases(name, (x for x in lines if not x.startswith("#")), python) == [pinned]
    assert pinned in asked(name, python)
