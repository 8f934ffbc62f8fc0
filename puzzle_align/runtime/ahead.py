"""Inputs of coming steps, prepared by a thread while the main thread waits for the device.

Threads share the interpreter, so a thread's work delays the launch of kernels. A step therefore
starts this work after launching its passes: the host then waits for gradients, longer than the
work takes.

Invariants (the tests assert them):
- a value is the same whether it is made ahead or not, and is made once while it is kept;
- an error of ``make`` is raised only where its value is requested;
- values on a device are ready for kernels launched after ``of``: the thread uses the stream that
  was current at the request.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NUM_KEPT = 3  # for a step, the next, and the one in preparation

# The thread starts at the first ``prepare``, and an ending process waits for its work. A process
# forked after that lacks the thread, and would wait forever.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")


class Ahead(Generic[K, V]):
    """Values by key; the ``NUM_KEPT`` last requested are kept.

    ``make`` must not request values: the thread would wait for itself.
    """

    def __init__(self, make: Callable[[K], V], device: torch.device) -> None:
        self._make = make
        self._device = device
        self._made: OrderedDict[K, Future[V]] = OrderedDict()

    def prepare(self, key: K) -> None:
        """Start making a value, if it is not kept, without waiting."""
        if key not in self._made:
            on_cuda = self._device.type == "cuda"
            stream = torch.cuda.current_stream(self._device) if on_cuda else None
            self._made[key] = _thread.submit(_make, self._make, key, stream)
        self._made.move_to_end(key)
        while len(self._made) > NUM_KEPT:
            self._made.popitem(last=False)

    def of(self, key: K) -> V:
        """Return the value; the same object each time while it is kept."""
        self.prepare(key)
        return self._made[key].result()


def _make(make: Callable[[K], V], key: K, stream: torch.cuda.Stream | None) -> V:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        return make(key)
