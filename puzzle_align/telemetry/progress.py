"""Progress display: two lines that are redrawn on a terminal, plain lines elsewhere."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from puzzle_align.telemetry import text

_LINE_S = 30.0  # between two lines of work before training
_DRAWN_S = 0.1  # between two drawings
_BAR = 20  # characters
# The cursor waits on an empty line above what is drawn: what others print there stays.
_CLEAR, _UP = "\r\x1b[J", "\x1b[{}A"  # from the line's start on; so many lines


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
            total: 0 if it is not known: no share and no time left are shown.
            wants_bar: draw on the stream if it is a terminal (in a log file that is noise).
            title: of work to show in percent; empty: show steps.
            stream: None: show nothing.
        """
        self._total, self._first, self._title = total, first, title
        self._stream, self._clock = stream, clock
        self._started = clock()
        self._draws = stream is not None and wants_bar and stream.isatty()
        self._block: list[str] = []  # lines to draw
        self._drawn_at = -_DRAWN_S
        self._logs: list[Any] = []  # handlers whose lines appear above the block
        if self._draws:
            handlers = logging.getLogger().handlers
            self._logs = [h for h in handlers if getattr(h, "stream", None) is stream]
        for handler in self._logs:
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
            bar = f"[{'#' * int(_BAR * share):<{_BAR}}] {100 * share:.0f}%" if self._total else ""
            place = self._title or f"step {done}/{self._total}"
            first_line = " ".join(filter(None, (place, bar, rate, eta)))
            self._block = [first_line, *filter(None, details)]
            if done == self._total or self._clock() - self._drawn_at >= _DRAWN_S:
                self.write("")
        elif has_line:
            place = f"step {done}/{self._total}"
            if self._title:
                share = f" {100 * done / self._total:.0f}%" if self._total else ""
                place = f"{self._title}:{share}"
            self.say(" ".join(filter(None, (place, *parts, eta))))

    def say(self, line: str) -> None:
        """Print a line, above what is drawn."""
        self.write(f"{line}\n")

    def write(self, lines: str) -> None:
        """Print whole lines, above what is drawn, which is drawn anew."""
        if self._draws:
            lines = f"{_CLEAR}{lines}\n{self._drawn()}{_UP.format(len(self._block) + 1)}"
        if self._stream is not None:
            with suppress(OSError):  # a log on a full disk, or whose reader has left, ends no run
                self._stream.write(lines)
                self._stream.flush()

    def flush(self) -> None:
        """Do nothing, for log handlers: ``write`` flushes."""

    def close(self) -> None:
        """Stop drawing; a run's last drawing stays on the screen."""
        draws, self._draws = self._draws, False
        if draws:
            self.write(_CLEAR + ("" if self._title else self._drawn()))
        for handler in self._logs:
            handler.setStream(self._stream)
        self._logs = []

    def _drawn(self) -> str:
        """The block's lines, cut to the terminal's width."""
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns if self._stream else 0
        except OSError:
            width = 0
        self._drawn_at = self._clock()
        return "".join(text.cut(line, (width or 80) - 1) + "\n" for line in self._block)


def open_progress(rank: int, wants_bar: bool, num_steps: int, first_step: int) -> Progress:
    """Progress of a run in steps; other ranks than 0 show nothing."""
    stream = sys.stderr if rank == 0 else None
    return Progress(num_steps, first_step, wants_bar=wants_bar, stream=stream)


@contextmanager
def show_preparation(title: str, size: int) -> Iterator[Callable[[int, str], None]]:
    """Progress of work before training, in percent of ``size``; yields its update function.

    ``size`` is 0 if it is not known. The function takes the amount done and its rate as text.
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
