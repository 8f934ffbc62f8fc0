"""A step's waits for the device and its compilations are counted, and nothing else is lost."""

import logging
import warnings

import pytest
import torch

from puzzle_align.telemetry import WaitCounter

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_compilations_are_counted_by_step() -> None:
    counter = WaitCounter(CPU)
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    found = []
    for length in (3, 3, 4, 5, 5):
        with counter.counting() as counted:
            double(torch.zeros(length))
        found.append(counted)
    assert found == [{"compilations": float(n)} for n in (1, 0, 1, 1, 0)]


def test_other_warnings_are_shown() -> None:
    with pytest.warns(UserWarning, match="something else"), WaitCounter(CPU).counting():
        warnings.warn("something else", stacklevel=1)


def test_a_warning_of_every_step_is_shown_once() -> None:
    counter = WaitCounter(CPU)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for step in range(3):
            with counter.counting():
                for text in ("the same", f"of step {step}"):
                    warnings.warn(text, stacklevel=1)
    assert [str(one.message) for one in shown] == ["the same", *(f"of step {n}" for n in range(3))]


def test_a_step_that_fails_fails() -> None:
    with pytest.raises(ValueError, match="bad"), WaitCounter(CPU).counting():
        raise ValueError("bad")


@pytest.mark.gpu
@on_gpu
def test_waits_are_counted_and_their_lines_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    value = torch.ones(4, device="cuda", requires_grad=True)
    pinned = torch.zeros(4).pin_memory()
    counter = WaitCounter(torch.device("cuda"))
    for _ in range(2):
        with counter.counting() as counted:
            assert value.sum().item() == 4
            pinned.to("cuda", non_blocking=True)
            assert value.tolist() == [1] * 4
        assert counted["host_waits"] == 2
    with counter.counting() as counted:
        (value * pinned.to("cuda", non_blocking=True)).sum().backward()
    assert counted["host_waits"] == 0
    assert torch.cuda.get_sync_debug_mode() == 0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all(__file__ in line for line in lines)
