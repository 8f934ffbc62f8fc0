"""Transfers in a thread beside a step: awaited as such, and errors on either side."""

import threading
import time

import pytest

from puzzle_align.runtime.liveness.activity import this_rank
from puzzle_align.runtime.reshard import _thread


def test_a_rank_whose_transfers_await_another_is_not_blamed() -> None:
    """Its main thread does nothing, which the watch must take for a wait, not for a hang."""
    waits = []

    def transfer() -> None:
        end = time.monotonic() + 10.0
        while not this_rank.is_waiting and time.monotonic() < end:
            time.sleep(0.01)
        waits.append(this_rank.is_waiting)

    with _thread() as run:
        run(transfer)
    assert waits == [True] and not this_rank.is_waiting


def test_an_error_of_any_transfer_is_raised() -> None:
    def transfer() -> None:
        raise KeyError

    with pytest.raises(KeyError), _thread() as run:
        run(transfer)
        run(lambda: None)


def test_after_an_error_of_the_step_no_transfer_is_awaited_or_begun() -> None:
    go, begun, threads = threading.Event(), threading.Event(), []

    def transfer() -> None:
        threads.append(threading.current_thread())
        begun.set()
        go.wait(30)

    start = time.monotonic()
    with pytest.raises(KeyError), _thread() as run:
        run(transfer)
        run(transfer)
        begun.wait(30)
        raise KeyError
    assert time.monotonic() - start < 20
    go.set()
    threads[0].join()
    assert len(threads) == 1
