"""The learn phase: actor and critic train on an iteration's responses, in mini-batches.

On one pipeline they train time-shared or one after the other, on ranks apart side by side: the
numbers are the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.runtime.context import Context, make_trainable
from puzzle_align.runtime.exchange import exchange
from puzzle_align.runtime.executor import ModelRun
from puzzle_align.runtime.groups.collectives import sum_on_host
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer, learning_rate
from puzzle_align.runtime.passes import run_together
from puzzle_align.stages.divergence import Update
from puzzle_align.stages.rl.experience import LEARNED
from puzzle_align.stages.rl.losses import ActorLoss, CriticLoss, PPOLoss
from puzzle_align.stages.rl.models import Models
from puzzle_align.stages.rl.rollout import (
    Rollout,
    own_samples_of_all,
    policy_temperature,
    samples_of,
    seen_by,
)
from puzzle_align.stages.rl.rows import batch_rows
from puzzle_align.stages.rl.shadow import Shadow
from puzzle_align.stages.tracing import Tracer, pass_name
from puzzle_align.telemetry.ppo_metrics import update_metrics

_PREFIXES = {"actor": "policy", "critic": "val"}  # of metrics
_LOSSES = {"actor": "loss/policy_avg", "critic": "loss/value_avg"}
_APPROX_KL = "policy/approxkl_avg"


@dataclass(frozen=True)
class _MiniBatch:
    """What one update learns from, as far as this rank needs it."""

    update: int  # counted over iterations
    loader: ExampleLoader
    columns: Mapping[int, np.ndarray]  # by sample, float64 [tokens, len(LEARNED)]
    losses: Mapping[str, PPOLoss]  # of the roles that are trained


class Learner:
    """Actor and critic in training, as far as they are on this rank."""

    def __init__(
        self,
        job: Job,
        models: Models,
        world: World,
        num_iterations: int,
        tracer: Tracer,
    ) -> None:
        """Make the trained models trainable, and their optimizers. Collective over each's ranks."""
        self._job, self._config = job, job.config
        self._models = models
        self._world = world
        self._num_iterations = num_iterations
        self._updates_each = job.config.ppo.ppo_epochs * job.config.ppo.num_mini_batches
        self._tracer = tracer
        self._phase = models.plan.phase("learn")
        self._contexts = {
            context.role: models.contexts[context.role, "train"]
            for context in self._phase.contexts
            if models.of(context) is not None
        }
        self.optimizers: dict[str, Optimizer] = {}
        for role, context in self._contexts.items():
            options = job.optimizer(role)
            make_trainable(context, options)
            self.optimizers[role] = Optimizer(context, options)

    def learn(
        self,
        rollout: Rollout,
        loader: ExampleLoader,
        columns: Mapping[int, np.ndarray],
        kl_coef: float,
    ) -> tuple[dict[str, float], list[Update]]:
        """Train on an iteration's responses: metrics, means over its mini-batches, and what became
        of every update.

        A mini-batch on which the policy is further from the sampling one than ``ppo.target_kl`` is
        not learnt from, and ends the iteration. Collective over the world.

        Args:
            loader: of the iteration in its mini-batches, with the tokens of this rank's rows.
            columns: ``LEARNED`` of the samples that this rank owns.
            kl_coef: coefficient of the KL in the loss, where it is there.
        """
        roles, updates = self._roles(rollout), self.updates(rollout)
        here = exchange(
            columns,
            own_samples_of_all(loader, updates, self.contexts(rollout)),
            sources=rollout.owners,
            lengths=rollout.lengths,
            num_columns=len(LEARNED),
        )
        target_kl = self._config.ppo.target_kl
        found: list[dict[str, float]] = []
        norms: list[torch.Tensor] = []
        for update in updates:
            losses = self._losses(roles, rollout, loader, update, kl_coef)
            found.append(self._accumulate(_MiniBatch(update, loader, here, losses)))
            if target_kl is not None and found[-1].get(_APPROX_KL, 0.0) > target_kl:
                break
            norms.append(self._update(roles, update))
        metrics, made = update_metrics(found), []
        for role in roles:
            metrics[f"{_PREFIXES[role]}/learning_rate"] = self._learning_rate(role, updates[0])
        if norms:
            reported = sum_on_host(torch.stack(norms))
            mean = reported[:, 0].mean(dim=0).tolist()
            for role, norm in zip(roles, mean, strict=True):
                metrics[f"{_PREFIXES[role]}/grad_norm"] = norm
            made = _updates(roles, found, reported)
        return metrics, made

    def updates(self, rollout: Rollout) -> range:
        """The iteration's updates, counted over iterations: steps of a loader of mini-batches."""
        first = rollout.iteration * self._updates_each
        return range(first, first + self._updates_each)

    def contexts(self, rollout: Rollout) -> list[Context]:
        """What this rank trains in an iteration."""
        return [self._contexts[r] for r in self._roles(rollout) if r in self._contexts]

    def _roles(self, rollout: Rollout) -> tuple[str, ...]:
        """Those that are trained in an iteration: at first the critic alone, if it warms up."""
        warming_up = rollout.iteration < self._config.ppo.critic_warmup
        return ("critic",) if warming_up else self._phase.roles

    def _losses(
        self,
        roles: Sequence[str],
        rollout: Rollout,
        loader: ExampleLoader,
        update: int,
        kl_coef: float,
    ) -> dict[str, PPOLoss]:
        """What a mini-batch is learnt from with, by role."""
        members, _ = loader.data_ranks(update)
        num_tokens = int(rollout.lengths[samples_of(loader, members.tolist())].sum())
        config = self._config.ppo
        losses: dict[str, PPOLoss] = {"critic": CriticLoss(config, num_tokens)}
        if "actor" in roles:
            losses = {"actor": ActorLoss(config, kl_coef, num_tokens), **losses}
        return losses

    def _accumulate(self, batch: _MiniBatch) -> dict[str, float]:
        """Forward and backward of a mini-batch into the models' gradients; its metrics.

        Collective over the world.
        """
        sums = {
            role: torch.zeros(len(loss.names), dtype=torch.float64, device=self._world.device)
            for role, loss in batch.losses.items()
        }
        for group in self._phase.colocated:
            at_work = [context for context in group if context.role in batch.losses]
            if at_work and at_work[0].role in self._contexts:
                self._run_group(at_work, batch, sums)
        total = sum_on_host(torch.cat([*sums.values()]).cpu())
        names = [name for loss in batch.losses.values() for name in loss.names]
        num_tokens = next(iter(batch.losses.values())).num_tokens
        return dict(zip(names, (total / num_tokens).tolist(), strict=True))

    def _run_group(
        self, group: Sequence[ContextPlan], batch: _MiniBatch, sums: Mapping[str, torch.Tensor]
    ) -> None:
        """Gradients of colocated models; adds what the metrics need to ``sums``."""
        contexts = {context.role: self._contexts[context.role] for context in group}
        first = contexts[group[0].role]
        loader = seen_by(batch.loader, first.plan, first.data_rank)
        rows = batch_rows(loader, batch.update, group[0].options.attention, self._world.device)
        columns = [rows.joined(batch.columns, row, len(LEARNED)) for row in range(len(rows))]
        for role in contexts:
            self.optimizers[role].zero_grad()
        runs = {
            role: ModelRun(
                context,
                rows=rows.read(**_how(self._config, batch.losses[role])),
                finish=_finish(
                    batch.losses[role], columns, sums[role] if context.is_output_rank else None
                ),
                train=True,
            )
            for role, context in contexts.items()
        }
        spans = self._tracer.spans(pass_name(self._phase, group))
        run_together(runs, costs=self._models.costs(self._phase, group), spans=spans)
        for role in contexts:
            self.optimizers[role].reduce_gradients()

    def _update(self, roles: Sequence[str], update: int) -> torch.Tensor:
        """Step the optimizers: their gradients' norms, and 1 where one was not finite.

        float64 [2, roles]; zeros for a model that another rank reports.
        """
        reported = torch.zeros(2, len(roles), dtype=torch.float64)
        for number, role in enumerate(roles):
            optimizer, rate = self.optimizers.get(role), self._learning_rate(role, update)
            shadow = self._to_fill(role, update)
            if shadow is not None:
                updated, norm = shadow.step(optimizer, rate)
            elif optimizer is not None:
                updated, norm = optimizer.step(rate)
            if optimizer is not None and _speaks(self._contexts[role]):
                reported[0, number], reported[1, number] = norm, not updated
        return reported

    def _to_fill(self, role: str, update: int) -> Shadow | None:
        """The copy that a role's weights go to as they are updated: at an iteration's last update,
        if another iteration follows.
        """
        last = (update + 1) % self._updates_each == 0
        follows = update + 1 < self._num_iterations * self._updates_each
        if not (self._config.generation.overlap_switch and last and follows):
            return None
        return self._models.shadows.get((role, "generate"))

    def _learning_rate(self, role: str, update: int) -> float:
        """A role's at an update, counted over iterations; the actor's begin after the warm-up."""
        not_trained = self._config.ppo.critic_warmup if role == "actor" else 0
        before = not_trained * self._updates_each
        total = self._num_iterations * self._updates_each
        return learning_rate(self._job.optimizer(role), update - before, total - before)


