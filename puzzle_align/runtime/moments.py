"""Moments on a device: read by waiting, or marked without waiting and read later."""

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> float:
    """Seconds on this rank's clock, after all launched work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def moment(device: torch.device) -> Moment:
    """Mark the moment at which the device gets here, without waiting."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Moment, end: Moment) -> float:
    """Seconds from one moment to another; on CUDA both must have passed."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1000  # from milliseconds
    assert not isinstance(end, torch.cuda.Event)
    return end - start
