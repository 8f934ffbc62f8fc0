"""The score phase: forwards of reference, reward model and critic over an iteration's responses.

Models that share ranks and plan run as one stream, or one after the other; models on ranks apart
run side by side. What they make of a sample goes home.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import phase_roles
from puzzle_align.data.loader import PairLoader
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.runtime.exchange import exchange
from puzzle_align.runtime.executor import ModelRun
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.passes import run_together
from puzzle_align.runtime.row_input import Reads
from puzzle_align.stages.rl.models import Models
from puzzle_align.stages.rl.rollout import (
    Rollout,
    dataset_of,
    loader_of,
    own_samples,
    policy_temperature,
    seen_by,
)
from puzzle_align.stages.rl.rows import TeamRows, team_rows

# What each role gives of a sample of n tokens: its log-probabilities [n]; the values of the states
# before its tokens and of the one after the last [n + 1]; its reward [1].
_READS: dict[str, Reads] = {
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
    prompts: PromptDataset,
    rollout: Rollout,
    tokens: Mapping[int, np.ndarray],
) -> dict[str, Columns]:
    """What the scoring roles make of every sample whose home this rank is, by role.

    Collective over the world.

    Args:
        tokens: of the samples whose home this rank is, float64 [n, 1].
    """
    roles = phase_roles(config, "score")
    planner = loader_of(config, dataset_of(rollout, prompts, {}), batches=1)
    wanted = {
        sample
        for role in roles
        if role in models.contexts
        for sample in own_samples(rollout, planner, 0, models.contexts[role])
    }
    here = exchange(
        tokens, sorted(wanted), sources=rollout.homes, lengths=rollout.lengths, num_columns=1
    )
    dataset = dataset_of(rollout, prompts, {s: column[:, 0] for s, column in here.items()})
    loader = planner.over(dataset)
    made: dict[str, Columns] = {}
    for team in models.teams(roles):
        if team[0] in models.contexts:
            made |= _run_team(config, models, world, team, loader)
    return {
        role: _send_home(role, models, planner, rollout, made.get(role, {}), world)
        for role in roles
    }


def _run_team(
    config: JobConfig, models: Models, world: World, team: Sequence[str], batch: PairLoader
) -> dict[str, Columns]:
    """Run models of one plan over this rank's rows; what they make is on reporting ranks alone."""
    contexts = {role: models.contexts[role] for role in team}
    first = contexts[team[0]]
    loader = seen_by(batch, first.plan, first.data_rank)
    rows = team_rows(loader, 0, models.setups[team[0]].options.attention, world.device)
    made: dict[str, Columns] = {role: {} for role in team}
    outputs: dict[str, dict[int, torch.Tensor]] = {role: {} for role in team}
    temperature = policy_temperature(config)
    runs = {
        role: ModelRun(
            context,
            rows=rows.read(_READS[role], temperature=temperature),
            finish=_keep(outputs[role]) if context.reports else _drop,
            train=False,
        )
        for role, context in contexts.items()
    }
    run_together(runs, costs=models.costs(team, config.placement.score, train=False))
    for role, by_row in outputs.items():
        for row, values in by_row.items():
            made[role] |= _by_sample(rows, row, _READS[role], values.double().cpu().numpy())
    return made


def _keep(outputs: dict[int, torch.Tensor]) -> Callable[[int, torch.Tensor], None]:
    def finish(microbatch: int, output: torch.Tensor) -> None:
        outputs[microbatch] = output

    return finish


def _drop(_microbatch: int, _output: torch.Tensor) -> None:
    """For ranks of which another one tells."""


def _by_sample(rows: TeamRows, row: int, reads: Reads, values: np.ndarray) -> Columns:
    """A row's outputs, taken apart: float64 [n, 1], [n + 1, 1] or [1, 1] by sample."""
    samples, lengths = rows.samples(row)
    if reads == "responses":
        return {int(s): values[i : i + 1, None] for i, s in enumerate(samples)}
    num_tokens = int(lengths.sum())
    ends = np.cumsum(lengths)
    found: Columns = {}
    for i, (sample, end) in enumerate(zip(samples, ends, strict=True)):
        of_tokens = values[end - lengths[i] : end]
        after = values[num_tokens + i : num_tokens + i + 1] if reads == "states" else values[:0]
        found[int(sample)] = np.concatenate([of_tokens, after])[:, None]
    return found


def _send_home(
    role: str, models: Models, planner: PairLoader, rollout: Rollout, made: Columns, world: World
) -> Columns:
    prompts, owners = seen_by(planner, models.setups[role].plan).data_ranks(0)
    reporters = np.array([models.reporter(role, d) for d in range(models.setups[role].plan.data)])
    sources = np.zeros(len(rollout.lengths), dtype=np.int64)
    for prompt, reporter in zip(prompts.tolist(), reporters[owners].tolist(), strict=True):
        sources[rollout.samples_of([prompt])] = reporter
    return exchange(
        made,
        rollout.at(world.rank),
        sources=sources,
        lengths=_num_values(_READS[role], rollout.lengths),
        num_columns=1,
    )


def _num_values(reads: Reads, lengths: np.ndarray) -> np.ndarray:
    """What a model gives of samples of so many tokens, int64 [n]."""
    if reads == "responses":
        return np.ones_like(lengths)
    return lengths + 1 if reads == "states" else lengths
