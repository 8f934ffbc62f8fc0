"""Dynamic sampling: an iteration's batch is filled with groups whose rewards are not all equal.

Yu et al. (2025), "DAPO" (arXiv 2503.14476), section 3.2: equal rewards are advantages of 0, so such
a group teaches nothing. Groups keep the order in which they were sampled; those beyond a full batch
are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    if config.allow_smaller:
        last = f"or look at the rewards ({multiple} are the fewest to train on)"
    raise CannotGoOn(
        f"ppo.filter_groups: in {len(batches)} batches only {kept} of {wanted} prompts have "
        "responses with unequal rewards: raise ppo.filter_groups.max_num_gen_batches, "
        f"generation.num_generations or generation.temperature, {last}"
    )


def joined(batches: Sequence[Collected], number: int) -> tuple[Rollout, Table, Rewarded]:
    """Join the first ``number`` kept groups of all batches, renumbered."""
    first, k = batches[0].rollout, batches[0].rollout.num_generations
    totals = np.cumsum([0, *(batch.kept.sum() for batch in batches)])  # of the batches before
    groups = [
        np.flatnonzero(batch.kept)[: max(0, number - before)]
        for batch, before in zip(batches, totals[:-1].tolist(), strict=True)
    ]
    samples = [(each[:, None] * k + np.arange(k)).ravel() for each in groups]
    ends = np.cumsum([len(each) for each in samples])
    renumbered = [
        {int(old): int(end) - len(each) + place for place, old in enumerate(each)}
        for each, end in zip(samples, ends, strict=True)
    ]

    def of_groups(name: str) -> np.ndarray:
        parts = zip(batches, groups, strict=True)
        return np.concatenate([getattr(batch.rollout, name)[each] for batch, each in parts])

    def of_samples(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([c[each] for c, each in zip(columns, samples, strict=True)])

    def by_sample(columns: Sequence[Any]) -> dict[int, Any]:
        pairs = zip(columns, renumbered, strict=True)
        return {new[old]: items[old] for items, new in pairs for old in new if old in items}

    rollouts = [batch.rollout for batch in batches]
    responses = Responses(
        of_samples([rollout.lengths for rollout in rollouts]),
        of_samples([rollout.responses.owners for rollout in rollouts]),
    )
    rollout = Rollout(
        iteration=first.iteration,
        batch=first.batch,
        prompts=of_groups("prompts"),
        prompt_lengths=of_groups("prompt_lengths"),
        stopped=of_samples([rollout.stopped for rollout in rollouts]),
        responses=responses,
        num_generations=k,
        sampled=by_sample([rollout.sampled for rollout in rollouts]),
    )
    table = Table(responses)
    for name in batches[0].table.by_token:
        table.by_token[name] = by_sample([batch.table.by_token[name] for batch in batches])
    return rollout, table, _rewarded(batches, renumbered)


def _rewarded(batches: Sequence[Collected], renumbered: Sequence[dict[int, int]]) -> Rewarded:
    """Rewards of the renumbered samples that this rank owns."""
    places = [
        [place for place, sample in enumerate(batch.rollout.sampled) if sample in new]
        for batch, new in zip(batches, renumbered, strict=True)
    ]
    parts = [*zip((batch.rewarded for batch in batches), places, strict=True)]
    names = {name: None for rewarded, _ in parts for name in rewarded.extra}
    metrics: dict[str, list[float]] = {}
    for rewarded, _ in parts:
        for name, values in rewarded.metrics.items():
            metrics.setdefault(name, []).extend(values)
    baselines = [r.baselines[each] for r, each in parts if r.baselines is not None]
    return Rewarded(
        np.concatenate([rewarded.scores[each] for rewarded, each in parts]),
        np.concatenate([rewarded.by_function[each] for rewarded, each in parts]),
        {
            name: [
                rewarded.extra[name][place] if name in rewarded.extra else None
                for rewarded, each in parts
                for place in each
            ]
            for name in names
        },
        metrics,
        np.concatenate(baselines) if baselines else None,
    )
