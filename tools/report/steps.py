"""Parts of a GPU report on DPO steps: layouts, backends, switches; time and memory of a model."""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from dpo_steps import Bench, random_model

from puzzle_align.config.sections.engine import FUSIONS
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, OptimizerStates, Phase, Settings
from puzzle_align.layout.model import AttentionBackend, ModelOptions, ModelSpec, Recompute
from puzzle_align.planning.costs.flops import flop_costs
from puzzle_align.planning.memory.job import MemoryInputs, estimate_memory
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.runtime.context import freeze, make_trainable
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.optimizer.state import allocate_state
from puzzle_align.runtime.profiler.attention import AttentionCase, fastest_attention
from report.compare import LAYOUTS, check_rows, compare, compare_all
from report.other_stacks import bare_steps, trl_steps
from report.process import Results, Save, free_device
from report.setting import (
    FULL,
    HH,
    PLAN,
    Setting,
    backends,
    fast_backends,
    first_microbatch,
    open_bench,
    options_of,
    reason_of,
    world,
)

_PARTS = ("reference weights", "actor weights", "actor gradients", "actor optimizer")
_SHARE = 0.94  # of the device's memory: the rest is CUDA's own, and gaps


@dataclass(frozen=True)
class Change:
    """Settings that differ from the defaults, measured alone."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    optimizer: OptimizerConfig | None = None


# So that a 7B policy with its reference fits one device.
SMALL = OptimizerConfig(use_distributed_optimizer=True, state_dtype="bf16")
SWITCHES = {
    "defaults": Change(),
    **{f"without {name}": Change({name: False}) for name in FUSIONS},
    "fp8": Change({"fp8": "hybrid"}),
    "Megatron's local layers": Change({"transformer_impl": "local"}),
    "recompute selective": Change(recompute="selective"),
    "recompute full": Change(recompute="full"),
    "logits of 4096 predictions at once": Change({"logprob_chunk_size": 4096}),
    "optimizer state in bf16": Change(optimizer=SMALL),
    "optimizer state on the host": Change(optimizer=replace(SMALL, cpu_offload=True)),
}


def layouts(setting: Setting, save: Save) -> None:
    """Time every backend and layout on the lengths of every data set, on a few layers.

    A dry run also checks the rows of a full report.
    """
    if setting.device == "cpu":
        check_rows(FULL)
    _, missing = backends(setting)
    names = fast_backends(setting)
    save({"layers": setting.few_layers, "missing": missing})
    bench = open_bench(setting, setting.model(), optimizer=SMALL)
    results: Results = {}
    for data, compared in compare_all(setting, bench, setting.layout_data, names):
        results[data] = compared
        save({"data": results})


def whole_model(setting: Setting, save: Save) -> None:
    """Measure a step of the whole model, and its memory by part; then bare PyTorch's and TRL's."""
    pairs, way = _whole(setting, save, {}, setting.whole_data)
    # Ours is gone by now: two policies of 7B parameters with their references do not fit at once.
    setting = replace(setting, tokens=way.tokens)
    for results in bare_steps(setting, way.recompute):
        save({"bare": results})
    save({"trl": trl_steps(setting, setting.whole_data[0], pairs)})


def whole_model_fp8(setting: Setting, save: Save) -> None:
    """Measure the same with the policy's layers in FP8; on a CPU, without FP8."""
    engine = {"fp8": "hybrid"} if setting.device == "cuda" else {}
    _whole(setting, save, engine, setting.whole_data[:1])


def _whole(
    setting: Setting, save: Save, engine: Mapping[str, Any], data: Sequence[str]
) -> "tuple[int, Way]":
    """Measure steps of the way in which the whole model fits; return pairs of a step, and it."""
    options, room = options_of(setting, **engine), math.inf
    if setting.device == "cuda":
        room = _SHARE * torch.cuda.get_device_properties(0).total_memory
    way = first_that_fits(setting, options, room)
    setting = replace(setting, tokens=way.tokens)
    options = replace(options, recompute=way.recompute)
    save(
        {
            "layers": setting.spec.num_hidden_layers,
            "tokens": way.tokens,
            "recompute": way.recompute,
            "optimizer_on_host": way.optimizer.cpu_offload,
        }
    )
    free_device()
    bench, memory = open_and_weigh(setting, setting.spec, options, way.optimizer)
    fastest = _fastest(setting, bench)
    save({"attention": fastest})
    results, peak = {}, 0
    for name, compared in compare_all(setting, bench, data, [fastest]):
        results[name] = compared
        peaks = (variant["peak_memory"] for variant in compared["variants"].values())
        peak = max(peak, *peaks, 0)
        save({"data": results, "memory": memory.with_peak(peak)})
    return results[data[0]]["pairs_per_step"], way


def _fastest(setting: Setting, bench: Bench) -> AttentionBackend:
    """The backend that ``engine.attention=auto`` takes for these rows."""
    row, _ = first_microbatch(setting, HH)
    spec = bench.policy.spec
    case = AttentionCase(
        layout=row.layout,
        num_heads=spec.num_attention_heads,
        num_groups=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        dtype=bench.policy.dtype,
    )
    return fastest_attention(case, fast_backends(setting), world(setting.device))


