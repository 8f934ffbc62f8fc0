"""Pictures of a switch's traffic and of growth hold what their numbers say."""

import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from puzzle_align.planning.picture import figures
from puzzle_align.planning.picture.figures import Point, Traffic, save_scaling, save_traffic

GB = 10**9
# Rank 5 receives more than it must; nothing goes to rank 2.
TRAFFIC = Traffic(
    "four ranks",
    (0, 2, 5, 7),
    {(0, 5): 8 * GB, (2, 5): 2 * GB, (7, 0): 4 * GB, (5, 7): 1},
    {0: 4 * GB, 2: 0, 5: 5 * GB, 7: 1},
)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written."""
    written: list[Figure] = []
    monkeypatch.setattr(figures, "write_png", lambda figure, _path: written.append(figure))
    return written


def test_a_cell_is_as_dark_as_its_link_is_busy(drawn: list[Figure]) -> None:
    save_traffic(TRAFFIC, Path("traffic.png"))
    ranks = TRAFFIC.ranks
    (image,) = drawn[0].axes[0].images
    sizes = [[TRAFFIC.links.get((sender, to), 0) for to in ranks] for sender in ranks]
    assert np.asarray(image.get_array()).tolist() == sizes
    assert image.get_clim() == (0, 8 * GB)
    assert to_hex(image.cmap(0.0)) == figures.LIGHT and to_hex(image.cmap(1.0)) == figures.DARK


def test_bars_are_as_high_as_what_ranks_receive(drawn: list[Figure]) -> None:
    save_traffic(TRAFFIC, Path("traffic.png"))
    axes = drawn[0].axes[1]
    assert TRAFFIC.received == [4 * GB, 0, 10 * GB, 1]
    assert axes.get_ylabel() == "GiB"
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == [size / 2**30 for size in TRAFFIC.received]
    (bounds,) = axes.collections
    levels = [np.asarray(path.vertices)[0, 1] for path in bounds.get_paths()]
    assert levels == [TRAFFIC.least[rank] / 2**30 for rank in TRAFFIC.ranks]


@pytest.mark.parametrize("num_ranks", [1, 16, 40, pytest.param(512, marks=pytest.mark.slow)])
def test_any_number_of_ranks_fits(tmp_path: Path, num_ranks: int) -> None:
    links = {(rank, (rank + 1) % num_ranks): GB for rank in range(num_ranks) if num_ranks > 1}
    ring = Traffic("ring", tuple(range(num_ranks)), links, dict.fromkeys(range(num_ranks), GB))
    save_traffic(ring, tmp_path / "ring.png")
    height, width, _ = imread(tmp_path / "ring.png").shape
    assert max(height, width) <= 1400


def test_without_matplotlib_there_is_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'puzzle-align\[plot\]'"):
        save_traffic(TRAFFIC, tmp_path / "traffic.png")


def test_growth_shows_rates_in_numbers_and_each_phase_s_share(tmp_path: Path) -> None:
    points = [
        Point(1, 100.0, {"generate": 6.0, "learn": 4.0}),
        Point(4, 320.0, {"generate": 2.0, "learn": 1.0, "switch": 0.125}),
    ]
    above, below = Figure().subplots(2)
    figures._draw_rates(above, points)
    figures._draw_phases(below, points)
    assert [text.get_text() for text in above.texts] == ["80%"]
    assert [above.yaxis.get_major_formatter()(256)] == ["256"]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in below.containers}
    assert [*heights] == ["generate", "learn", "switch"]
    assert [sum(of_point) for of_point in zip(*heights.values(), strict=True)] == [
        pytest.approx(point.num_ranks / point.rate) for point in points
    ]
    assert heights["generate"][1] == pytest.approx(2.0 / 3.125 * 4 / 320.0)
    save_scaling(points, tmp_path / "growth.png")
    assert imread(tmp_path / "growth.png").ndim == 3
