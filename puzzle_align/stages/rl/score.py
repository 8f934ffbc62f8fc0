"""The score phase: forwards of reference, reward model and critic over an iteration's responses.

Models that share ranks and plan time-share their pipeline, or run one after the other; models on
ranks apart run side by side. What they make of a sample goes to its owner.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.job_plan import ContextPlan, Phase
from puzzle_align.runtime.exchange import exchange
from puzzle_align.runtime.executor import ModelRun
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.passes import run_together
from puzzle_align.runtime.row_input import OutputKind
from puzzle_align.schedules.timeline import Span
from puzzle_align.stages.rl.models import Models
from puzzle_align.stages.rl.rollout import (
    Rollout,
    policy_temperature,
    samples_of,
    seen_by,
)
from puzzle_align.stages.rl.rows import BatchRows, batch_rows
from puzzle_align.stages.tracing import Tracer, pass_name

# What each role gives of a sample of n tokens: its log-probabilities [n]; the values of the states
# before its tokens and of the one after the last [n + 1]; its reward [1].
_OUTPUT_KINDS: dict[str, OutputKind] = {
    "actor": "tokens",
    "reference": "tokens",
    "critic": "states",
    "reward": "responses",
}

Columns = dict[int, np.ndarray]  # by sample, float64 [length, number of columns]


def score(
    config: JobConfig,
    models: Models,
    world: World,
    rollout: Rollout,
    loader: ExampleLoader,
    tracer: Tracer,
) -> dict[str, Columns]:
    """What the scoring roles make of every sample that this rank owns, by role.

    Collective over the world.

    Args:
        loader: of the iteration in one batch, with the tokens of this rank's rows.
    """
    phase = models.plan.phase("score")
    made: dict[str, Columns] = {}
    for group in phase.colocated:
        if models.of(group[0]) is not None:
            spans = tracer.spans(pass_name(phase, group))
            made |= _run_group(config, models, world, phase, group, loader, spans)
    return {
        context.role: _send_to_owners(context, loader, rollout, made.get(context.role, {}), world)
        for context in phase.contexts
    }


def _run_group(
    config: JobConfig,
    models: Models,
    world: World,
    phase: Phase,
    group: Sequence[ContextPlan],
    batch: ExampleLoader,
    spans: list[Span] | None,
) -> dict[str, Columns]:
    """Run colocated models over this rank's rows; what they make is on output ranks alone."""
    contexts = {c.role: models.contexts[c.role, c.workload] for c in group}
    first = contexts[group[0].role]
    loader = seen_by(batch, first.plan, first.data_rank)
    rows = batch_rows(loader, 0, group[0].options.attention, world.device)
    made: dict[str, Columns] = {role: {} for role in contexts}
    outputs: dict[str, dict[int, torch.Tensor]] = {role: {} for role in contexts}
    temperature = policy_temperature(config)
    runs = {
        role: ModelRun(
            context,
            rows=rows.read(_OUTPUT_KINDS[role], temperature=temperature),
            finish=_keep(outputs[role]) if context.is_output_rank else _drop,
            train=False,
        )
        for role, context in contexts.items()
    }
    run_together(runs, costs=models.costs(phase, group), spans=spans)
    for role, by_row in outputs.items():
        for row, values in _on_host(by_row).items():
            made[role] |= _by_sample(rows, row, _OUTPUT_KINDS[role], values)
    return made


def _on_host(outputs: Mapping[int, torch.Tensor]) -> dict[int, np.ndarray]:
    """Rows' outputs [n] as float64; the host waits for the device once."""
    if not outputs:
        return {}
    together = torch.cat([*outputs.values()]).double().cpu().numpy()
    ends = np.cumsum([len(values) for values in outputs.values()])
    return dict(zip(outputs, np.split(together, ends[:-1]), strict=True))


def _keep(outputs: dict[int, torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
    def finish(microbatch: int, output: torch.Tensor) -> None:
        outputs[microbatch] = output

    return finish


def _drop(_microbatch: int, _output: torch.Tensor) -> None:
    """For ranks that are not their replica's output rank."""


def _by_sample(rows: BatchRows, row: int, output_kind: OutputKind, values: np.ndarray) -> Columns:
    """A row's outputs, taken apart: float64 [n, 1], [n + 1, 1] or [1, 1] by sample."""
    samples, lengths = rows.samples(row)
    if output_kind == "responses":
        return {int(s): values[i : i + 1, None] for i, s in enumerate(samples)}
    num_tokens = int(lengths.sum())
    ends = np.cumsum(lengths)
    found: Columns = {}
    for i, (sample, end) in enumerate(zip(samples, ends, strict=True)):
        of_tokens = values[end - lengths[i] : end]
        after = (
            values[num_tokens + i : num_tokens + i + 1] if output_kind == "states" else values[:0]
        )
        found[int(sample)] = np.concatenate([of_tokens, after])[:, None]
    return found


def _send_to_owners(
    context: ContextPlan, loader: ExampleLoader, rollout: Rollout, made: Columns, world: World
) -> Columns:
    examples, owners = seen_by(loader, context.plan).data_ranks(0)
    output_ranks = np.array([context.output_rank(d) for d in range(context.plan.data)])
    sources = np.zeros(len(rollout.lengths), dtype=np.int64)
    for example, source in zip(examples.tolist(), output_ranks[owners].tolist(), strict=True):
        sources[samples_of(loader, [example])] = source
    return exchange(
        made,
        rollout.at(world.rank),
        sources=sources,
        lengths=_num_values(_OUTPUT_KINDS[context.role], rollout.lengths),
        num_columns=1,
    )


def _num_values(output_kind: OutputKind, lengths: np.ndarray) -> np.ndarray:
    """What a model gives of samples of so many tokens, int64 [n]."""
    if output_kind == "responses":
        return np.ones_like(lengths)
    return lengths + 1 if output_kind == "states" else lengths
