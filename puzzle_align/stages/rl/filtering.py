"""Dynamic sampling: an iteration's batch is filled with groups whose rewards are not all equal.

Yu et al. (2025), "DAPO" (arXiv 2503.14476), section 3.2: equal rewards are advantages of 0, so such
a group teaches nothing. Groups keep the order in which they were sampled; those beyond a full batch
are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch

from puzzle_align.config.sections.rl import FilterGroupsConfig, PPOConfig
from puzzle_align.runtime.columns import Responses, Table
from puzzle_align.runtime.groups.collectives import sum_on_host
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl.experience import shaped_scores
from puzzle_align.stages.rl.rewards import Rewarded
from puzzle_align.stages.rl.rollout import Rollout


@dataclass(frozen=True)
class Collected:
    """A batch of scored groups; ``kept``: bool [B], groups whose scores are not all equal."""

    rollout: Rollout
    table: Table
    rewarded: Rewarded
    kept: np.ndarray


def collected(config: PPOConfig, rollout: Rollout, table: Table, rewarded: Rewarded) -> Collected:
    """Find the groups of a batch whose scored responses have unequal scores. Collective.

    Scores are compared as they are trained on: clipped, and less the missing-EOS penalty.
    """
    flags, k = torch.zeros(len(rollout.prompts), dtype=torch.float64), rollout.num_generations
    by_group: dict[int, list[float]] = {}
    scored = shaped_scores(config, rollout, rewarded).tolist()
    for sample, score in zip(rollout.sampled, scored, strict=True):
        if score == score:  # not NaN: it has one
            by_group.setdefault(sample // k, []).append(score)
    for group, scores in by_group.items():
        flags[group] = min(scores) < max(scores)
    return Collected(rollout, table, rewarded, sum_on_host(flags).numpy() > 0)


def num_to_learn(
    batches: Sequence[Collected], wanted: int, multiple: int, config: FilterGroupsConfig
) -> int:
    """Number of groups to train on: ``wanted``, or if allowed fewer, a multiple of ``multiple``.

    Raises:
        CannotGoOn: one line, if there are too few.
    """
    kept = sum(int(batch.kept.sum()) for batch in batches)
    if kept >= wanted:
        return wanted
    smaller = kept // multiple * multiple
    if smaller and config.allow_smaller:
        return smaller
    last = "look at the rewards, or set ppo.filter_groups.allow_smaller=true"
    if not smaller:
        last = f"or look at the rewards (training needs at least {multiple} such prompts)"
    raise CannotGoOn(
        f"ppo.filter_groups: in {len(batches)} batches only {kept} of {wanted} prompts have "
        "responses with unequal rewards: raise ppo.filter_groups.max_num_gen_batches, "
        f"generation.num_generations or generation.temperature, {last}"
    )


def joined(batches: Sequence[Collected], number: int) -> tuple[Rollout, Table, Rewarded]:
    """Join the first ``number`` kept groups of all batches, renumbered."""
    rollouts, k = [batch.rollout for batch in batches], batches[0].rollout.num_generations
    groups = np.flatnonzero(np.concatenate([batch.kept for batch in batches]))[:number]
    samples = (groups[:, None] * k + np.arange(k)).ravel()  # counted over all batches
    renumbered = {old: new for new, old in enumerate(samples.tolist())}
    ends = np.cumsum([len(rollout.lengths) for rollout in rollouts]).tolist()
    starts = [0, *ends[:-1]]

    def by_sample(columns: Sequence[Mapping[int, Any]]) -> dict[int, Any]:
        return {
            renumbered[start + sample]: value
            for start, column in zip(starts, columns, strict=True)
            for sample, value in column.items()
            if start + sample in renumbered
        }

    responses = Responses(
        np.concatenate([rollout.lengths for rollout in rollouts])[samples],
        np.concatenate([rollout.responses.owners for rollout in rollouts])[samples],
    )
    rollout = Rollout(
        iteration=rollouts[0].iteration,
        batch=rollouts[0].batch,
        prompts=np.concatenate([rollout.prompts for rollout in rollouts])[groups],
        prompt_lengths=np.concatenate([rollout.prompt_lengths for rollout in rollouts])[groups],
        stopped=np.concatenate([rollout.stopped for rollout in rollouts])[samples],
        responses=responses,
        num_generations=k,
        sampled=by_sample([rollout.sampled for rollout in rollouts]),
    )
    table = Table(responses)
    for name in batches[0].table.by_token:
        table.by_token[name] = by_sample([batch.table.by_token[name] for batch in batches])
    kept = [
        start + sample in renumbered
        for start, rollout in zip(starts, rollouts, strict=True)
        for sample in rollout.sampled
    ]
    return rollout, table, _rewarded([batch.rewarded for batch in batches], np.array(kept, bool))


def _rewarded(batches: Sequence[Rewarded], kept: np.ndarray) -> Rewarded:
    """Join the batches' rewards of this rank's samples, those that are ``kept`` (bool [all])."""
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    for name in dict.fromkeys(name for batch in batches for name in batch.extra):
        values = [v for batch in batches for v in batch.extra.get(name, [None] * len(batch.scores))]
        extra[name] = [*compress(values, kept)]
    for batch in batches:
        for name, values in batch.metrics.items():
            metrics.setdefault(name, []).extend(values)
    baselines = [batch.baselines for batch in batches if batch.baselines is not None]
    return Rewarded(
        np.concatenate([batch.scores for batch in batches])[kept],
        np.concatenate([batch.by_function for batch in batches])[kept],
        extra,
        metrics,
        np.concatenate(baselines)[kept] if baselines else None,
    )
