"""What coming steps need, made by one thread while this one waits for the device.

A thread takes turns with the others at Python itself: one that is started while kernels are being
launched holds these up by as long as it works. So steps start it when they have launched their
passes: the host then waits for gradients, for longer than any of this takes.

Invariants (the tests assert them):
- a value is the same whether it is made ahead or not, and is made once while it is kept;
- what ``make`` raises, it raises where its value is asked for, and nowhere else;
- values on a device are there for whatever is launched after ``of``: the thread works on the
  stream of the one that asked for them.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NUM_KEPT = 3  # of a step, the one after it, and the one that is being prepared

# It starts with the first thing to do; a process that ends waits for what it has begun. A process
# that is forked after the first ``prepare`` has no such thread, and would wait without end.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ahead")


class Ahead(Generic[K, V]):
    """Values by key, of which the last ``NUM_KEPT`` that were asked for are kept.

    ``make`` must not ask for values itself: the thread would wait for what it is to do next.
    """

    def __init__(self, make: Callable[[K], V], device: torch.device) -> None:
        self._make = make
        self._device = device
        self._made: OrderedDict[K, Future[V]] = OrderedDict()

    def prepare(self, key: K) -> None:
        """Have a value made, if it is not there; do not wait for it."""
        if key not in self._made:
            on_cuda = self._device.type == "cuda"
            stream = torch.cuda.current_stream(self._device) if on_cuda else None
            self._made[key] = _thread.submit(_make, self._make, key, stream)
        self._made.move_to_end(key)
        while len(self._made) > NUM_KEPT:
            self._made.popitem(last=False)

    def of(self, key: K) -> V:
        """The value; the same object each time while it is kept."""
        self.prepare(key)
        return self._made[key].result()


def _make(make: Callable[[K], V], key: K, stream: torch.cuda.Stream | None) -> V:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        return make(key)
