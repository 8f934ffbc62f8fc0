"""Progress display: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from puzzle_align.telemetry import text

_SHARES = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
_LINE_S = 30.0  # between two lines of work before training


class Progress:
    """A tqdm bar, or lines like ``step 12/200 loss 0.6931 ... 4.1k tok/s eta 1m02s``."""

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
            wants_bar: draw a bar if the stream is a terminal (in a log file it is noise).
            title: of work to show in percent; empty: show steps.
            stream: None: show nothing.
        """
        self._total, self._first, self._title = total, first, title
        self._stream, self._clock = stream, clock
        self._started = clock()
        self._bar = None
        if stream is not None and wants_bar and stream.isatty():
            form = {"desc": title, "bar_format": _SHARES, "leave": False} if title else {}
            self._bar = tqdm(
                total=total, initial=first, unit="step", file=stream, dynamic_ncols=True, **form
            )

    def step(self, step: int, metrics: Mapping[str, float], logged: bool) -> None:
        """Show a finished step; ``logged``: also where there is no bar."""
        self.show(step, (text.fields(metrics), text.speed(metrics)), has_line=logged)

    def show(self, done: int, parts: tuple[str, ...], *, has_line: bool) -> None:
        """Show the amount done and ``parts`` of text; ``has_line``: also where there is no bar."""
        parts = tuple(part for part in parts if part)
        if self._bar is not None:
            self._bar.set_postfix_str(" ".join(parts), refresh=False)
            self._bar.update(done - self._bar.n)
        elif has_line:
            pace = (self._clock() - self._started) / max(done - self._first, 1)
            eta = text.duration(pace * (self._total - done))
            place = f"step {done}/{self._total}"
            if self._title:
                place = f"{self._title}: {100 * done / max(self._total, 1):.0f}%"
            self.say(" ".join((place, *parts, f"eta {eta}")))

    def say(self, line: str) -> None:
        """Print a line, above a bar."""
        if self._bar is not None:
            self._bar.write(line, file=self._bar.fp)
        elif self._stream is not None:
            self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Stop drawing."""
        if self._bar is not None:
            self._bar.close()


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
