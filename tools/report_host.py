"""Parts of a GPU report on what the time of a step goes to: kernels, waits, compilations."""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from dpo_steps import dpo_loss, run_step
from report_process import Save
from report_setting import (
    Setting,
    open_bench,
    open_dataset,
    pairs_of_a_step,
    row_of,
    rows_of,
)
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from puzzle_align.runtime.passes import accumulate_gradients, response_outputs

_DATA = "hh_rlhf"
_NUM_KERNELS = 25
_WAITS = ("aten._local_scalar_dense", "aten.nonzero")  # what makes a host wait for its device


def kernels(setting: Setting, save: Save) -> None:
    """What one microbatch of the policy spends its time on, kernel by kernel."""
    bench = open_bench(setting, setting.model())
    device = bench.policy.device
    row, pairs = row_of(setting, _DATA, bench.policy, bench.options.attention)
    table = response_outputs(bench.reference, [row], pairs, 2)

    def work() -> None:
        accumulate_gradients(bench.policy, [row], partial(dpo_loss, reference=table))

    work()
    start = bench.now()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with profile(activities=activities) as profiled:
        work()
        seconds = bench.now() - start
    times = Counter[str]()
    calls = Counter[str]()
    for event in profiled.key_averages():
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] += own / 1e6
        calls[event.key] += event.count
    top = times.most_common(_NUM_KERNELS)
    save(
        {
            "seconds_with_profiler": seconds,
            "seconds_in_kernels": times.total(),
            "kernels": [{"name": n[:120], "seconds": t, "calls": calls[n]} for n, t in top],
        }
    )


def host(setting: Setting, save: Save) -> None:
    """What holds host or device up over varied batches: waits by place, compilations, host time."""
    num_steps = setting.warmup + setting.varied_batches
    bench, pairs = open_bench(setting, setting.model()), pairs_of_a_step(setting, _DATA)
    dataset = open_dataset(setting, _DATA, num_steps + 1, pairs)
    rows = rows_of(setting, dataset, "shared", pairs, bench.policy, bench.options.attention)
    for step in range(setting.warmup):
        run_step(bench, rows, step)
    graphs = _compiled_graphs()
    waits, steps = Counter[str](), []
    for step in range(setting.warmup, num_steps):
        with _counted_waits(setting.device, waits):
            steps.append(run_step(bench, rows, step))
    seconds = sum(step.seconds for step in steps)
    save(
        {
            "batches": len(steps),
            "rows": sum(step.num_rows for step in steps),
            "waits": dict(waits.most_common()),
            "graphs_compiled_after_warm_up": _compiled_graphs() - graphs,
            "share_of_data": sum(step.phases["data"] for step in steps) / seconds,
        }
    )


@contextmanager
def _counted_waits(device: str, counts: Counter[str]) -> Iterator[None]:
    """Count, by place, where the host waits for the device; on a CPU, where it would."""
    if device != "cuda":
        with _CountedReads(counts):
            yield
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    counts.update(
        f"{warning.filename}:{warning.lineno}"
        for warning in found
        if "synchronizing" in str(warning.message)
    )


class _CountedReads(TorchDispatchMode):
    """Counts the operations whose result the host reads."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func).startswith(_WAITS):
            self._counts[_place()] += 1
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """The innermost line of ours, or of Megatron's, that is at work."""
    for frame in reversed(traceback.extract_stack()):
        if "puzzle_align/" in frame.filename or "megatron/" in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return "elsewhere"


def _compiled_graphs() -> int:
    """Graphs that torch.compile has made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
