"""How far the reading of a source is: a bar on a terminal, else a line in the log now and then."""

import logging
import sys
import time
from typing import Self

from puzzle_align.data.records import ReadReport

_logger = logging.getLogger(__name__)
_LINE_S = 30.0  # between two lines of the log


class Progress:
    """What has been read of a source, how fast, and how long the rest takes."""

    def __init__(self, name: str, size: int, start: int, *, shown: bool) -> None:
        """``size`` is the source's, in its own unit, of which ``start`` was done before."""
        from tqdm import tqdm

        self._name, self._size, self._done, self._start = name, size, start, start
        self._num_items = 0
        self._unit = ""
        self._begun_s = self._told_s = time.monotonic()
        self._in_lines = shown and not sys.stderr.isatty()
        self._bar = tqdm(
            desc=f"tokenize {name}",
            total=size,
            initial=start,
            disable=not shown or self._in_lines,
            leave=False,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, done: int, report: ReadReport) -> None:
        """All before ``done`` has been read, the last of which ``report`` counts."""
        self._num_items += report.num_used
        self._unit = report.unit
        now = time.monotonic()
        rate = self._num_items / max(now - self._begun_s, 1e-3)
        self._bar.set_postfix_str(f"{rate:,.0f} {self._unit}/s", refresh=False)
        self._bar.update(done - self._done)
        self._done = done
        if self._in_lines and now - self._told_s > _LINE_S:
            self._told_s = now
            _logger.info("%s", self._line(now, rate))

    def _line(self, now: float, rate: float) -> str:
        share = (self._done - self._start) / max(self._size - self._start, 1)
        left_s = (now - self._begun_s) * (1 - share) / max(share, 1e-9)
        return (
            f"data: tokenized {self._done / max(self._size, 1):.0%} of {self._name}, "
            f"{rate:,.0f} {self._unit}/s, {left_s / 60:.0f} min left"
        )
