"""Memory of a DPO step by part: what the estimate says, and what the device holds."""

import gc
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from dpo_steps import Bench, random_model
from report_process import Found
from report_setting import PLAN, Setting, world

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, OptimizerStates, Phase
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.planning.job_memory import MemoryInputs, estimate_memory
from puzzle_align.planning.memory import chunk_activation_bytes
from puzzle_align.runtime.context import freeze, make_trainable
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.optimizer.state import allocate_state

_PARTS = ("reference weights", "actor weights", "actor gradients", "actor optimizer")
_SHARE = 0.94  # of the device's memory: the rest is CUDA's own, and gaps


@dataclass(frozen=True)
class Weighed:
    """Bytes by part, estimated and held."""

    estimated: dict[str, int]
    held: dict[str, int]
    device: torch.device

    def with_peak(self, peak: int) -> Found:
        """Both, with the activations and workspace that the steps' peak leaves over the rest.

        The peak is CUDA's: on a CPU, resident memory holds much else.
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
    kept = chunk_activation_bytes(spec, PLAN, options, 0, setting.tokens)
    actor, nobody = frozenset({"actor"}), frozenset[str]()
    states = OptimizerStates(
        sharded=actor if optimizer.use_distributed_optimizer else nobody,
        small=actor if optimizer.state_dtype == "bf16" else nobody,
        on_host=actor if optimizer.cpu_offload else nobody,
    )
    inputs = MemoryInputs(
        row_tokens=setting.tokens,
        runs={},
        peaks={"train": {"actor": (kept,)}},
        optimizers=states,
    )
    (parts,) = estimate_memory(JobPlan(stage="dpo", world_size=1, phases=(phase,)), inputs).values()
    return parts


def layers_that_fit(setting: Setting, options: ModelOptions, optimizer: OptimizerConfig) -> int:
    """The most layers of the model that the estimate lets this device hold."""
    most = setting.spec.num_hidden_layers
    if setting.device != "cuda":
        return most
    room = _SHARE * torch.cuda.get_device_properties(0).total_memory
    fitting = (
        layers
        for layers in range(most, 0, -1)
        if estimate(setting, setting.model(layers), options, optimizer)["total"] <= room
    )
    return next(fitting, 1)


def open_and_weigh(
    setting: Setting, spec: ModelSpec, options: ModelOptions, optimizer: OptimizerConfig
) -> tuple[Bench, Weighed]:
    """Policy, reference and optimizer, and what each part of them holds."""
    here = world(setting.device)
    make = partial(random_model, spec=spec, plan=PLAN, world=here)
    marks = [_allocated(here.device)]
    reference = make("reference", options=replace(options, fp8=None), trained=False)
    freeze(reference)
    marks.append(_allocated(here.device))
    policy = make("actor", options=options, trained=True)
    marks.append(_allocated(here.device))
    make_trainable(policy, optimizer)
    marks.append(_allocated(here.device))
    own = Optimizer(policy, optimizer)
    allocate_state(own.megatron)
    marks.append(_allocated(here.device))
    held = {name: b - a for name, (a, b) in zip(_PARTS, pairwise(marks), strict=True)}
    weighed = Weighed(estimate(setting, spec, options, optimizer), held, here.device)
    return Bench(policy, reference, own, options, "wall"), weighed


def _allocated(device: torch.device) -> int:
    """Bytes of all tensors on the device."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    tensors = (found for found in gc.get_objects() if isinstance(found, torch.Tensor))
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
