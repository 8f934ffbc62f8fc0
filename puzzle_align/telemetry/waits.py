"""Count the host's waits for its CUDA device in a step, and compilations."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WAITS = "called a synchronizing CUDA operation"  # torch's own words

_logger = logging.getLogger(__name__)


class WaitCounter:
    """Counts waits and compilations of each step; logs every Python line that waits once.

    Counts the waits that torch reports, in any caller: copies to and from unpinned memory, and
    values read by the host; not ``torch.cuda.synchronize``, nor waits inside NCCL or a library.
    Compilations are Dynamo's graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.places: set[str] = set()  # FILE:LINE of all waits so far
        self._shown: set[tuple[type[Warning], str, str, int]] = set()

    @contextmanager
    def counting(self) -> Iterator[dict[str, float]]:
        """Count the block's ``host_waits`` (on CUDA) and ``compilations``; filled in at its end."""
        counts: dict[str, float] = {}
        graphs = _num_graphs()
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=_WAITS)
            if self._on_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield counts
            finally:
                if self._on_cuda:
                    torch.cuda.set_sync_debug_mode("default")
        places: list[str] = []
        for one in caught:
            if str(one.message).startswith(_WAITS):
                places.append(f"{one.filename}:{one.lineno}")
            else:
                self._show(one)
        for place in sorted({*places} - self.places):
            _logger.info("the host waits for the device at %s", place)
        self.places |= {*places}
        if self._on_cuda:
            counts["host_waits"] = float(len(places))
        counts["compilations"] = float(_num_graphs() - graphs)

    def _show(self, one: warnings.WarningMessage) -> None:
        """Show another warning once: Python forgets which it has shown with each block."""
        key = one.category, str(one.message), one.filename, one.lineno
        if key not in self._shown:
            self._shown.add(key)
            warnings.showwarning(one.message, one.category, one.filename, one.lineno)


def _num_graphs() -> int:
    """Graphs that Dynamo has compiled in this process; importing it takes seconds."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
