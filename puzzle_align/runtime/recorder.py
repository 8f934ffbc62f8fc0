"""Times of the compute actions in one execution, for measured timelines."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from puzzle_align.runtime.context import Context
from puzzle_align.schedules.actions import Action
from puzzle_align.schedules.timeline import Span


class Recorder:
    """Records times of actions on one rank, in seconds since the pipeline's common start.

    On CUDA they are events in the stream of the computation, which do not block the host. They are
    read when all work is done.
    """

    def __init__(self, context: Context) -> None:
        """Wait for the other ranks of the context's pipeline. Collective over them."""
        self._device = context.device
        self._taken: list[tuple[Action, float | torch.cuda.Event, float | torch.cuda.Event]] = []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.all_reduce(torch.zeros(1), group=context.groups.pp)
        self._start = self._now()

    @contextmanager
    def recording(self, action: Action) -> Iterator[None]:
        """Record the times of the block."""
        start = self._now()
        yield
        self._taken.append((action, start, self._now()))

    def spans(self) -> list[Span]:
        """Return all recorded spans, in order; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [
            Span(action, self._seconds(start), self._seconds(end))
            for action, start, end in self._taken
        ]

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, moment: float | torch.cuda.Event) -> float:
        """Seconds from the start to a moment."""
        if isinstance(moment, torch.cuda.Event):
            assert isinstance(self._start, torch.cuda.Event)
            return self._start.elapsed_time(moment) / 1000  # from milliseconds
        assert not isinstance(self._start, torch.cuda.Event)
        return moment - self._start
