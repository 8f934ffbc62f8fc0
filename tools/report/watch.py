"""A GPU's clock and power during a measurement, and the attention kernels that torch ran."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from report.process import Results

_FIELDS = {"sm_mhz": "clocks.sm", "watts": "power.draw"}  # by result: nvidia-smi's name
_EVERY_MS = 500
_SDPA = "aten::_scaled_dot_product_"


def gpu_query(device: str) -> list[str] | None:
    """A command that prints clock and power of this process's GPU until it is ended, if any."""
    if device != "cuda" or shutil.which("nvidia-smi") is None:
        return None
    here = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    asked = ["nvidia-smi", "-i", here, f"--query-gpu={','.join(_FIELDS.values())}"]
    return [*asked, "--format=csv,noheader,nounits", "-lms", str(_EVERY_MS)]


@contextmanager
def watched(query: Sequence[str] | None) -> Iterator[Results]:
    """Read a query's figures while the block runs; their spreads are there at its end."""
    spreads: Results = {}
    if query is None:
        yield spreads
        return
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(query, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield spreads
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            spreads |= _spreads(output)


def _spreads(lines: Iterable[str]) -> Results:
    """Minimum, median and maximum of every field; a line that is not all numbers is left out."""
    read: dict[str, list[float]] = {name: [] for name in _FIELDS}
    for line in lines:
        with suppress(ValueError):
            numbers = map(float, line.split(","))
            for name, number in tuple(zip(_FIELDS, numbers, strict=True)):
                read[name].append(number)
    return {name: spread(values) for name, values in read.items() if values}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"minimum": min(values), "median": median(values), "maximum": max(values)}


def sdpa_kernels(work: Callable[[], object]) -> list[str]:
    """Run ``work``; name torch's ``scaled_dot_product_attention`` kernels in its profile."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    names = {event.key for event in profiled.key_averages() if event.key.startswith(_SDPA)}
    return sorted(name.removeprefix(_SDPA) for name in names)
