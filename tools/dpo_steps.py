"""DPO steps timed by phase: load, reference forward, policy, optimizer."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from bench_cases import SEED
from one_model import accumulate_gradients, response_outputs

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.layout.flops import flops_per_token
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.batches import DataBatches
from puzzle_align.runtime.context import Context, build_context, freeze, make_trainable
from puzzle_align.runtime.groups.collectives import barrier
from puzzle_align.runtime.groups.world import World, build_communicators
from puzzle_align.runtime.moments import now
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.row_input import RowInput
from puzzle_align.stages.preference.objective import ExampleOutputs, dpo_losses
from puzzle_align.telemetry.throughput import peak_memory

PHASES = ("data", "reference", "policy", "optimizer")
PASSES = {"step": 4, "policy": 3, "reference": 1}  # forwards of equal FLOPs


@dataclass(frozen=True)
class Step:
    """One measured step of one variant."""

    phases: dict[str, float]  # seconds
    num_pairs: int
    num_tokens: int
    num_row_tokens: int
    num_rows: int  # of this rank
    peak_memory: int

    @property
    def seconds(self) -> float:
        """Time of the whole step."""
        return sum(self.phases.values())


class Stack(Protocol):
    """Policy, reference and optimizer on a device, with the phases of a DPO step."""

    @property
    def spec(self) -> ModelSpec:
        """Shape of both models."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of this process's part of them."""
        ...

    def now(self) -> float:
        """Seconds, after the device's queued work is done."""
        ...

    def reference_outputs(
        self, rows: Sequence[RowInput], num_examples: int, num_responses: int
    ) -> torch.Tensor:
        """Compute the reference's log-probabilities of all responses [B, K]."""
        ...

    def train(self, rows: Sequence[RowInput], reference: torch.Tensor) -> None:
        """Compute the policy's gradients of the mean loss over all pairs, anew."""
        ...

    def update(self) -> None:
        """Step the optimizer."""
        ...


@dataclass(frozen=True)
class Bench:
    """Models, optimizer and clock, shared by all variants."""

    policy: Context
    reference: Context
    optimizer: Optimizer
    options: ModelOptions  # of the policy
    clock: str  # wall | cpu

    @property
    def spec(self) -> ModelSpec:
        """Shape of both models."""
        return self.policy.spec

    @property
    def device(self) -> torch.device:
        """Device of this rank's part of them."""
        return self.policy.device

    def now(self) -> float:
        """Seconds, after the device's queued work is done."""
        wall = now(self.device)  # which waits
        return wall if self.clock == "wall" else time.process_time()

    def reference_outputs(
        self, rows: Sequence[RowInput], num_examples: int, num_responses: int
    ) -> torch.Tensor:
        """Compute the reference's log-probabilities of all responses [B, K]. Collective."""
        return response_outputs(self.reference, rows, num_examples, num_responses)

    def train(self, rows: Sequence[RowInput], reference: torch.Tensor) -> None:
        """Compute the policy's gradients of the mean loss over all pairs, anew. Collective."""
        self.optimizer.zero_grad()
        accumulate_dpo(self.policy, rows, reference)
        self.optimizer.reduce_gradients()

    def update(self) -> None:
        """Step the optimizer. Collective."""
        updated, _ = self.optimizer.step(self.optimizer.config.lr)
        assert updated, "gradients of a fresh model are finite"


def make_bench(
    spec: ModelSpec,
    options: ModelOptions,
    plan: ParallelPlan,
    world: World,
    *,
    optimizer: OptimizerConfig | None = None,
    clock: str = "wall",
) -> Bench:
    """Policy, reference of the same weights, and optimizer. Collective."""
    without_fp8 = replace(options, fp8=None)  # as in training by default
    reference = random_model("reference", spec, without_fp8, plan, world, trained=False)
    freeze(reference)
    policy = random_model("actor", spec, options, plan, world, trained=True)
    config = optimizer or OptimizerConfig()
    make_trainable(policy, config)
    return Bench(policy, reference, Optimizer(policy, config), options, clock)


def random_model(
    role: str,
    spec: ModelSpec,
    options: ModelOptions,
    plan: ParallelPlan,
    world: World,
    *,
    trained: bool,
) -> Context:
    """A model with random weights, drawn on its device: billions of them in a second."""
    return build_context(
        role,
        spec,
        options,
        plan,
        world,
        communicators=build_communicators(plan, world, trained=trained),
        fill=partial(draw_weights, spread=spec.initializer_range),
    )


