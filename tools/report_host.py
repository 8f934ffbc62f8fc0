"""Parts of a GPU report on what the time of a step goes to: kernels, waits, compilations."""

from collections import Counter
from dataclasses import replace
from functools import partial

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
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from puzzle_align.runtime.passes import accumulate_gradients, response_outputs
from puzzle_align.telemetry.waits import WaitCounter

_DATA = "hh_rlhf"
_NUM_KERNELS = 25


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
        if on_gpu and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue  # an operation has its kernels' time too
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
    setting = replace(setting, rows=1)
    num_steps = setting.warmup + setting.varied_batches
    bench, pairs = open_bench(setting, setting.model()), pairs_of_a_step(setting, _DATA)
    dataset = open_dataset(setting, _DATA, num_steps + 1, pairs)
    rows = rows_of(setting, dataset, "shared", pairs, bench.policy, bench.options.attention)
    for step in range(setting.warmup):
        run_step(bench, rows, step)
    counter, steps = WaitCounter(bench.policy.device), []
    counts = Counter[str]()
    for step in range(setting.warmup, num_steps):
        with counter.counting() as counted:
            steps.append(run_step(bench, rows, step))
        counts.update(counted)
    seconds = sum(step.seconds for step in steps)
    save(
        {
            "batches": len(steps),
            "rows": sum(step.num_rows for step in steps),
            "host_waits": counts["host_waits"],
            "compilations": counts["compilations"],
            "places": sorted(counter.places),
            "share_of_data": sum(step.phases["data"] for step in steps) / seconds,
        }
    )
