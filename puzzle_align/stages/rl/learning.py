"""The learn phase of actor and critic: losses, optimizer steps, learning rates and metrics.

Shapes: N response tokens and R responses in a row; every column of the table is [N].
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch

from puzzle_align.algos.advantages import KLEstimator
from puzzle_align.algos.logprobs import sum_by_slot
from puzzle_align.algos.ppo import (
    KL_SUMS,
    POLICY_SUMS,
    VALUE_SUMS,
    LossCounts,
    entropy_bonus,
    kl_loss,
    policy_loss,
    token_sums,
    token_weights,
    value_loss,
)
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Job
from puzzle_align.config.sections.optimizer import learning_rate
from puzzle_align.config.sections.rl import PPOConfig
from puzzle_align.layout.job_plan import Workload
from puzzle_align.runtime.groups.collectives import sum_on_host
from puzzle_align.runtime.row_input import OutputKind, Reading, RowInput
from puzzle_align.stages.divergence import Update
from puzzle_align.stages.rl.experience import CORRECTION, KEPT
from puzzle_align.telemetry.ppo_metrics import update_metrics

if TYPE_CHECKING:
    from puzzle_align.runtime.shadow import Shadow
    from puzzle_align.stages.models import Models

# Outputs of each role for a sample: log-probabilities of its tokens; values of the states before
# its tokens and after the last; its reward.
_OUTPUT_KINDS: dict[str, OutputKind] = {
    "actor": "tokens",
    "reference": "tokens",
    "critic": "states",
    "reward": "responses",
}
_PREFIXES = {"actor": "policy", "critic": "val"}  # of metric names
_LOSSES = {"actor": "loss/policy_avg", "critic": "loss/value_avg"}
APPROX_KL = "policy/approxkl_avg"


def reading_of(config: JobConfig, role: str, workload: Workload) -> Reading:
    """Reading of rows by a role's context; the policy uses the sampling temperature.

    Greedy sampling has none: then log-probabilities are of the plain distribution.
    """
    return Reading(
        output_kind=_OUTPUT_KINDS[role],
        temperature=config.generation.temperature or 1.0,
        entropies=(role, workload) == ("actor", "train"),
    )


class ActorLoss:
    """Policy loss, minus the entropy bonus, plus the KL if it is in the loss."""

    def __init__(
        self, config: PPOConfig, counts: LossCounts, device: torch.device, kl_coef: float
    ) -> None:
        """Begin a mini-batch of ``counts`` on all ranks."""
        self.config, self.counts, self.kl_coef = config, counts, kl_coef
        self.has_kl = config.use_kl_loss and kl_coef > 0
        self.names = (*POLICY_SUMS, "policy/entropy_avg", *KL_SUMS * self.has_kl)
        self.num_tokens = counts.tokens  # 0 if it leaves all responses out
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def __call__(
        self, row: RowInput, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the row's share, from log-probabilities and entropies [2, N]."""
        config, (logps, entropies) = self.config, outputs.unbind()
        low, high = config.clip_ratio_low, config.clip_ratio_high
        weights = self._weights(row, columns)
        sequence_means = partial(_sequence_means, row)
        loss, policy_sums = policy_loss(
            logps,
            columns["old_logps"],
            columns["advantages"],
            clip_ratio_low=config.clip_ratio if low is None else low,
            clip_ratio_high=config.clip_ratio if high is None else high,
            clip_ratio_c=config.clip_ratio_c,
            num_tokens=self.num_tokens,
            weights=weights,
            corrections=columns.get(CORRECTION),
            mode=config.loss_mode,
            sequence_means=sequence_means,
        )
        sums = [policy_sums, token_sums(entropies[None].double(), weights)]
        if config.entropy_coeff:
            loss = loss + entropy_bonus(
                entropies,
                coefficient=config.entropy_coeff,
                num_tokens=self.num_tokens,
                weights=weights,
            )
        if self.has_kl:
            share, kl_sums = kl_loss(
                logps,
                columns["ref_logps"],
                estimator=cast(KLEstimator, config.kl_estimator),
                coefficient=self.kl_coef,
                num_tokens=self.num_tokens,
                weights=weights,
                old_logps=columns["old_logps"] if config.use_bias_correction_kl else None,
                sequence_means=sequence_means if config.loss_mode == "gspo" else None,
            )
            loss = loss + share
            sums.append(kl_sums)
        self.sums.add_(torch.cat(sums))
        return loss

    def _weights(self, row: RowInput, columns: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Weights of the row's tokens in the loss, [N]; None: all ``1 / num_tokens``."""
        mode, masks = self.config.loss_agg_mode, self.config.mask_truncated_completions
        if mode == "token-mean" and not masks:
            return None
        weights = token_weights(mode, row.lengths.flatten()[row.cells], self.counts)
        return weights * columns[KEPT] if masks else weights


def _sequence_means(row: RowInput, values: torch.Tensor) -> torch.Tensor:
    """Mean of values [N] over the tokens of each token's response, [N]."""
    lengths = row.lengths.flatten()
    sums = sum_by_slot(values, row.cells, len(lengths))
    return (sums / lengths.clamp(min=1))[row.cells].to(values.dtype)


class CriticLoss:
    """Clipped squared error of the values."""

    names: ClassVar[tuple[str, ...]] = VALUE_SUMS

    def __init__(self, config: PPOConfig, num_tokens: int, device: torch.device) -> None:
        """Begin a mini-batch of ``num_tokens`` response tokens on all ranks."""
        self.config, self.num_tokens = config, num_tokens
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def __call__(
        self, _row: RowInput, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the row's share, from values [N + R]: before tokens, then after the last."""
        loss, sums = value_loss(
            outputs[: len(columns["returns"])],
            columns["old_values"],
            columns["returns"],
            clip_range=self.config.cliprange_value,
            num_tokens=self.num_tokens,
        )
        self.sums.add_(sums)
        return loss


PPOLoss = ActorLoss | CriticLoss


def counts_of(config: JobConfig, lengths: np.ndarray, stopped: np.ndarray) -> LossCounts:
    """Sizes of a mini-batch for the actor's loss, without responses that it leaves out.

    Args:
        lengths: tokens of all its responses, int64 [n].
        stopped: whether they end with a stop token, bool [n].
    """
    kept = lengths[stopped] if config.ppo.mask_truncated_completions else lengths
    longest = config.generation.max_new_tokens
    return LossCounts(int(kept.sum()), int(np.count_nonzero(kept)), longest)


class Updates:
    """Optimizer steps of a job's trained models: one a mini-batch, counted over the job."""

    def __init__(
        self, job: Job, models: "Models", num_iterations: int, device: torch.device
    ) -> None:
        self._job, self._models, self._device = job, models, device
        self._ppo = job.config.ppo
        self._each = self._ppo.ppo_epochs * self._ppo.num_mini_batches
        self._total = num_iterations * self._each

    def of(self, iteration: int) -> range:
        """Updates of an iteration: steps of the loader of mini-batches."""
        return range(iteration * self._each, (iteration + 1) * self._each)

    def roles(self, iteration: int) -> tuple[str, ...]:
        """Roles trained in an iteration: during a warm-up the critic alone."""
        warming_up = iteration < self._ppo.critic_warmup
        return ("critic",) if warming_up else self._job.plan.phase("learn").roles

    def losses(
        self, roles: Sequence[str], lengths: np.ndarray, stopped: np.ndarray, kl_coef: float
    ) -> dict[str, PPOLoss]:
        """Losses of a mini-batch by role; its responses have ``lengths``, and may have stopped."""
        losses: dict[str, PPOLoss] = {}
        if "actor" in roles:
            counts = counts_of(self._job.config, lengths, stopped)
            losses["actor"] = ActorLoss(self._ppo, counts, self._device, kl_coef)
        if "critic" in roles:
            losses["critic"] = CriticLoss(self._ppo, int(lengths.sum()), self._device)
        return losses

    def measured(self, losses: Mapping[str, PPOLoss]) -> dict[str, float]:
        """Metrics as means over a mini-batch's tokens. Collective over the world.

        A loss that leaves out every response has none: zeros would look like a collapse.
        """
        losses = {role: loss for role, loss in losses.items() if loss.num_tokens}
        if not losses:
            return {}
        for role, loss in losses.items():
            context = self._models.contexts.get((role, "train"))
            if context is None or not context.is_output_rank:
                loss.sums.zero_()
        means = [loss.sums / loss.num_tokens for loss in losses.values()]
        names = [name for loss in losses.values() for name in loss.names]
        return dict(zip(names, sum_on_host(torch.cat(means).cpu()).tolist(), strict=True))

    def goes_too_far(self, measured: Mapping[str, float]) -> bool:
        """Whether the policy's KL from the sampling policy exceeds ``ppo.target_kl``."""
        target = self._ppo.target_kl
        return target is not None and measured.get(APPROX_KL, 0.0) > target

    def step(self, roles: Sequence[str], update: int) -> torch.Tensor:
        """Step the optimizers; return gradient norms, and 1 for a skipped step.

        float64 [2, roles]; zeros for a model that another rank reports. Collective over the models'
        ranks.
        """
        reported = torch.zeros(2, len(roles), dtype=torch.float64)
        for number, role in enumerate(roles):
            optimizer, rate = self._models.optimizers.get(role), self._learning_rate(role, update)
            shadow = self._to_fill(role, update)
            if shadow is not None:
                updated, norm = shadow.step(optimizer, rate)
            elif optimizer is not None:
                updated, norm = optimizer.step(rate)
            context = self._models.contexts.get((role, "train"))
            if context is not None and context.is_output_rank and context.data_rank == 0:
                reported[0, number], reported[1, number] = norm, not updated
        return reported

    def summary(
        self,
        iteration: int,
        measured: Sequence[Mapping[str, float]],
        reported: Sequence[torch.Tensor],
    ) -> tuple[dict[str, float], list[Update]]:
        """Metrics as means over an iteration's mini-batches, and its updates. Collective.

        Args:
            measured: of every mini-batch.
            reported: results of ``step``; one fewer if the last mini-batch was not applied.
        """
        roles, metrics = self.roles(iteration), update_metrics(measured)
        for role in roles:
            rate = self._learning_rate(role, self.of(iteration)[0])
            metrics[f"{_PREFIXES[role]}/learning_rate"] = rate
        if not reported:
            return metrics, []
        sums = sum_on_host(torch.stack(list(reported)))
        for role, norm in zip(roles, sums[:, 0].mean(dim=0).tolist(), strict=True):
            metrics[f"{_PREFIXES[role]}/grad_norm"] = norm
        return metrics, [
            Update(role, not skipped, means.get(_LOSSES[role], 0.0), norm)
            for means, (norms, skips) in zip(measured, sums.tolist(), strict=False)
            for role, norm, skipped in zip(roles, norms, skips, strict=True)
        ]

    def _to_fill(self, role: str, update: int) -> "Shadow | None":
        """Copy that receives a role's weights during the update; None for most updates.

        With ``generation.overlap_switch``, an iteration's last update fills it, if another
        iteration follows.
        """
        is_last = (update + 1) % self._each == 0
        if self._job.config.generation.overlap_switch and is_last and update + 1 < self._total:
            # With adapters, which may be merged, it is refused.
            return cast("Shadow | None", self._models.shadows.get((role, "generate")))
        return None

    def _learning_rate(self, role: str, update: int) -> float:
        """Learning rate of a role at an update of the job; the actor's begin after the warm-up."""
        before = self._ppo.critic_warmup * self._each if role == "actor" else 0
        return learning_rate(self._job.optimizer(role), update - before, self._total - before)
