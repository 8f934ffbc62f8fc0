"""Measure times on a device: of calls, of repeated measurements, and of the parts of a pass.

A measurement warms up, and is repeated more often if it is short. Layers are measured in place, in
whole passes as in jobs, by hooks at the ends of embedding and layers. A difference between models
with few and many layers would have the noise of both, and the ends' time several times that noise.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from puzzle_align.runtime.moments import Moment, between, moment, now

if TYPE_CHECKING:
    from puzzle_align.runtime.context import Context

Samples = dict[str, list[float]]  # by name, a number for every repetition

_SHORT_S = 0.02
_MOST = 5  # factor of repetitions for short measurements


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Measure a call, with all work that it launches."""
    start = now(device)
    call()
    return now(device) - start


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
    """Moments in every pass of a whole model, marked within ``stamping``'s block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments: dict[str, list[Moment]] = {}

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


@contextmanager
def stamping(context: "Context") -> Iterator[Stamps]:
    """Mark the moments at the ends of a whole model's embedding and layers within the block."""
    stamps, (parts,) = Stamps(context.device), cast(list[Any], context.chunks)

    def after_layers(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        stamps.mark("head")
        stamps.mark_backward("gradient enters layers", args[0])

    handles = [
        parts.register_forward_pre_hook(lambda *_: stamps.mark("start")),
        parts.embedding.register_forward_hook(lambda *_: stamps.mark("embedded")),
        parts.decoder.register_forward_pre_hook(lambda *_: stamps.mark("layers")),
        parts.decoder.final_layernorm.register_forward_pre_hook(after_layers),
    ]
    try:
        yield stamps
    finally:
        for handle in handles:
            handle.remove()
