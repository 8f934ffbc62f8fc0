"""Values that a thread makes ahead: the same as without it, and errors where they are asked for."""

import threading
import time

import numpy as np
import pytest
import torch

from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.ahead import NUM_KEPT, Ahead

CPU = torch.device("cpu")


def test_a_value_is_made_once_by_another_thread() -> None:
    made: list[tuple[int, str]] = []

    def make(key: int) -> list[int]:
        made.append((key, threading.current_thread().name))
        return [key]

    ahead = Ahead(make, CPU)
    ahead.prepare(7)
    assert ahead.of(7) == [7] and ahead.of(8) == [8]
    assert ahead.of(7) is ahead.of(7)
    ahead.prepare(7)
    assert [key for key, _ in made] == [7, 8]
    assert threading.current_thread().name not in {name for _, name in made}


def test_preparing_waits_for_nothing() -> None:
    go = threading.Event()
    ahead = Ahead(lambda key: go.wait(20) and key, CPU)
    start = time.monotonic()
    ahead.prepare(1)
    assert time.monotonic() - start < 10
    go.set()
    assert ahead.of(1) == 1


def test_values_are_made_one_at_a_time_in_order() -> None:
    made, making = list[int](), threading.Lock()

    def make(key: int) -> None:
        assert making.acquire(blocking=False), "another value is being made"
        time.sleep(0.02)
        made.append(key)
        making.release()

    ahead = Ahead(make, CPU)
    for key in (2, 0, 1):
        ahead.prepare(key)
    for key in range(3):
        ahead.of(key)
    assert made == [2, 0, 1]


def test_the_last_that_were_asked_for_are_kept() -> None:
    made: list[int] = []
    ahead = Ahead(made.append, CPU)
    for key in range(NUM_KEPT):
        ahead.of(key)
    ahead.of(0)
    ahead.prepare(NUM_KEPT)
    for key in (0, 2, NUM_KEPT):
        ahead.of(key)
    assert made == [*range(NUM_KEPT + 1)]
    ahead.of(1)
    assert made == [*range(NUM_KEPT + 1), 1]


def test_an_error_belongs_to_the_one_that_asks() -> None:
    def make(key: int) -> int:
        if key == 1:
            raise ValueError("step 1 is bad: choose another")
        return key

    ahead = Ahead(make, CPU)
    for key in (1, 2):
        ahead.prepare(key)
    assert ahead.of(2) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match="step 1 is bad: choose another"):
            ahead.of(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_values_on_a_device_are_there_for_what_is_launched_next() -> None:
    """Also on a stream of the caller's own, behind a long kernel."""
    cuda = torch.device("cuda", torch.cuda.current_device())

    def make(key: int) -> torch.Tensor:
        return copied(np.full(1 << 20, key), cuda)

    ahead = Ahead(make, cuda)
    with torch.cuda.stream(torch.cuda.Stream()):
        for key in range(20):
            busy = torch.randn(2048, 2048, device=cuda)
            for _ in range(10):
                busy = busy @ busy
            ahead.prepare(key)
            assert int(ahead.of(key).sum()) == key << 20
