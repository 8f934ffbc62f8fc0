"""Repeats a measurement: warm-up, then as often as asked, more often where it is short."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

Samples = dict[str, list[float]]  # by what was measured, a number for every repetition
Moment = float | torch.cuda.Event

_SHORT_S = 0.02
_MOST = 5  # times as many repetitions of what is short


def now(device: torch.device) -> float:
    """Seconds on this rank's clock, when all that it has launched is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of a call, with all that it launches."""
    start = now(device)
    call()
    return now(device) - start


def moment(device: torch.device) -> Moment:
    """When the device gets here; nobody waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Moment, end: Moment) -> float:
    """Seconds from one moment to another; on CUDA both must be over."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1000  # of milliseconds
    assert not isinstance(end, torch.cuda.Event)
    return end - start


def repeated(
    sample: Callable[[], Mapping[str, Sequence[float]]], repeats: int, *, adaptive: bool = True
) -> Samples:
    """The numbers of ``repeats`` repetitions; of up to five times as many that take under 20 ms.

    Args:
        sample: one or several repetitions, alike in number for all that is measured.
        adaptive: false: no more than asked, for samples that several ranks take together.
    """
    sample()  # warms up: compiles, allocates, fills the caches
    found: Samples = {}
    number, start = 0, time.perf_counter()
    while number < repeats or (
        adaptive and number < _MOST * repeats and time.perf_counter() - start < _SHORT_S * repeats
    ):
        for name, values in sample().items():
            found.setdefault(name, []).extend(values)
        number = max(map(len, found.values()))
    return found
