"""The picture of a switch's traffic holds what its numbers say: links, receipts, bounds."""

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from puzzle_align.planning.picture import Traffic, figures, save_traffic
from puzzle_align.planning.picture.figures import DPI

GB = 10**9
# Rank 5 receives more than it must; nothing goes to rank 2.
TRAFFIC = Traffic(
    "four ranks",
    (0, 2, 5, 7),
    {(0, 5): 8 * GB, (2, 5): 2 * GB, (7, 0): 4 * GB, (5, 7): 1},
    {0: 4 * GB, 2: 0, 5: 5 * GB, 7: 1},
)


def _read(path: Path) -> np.ndarray:
    """Pixels ``[row, column, RGB]`` as bytes."""
    return np.round(imread(path)[..., :3] * 255).astype(int)


def _rgb(colour: str) -> np.ndarray:
    return np.round(np.array(to_rgb(colour)) * 255).astype(int)


def _corner(row: int, column: int, num_ranks: int) -> tuple[int, int]:
    """A pixel of a cell near its upper left corner, clear of number and frame."""
    cell = figures.side_of(num_ranks) / num_ranks
    top, left = figures.MARGINS["top"], figures.MARGINS["left"]
    return int((top + (row + 0.2) * cell) * DPI), int((left + (column + 0.2) * cell) * DPI)


def test_a_cell_is_as_dark_as_its_link_is_busy(tmp_path: Path) -> None:
    save_traffic(TRAFFIC, tmp_path / "new" / "traffic.png")
    image = _read(tmp_path / "new" / "traffic.png")
    light, dark = _rgb(figures.LIGHT), _rgb(figures.DARK)
    for row, sender in enumerate(TRAFFIC.ranks):
        for column, receiver in enumerate(TRAFFIC.ranks):
            share = TRAFFIC.links.get((sender, receiver), 0) / (8 * GB)
            found = image[_corner(row, column, 4)]
            assert np.abs(found - (light + (dark - light) * share)).max() <= 2


def test_bars_are_as_high_as_what_ranks_receive(tmp_path: Path) -> None:
    save_traffic(TRAFFIC, tmp_path / "traffic.png")
    image = _read(tmp_path / "traffic.png")
    first = int((figures.MARGINS["top"] + figures.side_of(4) + figures.GAP) * DPI)
    heights, bounds = [], []  # of bars, and of the middles of the lines, from the lowest of these
    for column in range(4):
        line = image[first:, _corner(0, column, 4)[1]]
        heights.append(int((line == _rgb(figures.RECEIVED)).all(axis=1).sum()))
        (rows,) = (line == _rgb(figures.BOUND)).all(axis=1).nonzero()
        assert len(rows), f"column {column} has no lower bound"
        bounds.append(-rows.mean())
    assert TRAFFIC.received == [4 * GB, 0, 10 * GB, 1]
    assert heights[0] / heights[2] == pytest.approx(0.4, abs=0.03)
    assert heights[1] == heights[3] == 0
    full = heights[2] / 10
    above = [(bound - bounds[1]) / full for bound in bounds]
    assert above == pytest.approx([4, 0, 5, 0], abs=0.3)


@pytest.mark.parametrize("num_ranks", [1, 16, 40, 512])
def test_any_number_of_ranks_fits(tmp_path: Path, num_ranks: int) -> None:
    links = {(rank, (rank + 1) % num_ranks): GB for rank in range(num_ranks) if num_ranks > 1}
    ring = Traffic("ring", tuple(range(num_ranks)), links, dict.fromkeys(range(num_ranks), GB))
    save_traffic(ring, tmp_path / "ring.png")
    height, width, _ = _read(tmp_path / "ring.png").shape
    assert max(height, width) <= 1400


def test_without_matplotlib_the_error_names_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'puzzle-align\[plot\]'"):
        save_traffic(TRAFFIC, tmp_path / "traffic.png")
