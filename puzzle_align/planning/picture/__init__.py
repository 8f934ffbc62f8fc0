"""Timelines as pictures: text for a terminal, PNG, Chrome trace. Traffic as a PNG."""

from puzzle_align.planning.picture.figures import Traffic, save_traffic
from puzzle_align.planning.picture.panel import Panel, idle_share, save_trace, time_text
from puzzle_align.planning.picture.png import save_png
from puzzle_align.planning.picture.text import draw_text

__all__ = [
    "Panel",
    "Traffic",
    "draw_text",
    "idle_share",
    "save_png",
    "save_trace",
    "save_traffic",
    "time_text",
]
