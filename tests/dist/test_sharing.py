"""Nodes that share the folder of checkpoints, or do not: ranks with folders and names of nodes."""

import errno
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from puzzle_align.runtime.checkpoint import sharing
from tests.dist.spawn import run_ranks
from tests.refusals import refusal

CURE = "mount the same folder on every host, or set output_dir to one that is"
# Which folder each of three nodes has as output_dir, and what is said of it.
CASES = {
    "shared": ("all all all", ""),
    "seen late": ("all all all", ""),
    "separate": ("all own1 own2", "node1, node2 do not see what node0 writes there"),
    "one apart": ("all all own2", "node2 does not see what node0 writes there"),
    "one way": ("all all all", "node0 does not see what node1, node2 wrote there"),
    "read-only": ("all all all", "node1, node2 cannot write there (Permission denied)"),
}


def _harm(case: str, rank: int) -> AbstractContextManager[object]:
    """What a node's file system does."""
    touch, looks = Path.touch, list[Path]()

    def late(path: Path) -> None:
        looks.append(path)
        if len(looks) < 3:
            raise FileNotFoundError
        touch(path)

    def refuse(_path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    if case == "seen late" and rank == 2:
        return patch.object(Path, "touch", late)
    if case == "read-only" and rank in (1, 2):
        return patch.object(Path, "touch", refuse)
    if case == "one way" and rank == 0:
        return patch.object(sharing.os, "listdir", lambda _path: [])
    return nullcontext()


def _look(rank: int, _world_size: int, root: Path) -> dict[str, str]:
    """What is said in each case."""
    sharing.check_shared(root / "none", "output_dir", root)  # these ranks are on one node
    os.environ["LOCAL_RANK"] = "0"
    platform.node = lambda: f"node{rank}"
    sharing.PATIENCE_S = 0.5
    said = {}
    for case, (places, wanted) in CASES.items():
        folder = root / case / places.split()[rank]

        def check(folder: Path = folder) -> None:
            sharing.check_shared(folder, "output_dir", folder)

        with _harm(case, rank):
            said[case] = refusal(check) if wanted else check() or ""
    return said


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    for case, (places, _) in CASES.items():
        for name in {*places.split()}:
            (folder / case / name / "step_00000001").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def told(root: Path) -> list[dict[str, str]]:
    return run_ranks(_look, 3, root)


@pytest.mark.parametrize("case", CASES)
def test_nodes_at_fault_are_named_on_every_rank(
    case: str, root: Path, told: list[dict[str, str]]
) -> None:
    places, fault = CASES[case]
    line = f"output_dir={root}/{case}/all is not shared: {fault}: {CURE}" if fault else ""
    assert [said[case] for said in told] == [line] * 3
    left = [path.name for path in (root / case).glob("*/*")]
    assert left == ["step_00000001"] * len({*places.split()})
