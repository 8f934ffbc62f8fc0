"""When a chunk's passes enter and leave its layers: hooks at the ends of embedding and layers.

What the layers take is thus measured where it happens, in whole passes as jobs run them. As a
difference between models of few and of many layers it would carry the noise of both, and what is
left for the ends would carry it several times.
"""

from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from puzzle_align.models.build import ModelChunk
from puzzle_align.runtime.profiler.timing import Moment, between, moment


class Stamps:
    """The moments of every pass of a whole model within a ``with`` block, in order."""

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
        """Note that the device gets here."""
        self._moments.setdefault(name, []).append(moment(self._device))

    def mark_backward(self, name: str, tensor: torch.Tensor) -> None:
        """Note when a tensor's gradient is there, if it is to have one."""
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
