"""Measures schedules on ranks, with models that compute or that sleep.

Sequential and time-shared steps take turns, so that a machine's drift meets them alike. A step
here is what a schedule is made of: forwards and backwards of all microbatches. Reduction of
gradients and optimizer are the same in all schedules and left out.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from bench_cases import SEED, random_pairs
from sleeping_model import sleeping_context
from timeshare_schedules import (
    NUM_SETTLING,
    POLICY,
    REFERENCE,
    lookahead_bound,
    lookahead_steps,
    sequential_step,
    step_times,
    two_trainings,
    two_trainings_bound,
)

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.preference import DPOConfig
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.hf_weights import RandomSource, load_weights
from puzzle_align.planning.costs import flop_costs
from puzzle_align.planning.simulate import simulate
from puzzle_align.runtime.context import Context, build_context, freeze, make_trainable
from puzzle_align.runtime.executor import ModelRun, execute
from puzzle_align.runtime.groups.collectives import barrier, sum_over_world
from puzzle_align.runtime.groups.communicators import build_communicators
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.lookahead import Lookahead
from puzzle_align.runtime.passes import accumulate_gradients, response_outputs
from puzzle_align.runtime.row_input import RowInput, to_device
from puzzle_align.schedules.actions import Action, Kind
from puzzle_align.schedules.costs import Costs, ModelCosts
from puzzle_align.schedules.timeline import Span
from puzzle_align.stages.preference.objective import ExampleOutputs, dpo_losses

OPTIONS = ModelOptions(attention="segments")


@dataclass(frozen=True)
class Sizes:
    """What is measured: M microbatches of one pair each, and how often."""

    num_microbatches: int
    prompt: int  # tokens
    response: int
    num_steps: int
    num_warmup: int

    @property
    def row_tokens(self) -> int:
        """A prompt and two responses."""
        return self.prompt + 2 * self.response

    @property
    def num_settling(self) -> int:
        """Steps with lookahead before those that are kept."""
        return max(self.num_warmup, NUM_SETTLING)


def measure_real_dpo(world: World, spec: ModelSpec, sizes: Sizes) -> dict[str, Any]:
    """DPO steps of real models on all ranks as one pipeline. Collective."""
    policy, reference = (_real_context(role, spec, world) for role in (POLICY, REFERENCE))
    freeze(reference)
    make_trainable(policy, OptimizerConfig())
    rows = make_rows(spec, sizes, world)
    ordered_for = {  # as training orders its steps
        role: flop_costs(
            spec, policy.plan, OPTIONS, row_tokens=sizes.row_tokens, train=role == POLICY
        )
        for role in (POLICY, REFERENCE)
    }
    measured, spans = _take_turns(policy, reference, rows, ordered_for, sizes, world)
    costs = measured_costs(spans, world)
    predicted = _predict_dpo(world.size, sizes, ordered_for, costs)
    return _compared(measured, predicted) | {"costs": {m: asdict(c) for m, c in costs.items()}}


def measure_sleeping_dpo(
    world: World, spec: ModelSpec, sizes: Sizes, costs: Costs
) -> dict[str, Any]:
    """DPO steps with emulated compute, all ranks one pipeline. Collective."""
    policy = sleeping_context(POLICY, spec, costs[POLICY], world)
    reference = sleeping_context(REFERENCE, spec, costs[REFERENCE], world)
    rows = make_rows(spec, sizes, world)
    measured, _ = _take_turns(policy, reference, rows, costs, sizes, world)
    predicted = _predict_dpo(world.size, sizes, costs, costs)
    bound = lookahead_bound(world.size, sizes.num_microbatches, costs)
    return _compared(measured, predicted) | {"bound": bound}


def measure_sleeping_trainings(
    world: World, spec: ModelSpec, sizes: Sizes, costs: Costs
) -> dict[str, Any]:
    """Two models' training with emulated compute, all ranks one pipeline. Collective."""
    contexts = {role: sleeping_context(role, spec, costs[role], world) for role in costs}
    rows = make_rows(spec, sizes, world)
    made = two_trainings(world.size, sizes.num_microbatches, costs)

    def take(lists: list[list[Action]]) -> None:
        runs = {
            role: ModelRun(context, rows, lambda _, log_probs: log_probs.sum(), train=True)
            for role, context in contexts.items()
        }
        execute(lists[world.rank], runs)

    measured: dict[str, list[float]] = {"sequential": [], "time_shared": []}
    for step in range(sizes.num_warmup + sizes.num_steps):
        times = _timed(lambda: take(made.sequential)), _timed(lambda: take(made.time_shared))
        _keep(measured, times, step, sizes.num_warmup, world)
    predicted = {
        "sequential": [simulate(made.sequential, costs).makespan],
        "time_shared": [simulate(made.time_shared, costs).makespan],
    }
    bound = two_trainings_bound(world.size, sizes.num_microbatches, costs)
    return _compared(measured, predicted) | {"bound": bound}