@torch.no_grad()
def draw_weights(model: torch.nn.Module, spread: float) -> None:
    """Draw random weights on the model's device; norms' are 1."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, spread, generator=generator)
        else:
            parameter.fill_(1.0)


def run_step(stack: Stack, steps: DataBatches, step: int) -> Step:
    """Run one training step, timed by phase, and prepare the next one's rows as in training.

    Collective.
    """
    _reset_peak(stack.device)
    barrier()
    times = [stack.now()]
    batch, rows = steps.batch(step), steps.rows(step)
    times.append(stack.now())
    table = stack.reference_outputs(rows, batch.num_examples, steps.dataset.num_responses)
    times.append(stack.now())
    stack.train(rows, table)
    steps.prepare(step + 1)
    times.append(stack.now())
    stack.update()
    barrier()
    times.append(stack.now())
    return Step(
        phases={
            phase: end - start for phase, (start, end) in zip(PHASES, pairwise(times), strict=True)
        },
        num_pairs=steps.dataset.num_comparisons(batch.example_indices),
        num_tokens=batch.num_tokens,
        num_row_tokens=batch.num_row_tokens,
        num_rows=len(batch.microbatches),
        peak_memory=peak_memory(stack.device),
    )


def accumulate_dpo(context: Context, rows: Sequence[RowInput], reference: torch.Tensor) -> None:
    """Add the gradients of the rows' shares of the DPO loss to the context's buffers.

    It is a sum over an example's pairs, and a mean over examples.
    """

    def loss(row: RowInput, log_probs: torch.Tensor) -> torch.Tensor:
        table = reference[row.examples]
        pairs = ExampleOutputs(
            log_probs,
            table,
            row.lengths,
            row.labels,
            mean_nll_length=1.0,
            comparisons=row.comparisons,
        )
        losses, _ = dpo_losses(DPOConfig(), pairs)  # the preference stage's
        return losses.sum() / reference.size(0)

    accumulate_gradients(context, rows, loss)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory


def summarize(steps: Sequence[Step], spec: ModelSpec, num_devices: int) -> dict[str, Any]:
    """Figures of a variant."""
    flops = flops_per_token(spec) / num_devices / 1e12
    row_tokens = sum(step.num_row_tokens for step in steps)

    def rates(work: str, factor: float = 1.0, phase: str = "step") -> list[float]:
        return [
            factor * getattr(step, work) / (step.seconds if phase == "step" else step.phases[phase])
            for step in steps
        ]

    pairs = rates("num_pairs")
    tflops = {name: rates("num_tokens", n * flops, name) for name, n in PASSES.items()}
    return {
        "steps": len(steps),
        "pairs_per_second": statistics.median(pairs),
        "used_tokens_per_second": statistics.median(rates("num_tokens")),
        "row_tokens_per_second": statistics.median(rates("num_row_tokens")),
        "linear_tflops": {  # of used tokens: work on padding is none
            name: statistics.median(values) for name, values in tflops.items()
        },
        "extremes": {  # minimum and maximum over the steps
            "pairs_per_second": [min(pairs), max(pairs)],
            "linear_tflops": [min(tflops["step"]), max(tflops["step"])],
        },
        "fill": sum(step.num_tokens for step in steps) / row_tokens,
        "mean_row_tokens_per_step": row_tokens / len(steps),
        "mean_microbatches_per_step": statistics.mean(step.num_rows for step in steps),
        "peak_memory": max(step.peak_memory for step in steps),
        "step_seconds": statistics.median(step.seconds for step in steps),
        "phase_seconds": {
            phase: statistics.median(step.phases[phase] for step in steps) for phase in PHASES
        },
        "all_step_seconds": [step.seconds for step in steps],
    }


def ratios(measured: dict[str, list[Step]]) -> dict[str, float]:
    """Pairs a second of one variant over another's, for every two."""
    return {
        f"{a}/{b}": statistics.median(
            late.seconds / early.seconds
            for early, late in zip(measured[a], measured[b], strict=True)
        )
        for a, b in combinations(measured, 2)
    }
