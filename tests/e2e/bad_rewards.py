"""Reward functions that go wrong, for the tests of what is then said."""

import multiprocessing
import os
import signal
from functools import cache
from multiprocessing.pool import Pool
from pathlib import Path


def raises(completions: list[str], **kwargs: object) -> list[float]:
    """Raise, like a user's mistake."""
    return [len(text) / 0 for text in completions]


def large(completions: list[str], **kwargs: object) -> list[float]:
    """Return numbers whose squares overflow a float32."""
    return [1e30 + len(text) for text in completions]


@cache
def _pool() -> Pool:
    return multiprocessing.get_context("fork").Pool(2)


def pools(completions: list[str], trainer_state: object, **kwargs: object) -> list[float]:
    """With workers that stay; in the second iteration the rank is asked to stop."""
    pool = _pool()
    with Path(os.environ["WORKERS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    if trainer_state.global_step == 1:  # type: ignore[attr-defined]
        os.kill(os.getppid(), signal.SIGTERM)
    return [float(length) for length in pool.map(len, completions)]
