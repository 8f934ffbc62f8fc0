"""Measure times on a device: of calls, of repeated measurements, and of the parts of a pass.

A measurement warms up, and is repeated more often if it is short. Layers are measured in place, in
whole passes as in jobs, by hooks at the ends of embedding and layers. A difference between models
with few and many layers would have the noise of both, and the ends' time several times that noise.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from puzzle_align.models.chunk import ModelChunk

Samples = dict[str, list[float]]  # by name, a number for every repetition
Moment = float | torch.cuda.Event

_SHORT_S = 0.02
_MOST = 5  # factor of repetitions for short measurements


def now(device: torch.device) -> float:
    """Seconds on this rank's clock, after all launched work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Measure a call, with all work that it launches."""
    start = now(device)
    call()
    return now(device) - start


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


def repeated(
    sample: Callable[[], Mapping[str, Sequence[float]]], repeats: int, *, adaptive: bool = True
) -> Samples:
    """Measure ``repeats`` times, or up to five times as often if a sample takes under 20 ms.

    Args:
        sample: makes one or several repetitions, equally many for every name.
        adaptive: false: exactly ``repeats`` times, for collective samples.
    """
    sample()  # warms up: compiles, allocates, fills the caches
    samples: Samples = {}
    number, start = 0, time.perf_counter()
    while number < repeats or (
        adaptive and number < _MOST * repeats and time.perf_counter() - start < _SHORT_S * repeats
    ):
        for name, values in sample().items():
            samples.setdefault(name, []).extend(values)
        number = max(map(len, samples.values()))
    return samples


class Stamps:
    """Records moments in every pass of a whole model within a ``with`` block."""

    def __init__(self, chunk: ModelChunk, device: torch.device) -> None:
        self._chunk = chunk
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._moments: dict[str, list[Moment]] = {}

    def __enter__(self) -> "Stamps":
        chunk: Any = self._chunk
        self._moments.clear()
        self._handles = [
            chunk.register_forward_pre_hook(lambda *_: self.mark("start")),
            chunk.embedding.register_forward_hook(lambda *_: self.mark("embedded")),
            chunk.decoder.register_forward_pre_hook(lambda *_: self.mark("layers")),
            chunk.decoder.final_layernorm.register_forward_pre_hook(self._after_layers),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def mark(self, name: str) -> None:
        """Mark the moment at which the device gets here."""
        self._moments.setdefault(name, []).append(moment(self._device))

    def mark_backward(self, name: str, tensor: torch.Tensor) -> None:
        """Mark when a tensor's gradient is computed, if it requires one."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: self.mark(name))

    def took(self, start: str, end: str) -> list[float]:
        """Seconds from one moment to another, pass by pass."""
        pairs = zip(self._moments[start], self._moments[end], strict=True)
        return [between(first, last) for first, last in pairs]

    def from_start_to_start(self) -> list[float]:
        """Seconds from the beginning of each forward to that of the next."""
        return [between(first, last) for first, last in pairwise(self._moments["start"])]

    def _after_layers(self, _module: object, args: tuple[torch.Tensor, ...]) -> None:
        self.mark("head")
        self.mark_backward("gradient enters layers", args[0])
