"""The learn phase: actor and critic train on an iteration's responses, in mini-batches.

On one pipeline they train time-shared or one after the other, on ranks apart side by side: the
numbers are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from puzzle_align.config.job import JobConfig, OptimizerConfig
from puzzle_align.config.roles import trained_roles
from puzzle_align.data.loader import PairLoader
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.runtime.exchange import exchange
from puzzle_align.runtime.executor import ModelRun
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.optimizer import Optimizer, learning_rate
from puzzle_align.runtime.passes import run_together
from puzzle_align.runtime.reduce import sum_on_host
from puzzle_align.stages.rl.experience import LEARNED
from puzzle_align.stages.rl.losses import ActorLoss, CriticLoss, Loss
from puzzle_align.stages.rl.models import Models
from puzzle_align.stages.rl.rollout import (
    Rollout,
    dataset_of,
    loader_of,
    own_samples,
    policy_temperature,
    seen_by,
)
from puzzle_align.stages.rl.rows import team_rows
from puzzle_align.telemetry.ppo_metrics import update_metrics

_PREFIXES = {"actor": "policy", "critic": "val"}  # of metrics
_APPROX_KL = "policy/approxkl_avg"


@dataclass(frozen=True)
class _MiniBatch:
    """What one update learns from, as far as this rank needs it."""

    update: int  # counted over iterations
    loader: PairLoader
    columns: Mapping[int, np.ndarray]  # by sample, float64 [tokens, len(LEARNED)]
    losses: Mapping[str, Loss]  # of the roles that are trained


class Learner:
    """Actor and critic in training, as far as they are on this rank."""

    def __init__(
        self,
        config: JobConfig,
        models: Models,
        world: World,
        prompts: PromptDataset,
        num_iterations: int,
    ) -> None:
        """Build the optimizers. Collective over each model's ranks."""
        self._config = config
        self._models = models
        self._world = world
        self._prompts = prompts
        self._num_iterations = num_iterations
        self._updates_each = config.ppo.ppo_epochs * config.ppo.num_mini_batches
        self.optimizers = {
            role: Optimizer(models.contexts[role], optimizer_config(config, role))
            for role in trained_roles(config)
            if role in models.contexts
        }

    def learn(
        self, rollout: Rollout, columns: Mapping[int, np.ndarray], kl_coef: float
    ) -> tuple[dict[str, float], int]:
        """Train on an iteration's responses: metrics, means over its mini-batches, and how many
        updates were skipped for gradients that were not finite.

        A mini-batch on which the policy is further from the sampling one than ``ppo.target_kl`` is
        not learnt from, and ends the iteration. Collective over the world.

        Args:
            columns: ``LEARNED`` of the samples whose home this rank is.
            kl_coef: coefficient of the KL in the loss, where it is there.
        """
        warming_up = rollout.iteration < self._config.ppo.critic_warmup
        roles = ("critic",) if warming_up else trained_roles(self._config)
        planner = loader_of(
            self._config,
            dataset_of(rollout, self._prompts, {}),
            batches=self._config.ppo.num_mini_batches,
        )
        target_kl = self._config.ppo.target_kl
        found: list[dict[str, float]] = []
        norms: list[torch.Tensor] = []
        first = rollout.iteration * self._updates_each
        for update in range(first, first + self._updates_each):
            batch = self._mini_batch(roles, rollout, columns, planner, update, kl_coef)
            found.append(self._accumulate(batch))
            if target_kl is not None and found[-1].get(_APPROX_KL, 0.0) > target_kl:
                break
            norms.append(self._update(roles, update))
        metrics, num_skipped = update_metrics(found), 0
        for role in roles:
            metrics[f"{_PREFIXES[role]}/learning_rate"] = self._learning_rate(role, first)
        if norms:
            told = sum_on_host(torch.stack(norms))
            mean = told[:, 0].mean(dim=0).tolist()
            for role, norm in zip(roles, mean, strict=True):
                metrics[f"{_PREFIXES[role]}/grad_norm"] = norm
            num_skipped = int(told[:, 1].sum())
        return metrics, num_skipped

    def _mini_batch(
        self,
        roles: Sequence[str],
        rollout: Rollout,
        columns: Mapping[int, np.ndarray],
        planner: PairLoader,
        update: int,
        kl_coef: float,
    ) -> _MiniBatch:
        """Bring here what this rank's rows of a mini-batch are made of. Collective."""
        contexts = self._models.contexts
        wanted: set[int] = set()
        for role in roles:
            if role in contexts:
                wanted.update(own_samples(rollout, planner, update, contexts[role]))
        here = exchange(
            columns,
            sorted(wanted),
            sources=rollout.homes,
            lengths=rollout.lengths,
            num_columns=len(LEARNED),
        )
        tokens = {s: c[:, LEARNED.index("tokens")] for s, c in here.items()}
        loader = planner.over(dataset_of(rollout, self._prompts, tokens))
        members, _ = planner.data_ranks(update)
        num_tokens = int(rollout.lengths[rollout.samples_of(members.tolist())].sum())
        config = self._config.ppo
        losses: dict[str, Loss] = {"critic": CriticLoss(config, num_tokens)}
        if "actor" in roles:
            losses = {"actor": ActorLoss(config, kl_coef, num_tokens), **losses}
        return _MiniBatch(update, loader, here, losses)

    def _accumulate(self, batch: _MiniBatch) -> dict[str, float]:
        """Forward and backward of a mini-batch into the models' gradients; its metrics.

        Collective over the world.
        """
        sums = {
            role: torch.zeros(len(loss.names), dtype=torch.float64, device=self._world.device)
            for role, loss in batch.losses.items()
        }
        for team in self._models.teams(tuple(batch.losses)):
            if team[0] in self._models.contexts:
                self._run_team(team, batch, sums)
        total = sum_on_host(torch.cat([*sums.values()]).cpu())
        names = [name for loss in batch.losses.values() for name in loss.names]
        num_tokens = next(iter(batch.losses.values())).num_tokens
        return dict(zip(names, (total / num_tokens).tolist(), strict=True))

    def _run_team(
        self, team: Sequence[str], batch: _MiniBatch, sums: Mapping[str, torch.Tensor]
    ) -> None:
        """Gradients of models of one plan; adds what the metrics need to ``sums``."""
        first = self._models.contexts[team[0]]
        loader = seen_by(batch.loader, first.plan, first.data_rank)
        attention = self._models.setups[team[0]].options.attention
        rows = team_rows(loader, batch.update, attention, self._world.device)
        columns = [rows.joined(batch.columns, row, len(LEARNED)) for row in range(len(rows))]
        for role in team:
            self.optimizers[role].zero_grad()
        runs = {
            role: ModelRun(
                self._models.contexts[role],
                rows=rows.read(**_how(self._config, batch.losses[role])),
                finish=_finish(
                    batch.losses[role],
                    columns,
                    sums[role] if self._models.contexts[role].reports else None,
                ),
                train=True,
            )
            for role in team
        }
        run_together(runs, costs=self._models.costs(team, self._config.placement.learn, train=True))
        for role in team:
            self.optimizers[role].reduce_gradients()

    def _update(self, roles: Sequence[str], update: int) -> torch.Tensor:
        """Step the optimizers: their gradients' norms, and 1 where one was not finite.

        float64 [2, roles]; zeros for a model that another rank tells of.
        """
        told = torch.zeros(2, len(roles), dtype=torch.float64)
        for number, role in enumerate(roles):
            if role not in self.optimizers:
                continue
            optimizer, context = self.optimizers[role], self._models.contexts[role]
            updated, norm = optimizer.step(self._learning_rate(role, update))
            if context.reports and context.data_rank == 0:
                told[0, number], told[1, number] = norm, not updated
        return told

    def _learning_rate(self, role: str, update: int) -> float:
        """A role's at an update, counted over iterations; the actor's begin after the warm-up."""
        not_trained = self._config.ppo.critic_warmup if role == "actor" else 0
        before = not_trained * self._updates_each
        total = self._num_iterations * self._updates_each
        config = optimizer_config(self._config, role)
        return learning_rate(config, update - before, total - before)


def optimizer_config(config: JobConfig, role: str) -> OptimizerConfig:
    """A trained role's optimizer: the critic may have its own."""
    own = config.critic.optimizer if role == "critic" else None
    return config.optimizer if own is None else own


def _how(config: JobConfig, loss: Loss) -> dict[str, Any]:
    """How rows are read for a loss: the keywords of ``TeamRows.read``."""
    if loss.reads == "states":
        return {"reads": loss.reads}
    return {"reads": loss.reads, "temperature": policy_temperature(config), "entropies": True}


def _finish(
    loss: Loss, columns: Sequence[torch.Tensor], sums: torch.Tensor | None
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What a row's outputs give: the loss's share; ``sums`` is where its part of metrics goes."""

    def finish(row: int, output: torch.Tensor) -> torch.Tensor:
        share, parts = loss(output, columns[row])
        if sums is not None:
            sums.add_(parts)
        return share

    return finish