def switches(setting: Setting, save: Save) -> None:
    """Measure steps and their peak memory with each switch alone."""
    results: Results = {}
    setting = replace(setting, rows=1)
    for name, change in SWITCHES.items():
        try:
            results[name] = _with(setting, change)
        except Exception as error:  # noqa: BLE001 - see reason_of
            results[name] = {"error": reason_of(error)}
        save({"layers": setting.few_layers, "switches": results})


def _with(setting: Setting, change: Change) -> Results:
    bench = open_bench(
        setting,
        setting.model(),
        engine=change.engine,
        recompute=change.recompute,
        optimizer=change.optimizer,
    )
    attention = bench.options.attention
    compared = compare(setting, bench, HH, [attention], LAYOUTS[:1])
    for reason in compared["failed"].values():
        raise RuntimeError(reason)
    return compared["variants"][f"shared+{attention}"] | {"attention": attention}


@dataclass(frozen=True)
class Weighed:
    """Bytes by part, estimated and held."""

    estimated: dict[str, int]
    held: dict[str, int]
    device: torch.device

    def with_peak(self, peak: int) -> Results:
        """Estimated and held bytes, with activations and workspace: the peak less all else.

        Only on CUDA: on a CPU, resident memory holds much else.
        """
        held = dict(self.held)
        if self.device.type == "cuda":
            held["total"] = peak
            held["train"] = held["total"] - sum(self.held.values())
        ratios = {name: held[name] / self.estimated[name] for name in held}
        return {"estimated": self.estimated, "held": held, "held/estimated": ratios}


def estimate(
    setting: Setting, spec: ModelSpec, options: ModelOptions, optimizer: OptimizerConfig
) -> dict[str, int]:
    """Bytes of a policy with its reference on one device, by part."""
    common: dict[str, Any] = {"model": spec, "plan": PLAN, "ranks": (0,)}
    plain = replace(options, fp8=None)
    contexts = (
        ContextPlan(role="reference", workload="infer", options=plain, **common),
        ContextPlan(role="actor", workload="train", options=options, **common),
    )
    phase = Phase(name="train", order="sequential", contexts=contexts)
    actor: tuple[str, ...] = ("actor",)
    nobody: tuple[str, ...] = ()
    states = OptimizerStates(
        sharded=actor if optimizer.use_distributed_optimizer else nobody,
        small=actor if optimizer.state_dtype == "bf16" else nobody,
        on_host=actor if optimizer.cpu_offload else nobody,
    )
    run = PredictedRun(
        phase=phase,
        num_microbatches={"actor": lambda _: 1, "reference": lambda _: 1},
        costs={
            c.role: flop_costs(
                spec, PLAN, c.options, row_tokens=setting.tokens, train=c.workload == "train"
            )
            for c in contexts
        },
    )
    settings = Settings(row_tokens=setting.tokens, optimizers=states)
    inputs = MemoryInputs(settings=settings, runs={"train": run})
    (parts,) = estimate_memory(JobPlan(stage="dpo", world_size=1, phases=(phase,)), inputs).values()
    return parts


@dataclass(frozen=True)
class Way:
    """A way to fit the whole model: recompute, tokens of a row, optimizer."""

    recompute: Recompute
    tokens: int
    optimizer: OptimizerConfig


def ways_to_fit(setting: Setting) -> tuple[Way, ...]:
    """Ways in the order of preference: what costs most time comes last."""
    return (
        Way("none", setting.tokens, SMALL),
        Way("none", setting.tokens // 2, SMALL),
        Way("full", setting.tokens, SMALL),
        Way("full", setting.tokens, replace(SMALL, cpu_offload=True)),
    )


def first_that_fits(setting: Setting, options: ModelOptions, room: float) -> Way:
    """The first way whose estimate is at most ``room`` bytes. RuntimeError if there is none."""
    for way in ways_to_fit(setting):
        shorter = replace(setting, tokens=way.tokens)
        changed = replace(options, recompute=way.recompute)
        needed = estimate(shorter, setting.spec, changed, way.optimizer)["total"]
        if needed <= room:
            return way
    raise RuntimeError(
        f"the whole model needs {needed / 1e9:.0f} GB, and {room / 1e9:.0f} are there"
    )


def open_and_weigh(
    setting: Setting, spec: ModelSpec, options: ModelOptions, optimizer: OptimizerConfig
) -> tuple[Bench, Weighed]:
    """Policy, reference and optimizer, and the memory of each part."""
    here = world(setting.device)
    make = partial(random_model, spec=spec, plan=PLAN, world=here)
    # A process's first model also makes the states of random numbers, which later ones share.
    make("reference", options=options, spec=replace(spec, num_hidden_layers=1), trained=False)
    free_device()
    marks = [_allocated(here.device)]
    reference = make("reference", options=replace(options, fp8=None), trained=False)
    freeze(reference)
    marks.append(_allocated(here.device))
    policy = make("actor", options=options, trained=True)
    marks.append(_allocated(here.device))
    make_trainable(policy, optimizer)
    marks.append(_allocated(here.device))
    stepper = Optimizer(policy, optimizer)
    allocate_state(stepper.megatron)
    marks.append(_allocated(here.device))
    held = {name: b - a for name, (a, b) in zip(_PARTS, pairwise(marks), strict=True)}
    weighed = Weighed(estimate(setting, spec, options, optimizer), held, here.device)
    return Bench(policy, reference, stepper, options, "wall"), weighed


def _allocated(device: torch.device) -> int:
    """Bytes of all tensors on the device."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    tensors = (item for item in gc.get_objects() if isinstance(item, torch.Tensor))
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