def make_rows(spec: ModelSpec, sizes: Sizes, world: World) -> list[RowInput]:
    """One pair a row, all of one length."""
    count, lengths = sizes.num_microbatches, (sizes.prompt, sizes.response)
    loader = ExampleLoader(
        random_pairs(1, count, lengths, 0.0, spec.vocab_size),
        global_batch_size=count,
        row_tokens=sizes.row_tokens,
        layout="shared",
        packed=True,
        scope="batch",
        seed=SEED,
        shuffle=False,
        data_rank=0,
        data_size=1,
    )
    rows = [to_device(m, "segments", world.device) for m in loader.batch(0).microbatches]
    assert len(rows) == count
    return rows


def measured_costs(spans: Sequence[Span], world: World) -> Costs:
    """Medians by rank, in seconds, the same on all ranks. Collective."""
    kinds = ((POLICY, Kind.FORWARD), (POLICY, Kind.BACKWARD), (REFERENCE, Kind.FORWARD))
    table = torch.zeros(len(kinds), world.size, dtype=torch.float64)
    for row, (model, kind) in enumerate(kinds):
        times = [
            span.end - span.start
            for span in spans
            if span.action.model == model and span.action.kind is kind
        ]
        table[row, world.rank] = statistics.median(times)
    forward, backward, reference = sum_over_world(table).tolist()
    policy = ModelCosts(tuple(forward), tuple(backward))
    return {POLICY: policy, REFERENCE: ModelCosts(tuple(reference))}


def _real_context(role: str, spec: ModelSpec, world: World) -> Context:
    plan = ParallelPlan(pipeline=world.size)
    return build_context(
        role,
        spec,
        OPTIONS,
        plan,
        world,
        communicators=build_communicators(plan, world, trained=role == POLICY),
        fill=lambda chunk: load_weights(chunk, spec, RandomSource(spec, SEED)),
        seed=SEED,
    )


def _take_turns(
    policy: Context,
    reference: Context,
    rows: Sequence[RowInput],
    costs: Costs,
    sizes: Sizes,
    world: World,
) -> tuple[dict[str, list[float]], list[Span]]:
    """Seconds of sequential and time-shared steps, and this rank's spans of the sequential ones."""
    lookahead = Lookahead(policy, reference, costs)
    measured: dict[str, list[float]] = {"sequential": [], "time_shared": []}
    kept: list[Span] = []
    for step in range(sizes.num_settling + sizes.num_steps):
        spans: list[Span] = []
        lists = lookahead.compose(len(rows), len(rows))
        times = (
            _timed(lambda spans=spans: _sequential_step(policy, reference, rows, spans)),
            _timed(lambda lists=lists: lookahead.accumulate_gradients(lists, rows, rows, _loss)),
        )
        _keep(measured, times, step, sizes.num_settling, world)
        kept += spans if step >= sizes.num_settling else []
    return measured, kept


def _sequential_step(
    policy: Context, reference: Context, rows: Sequence[RowInput], spans: list[Span]
) -> None:
    """The whole batch's reference, then the policy; when each action ran goes to ``spans``."""
    table = response_outputs(reference, rows, len(rows), 2, spans)
    accumulate_gradients(
        policy, rows, lambda row, log_probs: _loss(row, log_probs, table[row.examples]), spans
    )


def _loss(row: RowInput, log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    pairs = ExampleOutputs(log_probs, reference, row.lengths, row.labels, mean_nll_length=1.0)
    return dpo_losses(DPOConfig(), pairs)[0].sum()


def _timed(work: Callable[[], None]) -> float:
    """Seconds until all ranks are done. Collective."""
    barrier()
    start = time.perf_counter()
    work()
    barrier()
    return time.perf_counter() - start


def _keep(
    measured: dict[str, list[float]],
    times: tuple[float, float],
    step: int,
    num_warmup: int,
    world: World,
) -> None:
    """Keep the sequential and the time-shared step's seconds, unless they are of the warm-up."""
    if step >= num_warmup:
        for kept, seconds in zip(measured.values(), times, strict=True):
            kept.append(seconds)
    if world.rank == 0:
        both = ", ".join(f"{name} {s:.3f} s" for name, s in zip(measured, times, strict=True))
        print(f"P {world.size} step {step} {both}", file=sys.stderr)


def _predict_dpo(
    num_ranks: int, sizes: Sizes, ordered_for: Costs, costs: Costs
) -> dict[str, list[float]]:
    """Simulated seconds, with ``costs``, of the steps in an order made for others."""
    count = sizes.num_settling + sizes.num_steps
    steps = lookahead_steps(num_ranks, sizes.num_microbatches, ordered_for, count)
    sequential = sequential_step(num_ranks, sizes.num_microbatches, costs)
    times = step_times(steps, costs)[sizes.num_settling :]
    return {"sequential": [sequential] * sizes.num_steps, "time_shared": times}


def _compared(
    measured: dict[str, list[float]], predicted: dict[str, list[float]]
) -> dict[str, Any]:
    found, simulated = _summary(measured), _summary(predicted)
    return {
        "measured": found | {"all_seconds": measured},
        "simulated": simulated,
        "measured_over_simulated": found["speedup"] / simulated["speedup"],
    }


def _summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and that of every step's sequential over its time-shared time."""
    pairs = zip(seconds["sequential"], seconds["time_shared"], strict=True)
    return {
        "sequential_seconds": statistics.median(seconds["sequential"]),
        "time_shared_seconds": statistics.median(seconds["time_shared"]),
        "speedup": statistics.median(before / after for before, after in pairs),
    }
