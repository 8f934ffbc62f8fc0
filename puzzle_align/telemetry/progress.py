"""Progress display: two lines that are redrawn on a terminal, plain lines elsewhere."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from puzzle_align.telemetry import text

_LINE_S = 30.0  # between two lines of work before training
_DRAWN_S = 0.1  # between two drawings
_BAR = 20  # characters
_UP_AND_CLEAR = "\r\x1b[{}A\x1b[J"  # to the start of the line so many above; clears from there on


class Progress:
    """Progress on a terminal: a bar with rate and ETA, and under it the last step's metrics.

    Elsewhere a line like ``step 12/200 loss 0.6931 ... 4.1k tok/s eta 1m02s``.
    """

    def __init__(
        self,
        total: int,
        first: int = 0,
        *,
        wants_bar: bool,
        title: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at ``first`` of ``total``.

        Args:
            wants_bar: draw on the stream if it is a terminal (in a log file that is noise).
            title: of work to show in percent; empty: show steps.
            stream: None: show nothing.
        """
        self._total, self._first, self._title = total, first, title
        self._stream, self._clock = stream, clock
        self._started = clock()
        self._draws = stream is not None and wants_bar and stream.isatty()
        self._block: list[str] = []  # lines to draw
        self._num_drawn, self._drawn_at = 0, -_DRAWN_S
        self._logs = _log_handlers(stream) if self._draws else []
        for handler in self._logs:  # log lines appear above the block
            handler.setStream(self)
        if self._draws and not title:
            self.show(first, ("",), has_line=False)

    def step(self, step: int, metrics: Mapping[str, float], logged: bool) -> None:
        """Show a finished step; ``logged``: also where nothing is drawn."""
        shown = text.SCREEN_FIELDS if self._draws else text.STEP_FIELDS
        self.show(step, (text.fields(metrics, shown), text.speed(metrics)), has_line=logged)

    def show(self, done: int, parts: tuple[str, ...], *, has_line: bool) -> None:
        """Show the amount done and ``parts``; ``has_line``: also where nothing is drawn.

        The last of the parts is the rate.
        """
        pace = (self._clock() - self._started) / max(done - self._first, 1)
        eta = f"eta {text.duration(pace * (self._total - done))}" if done > self._first else ""
        *details, rate = parts
        if self._draws:
            share = done / max(self._total, 1)
            bar = f"[{'#' * int(_BAR * share):<{_BAR}}] {100 * share:.0f}%"
            place = self._title or f"step {done}/{self._total}"
            rest = filter(None, (rate, eta))
            self._block = [" ".join((place, bar, *rest)), *filter(None, details)]
            if done == self._total or self._clock() - self._drawn_at >= _DRAWN_S:
                self._draw()
        elif has_line:
            place = f"step {done}/{self._total}"
            if self._title:
                place = f"{self._title}: {100 * done / max(self._total, 1):.0f}%"
            self.say(" ".join(filter(None, (place, *parts, eta))))

    def say(self, line: str) -> None:
        """Print a line, above what is drawn."""
        self.write(f"{line}\n")

    def write(self, lines: str) -> None:
        """Print whole lines, above what is drawn."""
        if self._stream is not None:
            self._stream.write(self._cleared() + lines)
            self.flush()
            if self._draws:
                self._draw()

    def flush(self) -> None:
        """Flush the stream."""
        if self._stream is not None:
            self._stream.flush()

    def close(self) -> None:
        """Stop drawing; a run's last drawing stays on the screen."""
        if self._draws and self._stream is not None:
            if self._title:
                self._stream.write(self._cleared())
            else:
                self._draw()
            self.flush()
            self._num_drawn = 0
        for handler in self._logs:
            handler.setStream(self._stream)
        self._logs, self._draws = [], False

    def _cleared(self) -> str:
        """Control codes that clear what is drawn."""
        number, self._num_drawn = self._num_drawn, 0
        return _UP_AND_CLEAR.format(number) if number else ""

    def _draw(self) -> None:
        """Draw the block anew, its lines cut to the terminal's width."""
        assert self._stream is not None
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            width = 80
        lines = [text.cut(line, width - 1) + "\n" for line in self._block]
        self._stream.write(self._cleared() + "".join(lines))
        self.flush()
        self._num_drawn, self._drawn_at = len(lines), self._clock()


def _log_handlers(stream: TextIO | None) -> list["logging.StreamHandler[Any]"]:
    """The root logger's handlers that print on a stream."""
    handlers = logging.getLogger().handlers
    return [h for h in handlers if isinstance(h, logging.StreamHandler) and h.stream is stream]


def open_progress(rank: int, wants_bar: bool, num_steps: int, first_step: int) -> Progress:
    """Progress of a run in steps; other ranks than 0 show nothing."""
    stream = sys.stderr if rank == 0 else None
    return Progress(num_steps, first_step, wants_bar=wants_bar, stream=stream)


@contextmanager
def show_preparation(title: str, size: int) -> Iterator[Callable[[int, str], None]]:
    """Progress of work before training, in percent of ``size``; yields its update function.

    The function takes the amount done and its rate as text.
    """
    progress = Progress(size, wants_bar=True, title=title, stream=sys.stderr)
    last_s = time.monotonic()

    def show(done: int, rate: str) -> None:
        nonlocal last_s
        is_due = time.monotonic() - last_s > _LINE_S
        last_s = time.monotonic() if is_due else last_s
        progress.show(done, (rate,), has_line=is_due)

    try:
        yield show
    finally:
        progress.close()
