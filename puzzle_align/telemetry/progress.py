"""Progress of a run for people: a bar on a terminal, a line a logged step elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from tqdm import tqdm

from puzzle_align.telemetry import text
from puzzle_align.telemetry.sinks import EVAL_PREFIX


class Progress(Protocol):
    """Shows how far a run is."""

    def step(self, step: int, metrics: Mapping[str, float], logged: bool) -> None:
        """Called after every step; ``logged`` says that its metrics go to the logs."""
        ...

    def say(self, line: str) -> None:
        """Print a line without harm to what is drawn."""
        ...

    def close(self) -> None:
        """Stop drawing."""
        ...


class Lines:
    """``step 12/200 loss 0.6931 ... 35.1 pairs/s 4.1k tok/s eta 1m02s``, a line a logged step."""

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps, self._first_step = num_steps, first_step
        self._stream, self._clock = stream, clock
        self._started = clock()

    def step(self, step: int, metrics: Mapping[str, float], logged: bool) -> None:
        """Print the line of a logged step."""
        if not logged:
            return
        pace = (self._clock() - self._started) / (step - self._first_step)
        eta = text.duration(pace * (self._num_steps - step))
        parts = (f"step {step}/{self._num_steps}", text.fields(metrics), text.speed(metrics))
        self.say(" ".join(part for part in (*parts, f"eta {eta}") if part))

    def say(self, line: str) -> None:
        """Print a line."""
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to stop."""


class Bar:
    """A tqdm bar with rate, ETA and the metrics of the last step."""

    def __init__(self, num_steps: int, first_step: int, stream: TextIO) -> None:
        self._bar = tqdm(
            total=num_steps, initial=first_step, unit="step", file=stream, dynamic_ncols=True
        )

    def step(self, step: int, metrics: Mapping[str, float], logged: bool) -> None:
        """Advance to ``step``."""
        shown = (text.fields(metrics), text.speed(metrics))
        self._bar.set_postfix_str(" ".join(part for part in shown if part), refresh=False)
        self._bar.update(step - self._bar.n)

    def say(self, line: str) -> None:
        """Print above the bar."""
        self._bar.write(line, file=self._bar.fp)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


class Silent:
    """Progress of every rank but the first: none."""

    def step(self, step: int, metrics: Mapping[str, float], logged: bool) -> None:
        """Show nothing."""

    def say(self, line: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to stop."""


def open_progress(rank: int, wants_bar: bool, num_steps: int, first_step: int) -> Progress:
    """Rank 0: a bar if wanted and stderr is a terminal (in a log file it is noise), else lines."""
    if rank != 0:
        return Silent()
    if wants_bar and sys.stderr.isatty():
        return Bar(num_steps, first_step, sys.stderr)
    return Lines(num_steps, first_step, sys.stderr)


def eval_line(step: int, metrics: Mapping[str, float]) -> str:
    """``eval at step 100: loss 0.6012 rewards/accuracies 0.71`` of metrics named ``eval_...``."""
    return f"eval at step {step}: {text.fields(metrics, EVAL_PREFIX)}"