def _updates(
    roles: Sequence[str], found: Sequence[Mapping[str, float]], reported: torch.Tensor
) -> list[Update]:
    """An iteration's, from the metrics of its mini-batches and the table of ``Learner._update``.

    The last mini-batch may have none.
    """
    return [
        Update(role, not skipped, metrics[_LOSSES[role]], norm)
        for metrics, (norms, skips) in zip(found, reported.tolist(), strict=False)
        for role, norm, skipped in zip(roles, norms, skips, strict=True)
    ]


def _speaks(context: Context) -> bool:
    """Whether this rank reports of the whole model."""
    return context.is_output_rank and context.data_rank == 0


def _how(config: JobConfig, loss: PPOLoss) -> dict[str, Any]:
    """How rows are read for a loss: the keywords of ``BatchRows.read``."""
    if loss.output_kind == "states":
        return {"output_kind": loss.output_kind}
    return {
        "output_kind": loss.output_kind,
        "temperature": policy_temperature(config),
        "entropies": True,
    }


def _finish(
    loss: PPOLoss, columns: Sequence[torch.Tensor], sums: torch.Tensor | None
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What a row's outputs give: the loss's share; ``sums`` is where its part of metrics goes."""

    def finish(row: int, output: torch.Tensor) -> torch.Tensor:
        share, parts = loss(output, columns[row])
        if sums is not None:
            sums.add_(parts)
        return share

    return finish
