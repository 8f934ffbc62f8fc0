"""PNG files of matplotlib's, which is imported when a picture is made."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120


def new_figure(path: Path, width: float, height: float) -> "Figure":
    """An empty figure of so many inches, to be written to ``path``.

    Raises:
        ValueError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{path}: a PNG is drawn by matplotlib, which cannot be imported ({error}); "
            "pip install 'puzzle-align[plot]'"
        ) from error
    return Figure(figsize=(width, height), dpi=DPI)


def write_png(figure: "Figure", path: Path) -> None:
    """Write the figure (folders are made as needed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
