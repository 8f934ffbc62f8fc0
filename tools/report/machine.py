"""Parts of a GPU report: packages, ceilings, layers alone, kernels, host waits."""

import os
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
from dpo_steps import PASSES, accumulate_dpo, random_model, run_step
from one_model import response_outputs
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.flops import flops_per_token
from puzzle_align.layout.rules import Box
from puzzle_align.layout.weights import tensor_shapes
from puzzle_align.models.layers import rotary_angles
from puzzle_align.models.shards import Shards
from puzzle_align.runtime.context import make_trainable
from puzzle_align.runtime.row_input import to_device
from puzzle_align.telemetry.waits import WaitCounter
from report.process import Results, Save, free_device
from report.setting import (
    HH,
    PLAN,
    Setting,
    first_microbatch,
    open_bench,
    open_dataset,
    options_of,
    pairs_of_a_step,
    reason_of,
    row_of,
    rows_of,
    timed,
    world,
)

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
    "apex",
    "flash-attn",
    "flash-attn-4",
    "transformers",
)
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "NCCL_GRAPH_REGISTER",
)
_LAYERS = {
    "te": {"transformer_impl": "te"},
    "te fp8": {"transformer_impl": "te", "fp8": "hybrid"},
    "local": {"transformer_impl": "local"},
}
REPEATS = 5
_NUM_KERNELS = 25


def environment(setting: Setting, save: Save) -> None:
    """Report device, driver and packages."""
    results: Results = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "processors": os.cpu_count(),
    }
    if setting.device == "cuda":
        here = torch.cuda.get_device_properties(0)
        results["device"] = {
            "name": here.name,
            "capability": f"{here.major}.{here.minor}",
            "memory": here.total_memory,
            "processors": here.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    save(results)
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"]
        asked = [*query, "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=15)
        save({"nvidia_smi": done.stdout.strip()})


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ceilings(setting: Setting, save: Save) -> None:
    """Time a plain bf16 product, which no step can beat, and copies of memory."""
    size, device = setting.matrix, setting.device
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).bfloat16() for _ in range(2)
    )
    seconds = timed(lambda: torch.mm(left, right), device, 10)
    save({"bf16_tflops": 2 * size**3 / seconds / 1e12})
    source = torch.zeros(size * size * 4, device=device)
    target = torch.empty_like(source)
    seconds = timed(partial(target.copy_, source), device, 10)
    save({"copy_gb_per_second": 2 * source.nbytes / seconds / 1e9})
    host = torch.empty_like(source, device="cpu", pin_memory=device == "cuda")
    rates = {}
    for name, (into, of) in {"to host": (host, source), "to device": (target, host)}.items():
        seconds = timed(partial(into.copy_, of, non_blocking=True), device, 10)
        rates[name] = source.nbytes / seconds / 1e9
    save({"offload_gb_per_second": rates})
    save({"reshard_gb_per_second": _packing_rates(setting)})


def _packing_rates(setting: Setting) -> dict[str, float]:
    """Bytes a second of a few layers' weights as a switch of plans packs and unpacks them.

    Nothing is sent: one device has nobody to send to. A switch sends large contiguous boxes without
    packing; here every tensor is packed.
    """
    spec, options = setting.model(), options_of(setting)
    context = random_model("actor", spec, options, PLAN, world(setting.device), trained=False)
    shards = Shards(context.chunks, spec)
    buckets = {
        name: torch.empty(shape, dtype=context.dtype, device=context.device)
        for name, shape in tensor_shapes(spec).items()
    }

    def move(one: Callable[[str, Box, torch.Tensor], None]) -> None:
        for name, bucket in buckets.items():
            one(name, tuple((0, size) for size in bucket.shape), bucket)

    size = sum(bucket.nbytes for bucket in buckets.values()) / 1e9
    ways = {"packing": shards.read, "unpacking": shards.write}
    return {
        name: size / timed(partial(move, way), setting.device, REPEATS)
        for name, way in ways.items()
    }


def layers(setting: Setting, save: Save) -> None:
    """Time forward and backward of a few layers, without embedding, head and optimizer."""
    results: Results = {}
    for name, engine in _LAYERS.items():
        try:
            results[name] = _layers(setting, engine)
        except Exception as error:  # noqa: BLE001 - see reason_of
            results[name] = {"error": reason_of(error)}
        save({"layers": setting.few_layers, "tokens": setting.tokens, "variants": results})


def _layers(setting: Setting, engine: dict[str, Any]) -> Results:
    free_device()
    spec, options = setting.model(), options_of(setting, **engine)
    context = random_model("actor", spec, options, PLAN, world(setting.device), trained=True)
    make_trainable(context, OptimizerConfig())
    (chunk,) = context.chunks
    microbatch, _ = first_microbatch(setting, HH)
    row = to_device(microbatch, options.attention, context.device)
    chunk.row_state.current = row.attention
    hidden = torch.randn(
        context.activation_shape(setting.tokens), dtype=context.dtype, device=context.device
    ).requires_grad_()
    angles = rotary_angles(row.position_ids, chunk.inverse_frequencies)

    def work() -> None:
        output = chunk.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
        output.backward(hidden.detach())

    seconds = timed(work, setting.device, REPEATS)
    used = sum(each.end - each.start for each in microbatch.layout.segments)
    return {
        "seconds": seconds,
        "linear_tflops": PASSES["policy"] * flops_per_token(spec) * used / seconds / 1e12,
        "fill": used / setting.tokens,
        "attention": options.attention,
    }


def kernels(setting: Setting, save: Save) -> None:
    """Time one microbatch of the policy, kernel by kernel."""
    bench = open_bench(setting, setting.model())
    device = bench.policy.device
    row, pairs = row_of(setting, HH, bench.options.attention)
    table = response_outputs(bench.reference, [row], pairs, 2)

    def work() -> None:
        accumulate_dpo(bench.policy, [row], table)

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
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] += microseconds / 1e6
        calls[event.key] += event.count
    top = times.most_common(_NUM_KERNELS)
    save(
        {
            "attention": bench.options.attention,
            "seconds_with_profiler": seconds,
            "seconds_in_kernels": times.total(),
            "kernels": [{"name": n[:120], "seconds": t, "calls": calls[n]} for n, t in top],
        }
    )


def host(setting: Setting, save: Save) -> None:
    """Count the host's waits and compilations over varied batches; time its share of a step."""
    setting = replace(setting, rows=1)
    num_steps = setting.warmup + setting.varied_batches
    bench, pairs = open_bench(setting, setting.model()), pairs_of_a_step(setting, HH)
    dataset = open_dataset(setting, HH, num_steps + 1, pairs)
    rows = rows_of(setting, dataset, "shared", pairs, bench.options.attention)
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
            "attention": bench.options.attention,
            "batches": len(steps),
            "rows": sum(step.num_rows for step in steps),
            "host_waits": counts["host_waits"],
            "compilations": counts["compilations"],
            "places": sorted(counter.places),
            "share_of_data": sum(step.phases["data"] for step in steps) / seconds,
        }
    )
