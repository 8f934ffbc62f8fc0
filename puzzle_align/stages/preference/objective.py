"""Objectives of the preference stages: losses of examples, and metrics.

Shapes: B examples of K responses, C values an example. Examples are pairs (K = 2: chosen, rejected)
or, of unpaired data, single responses (K = 1).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch

from puzzle_align.algos.preference import PairLogps, bradley_terry_loss, kto_loss, preference_loss
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.preference import DPOConfig, KTOConfig, RewardLossConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.runtime.passes import SequenceSums
from puzzle_align.runtime.row_input import PLAIN, Reading
from puzzle_align.telemetry import preference_metrics, reward_metrics, unpaired_metrics

CHOSEN, REJECTED = 0, 1


@dataclass(frozen=True)
class ExampleOutputs:
    """Models' outputs for B examples, and the other inputs of the loss."""

    # Of the trained model, [B, K]: summed log-probabilities, or rewards; with statistics,
    # ``SequenceSums`` as [C, B, K].
    outputs: torch.Tensor
    reference: torch.Tensor  # [B, K], the reference's summed log-probabilities; zeros without one
    lengths: torch.Tensor  # int64 [B, K], predicted tokens of every response
    labels: torch.Tensor  # [B], see ``ExampleDataset``
    # Mean number of tokens in a chosen response's likelihood, over all pairs of the loss's mean.
    mean_nll_length: float
    partners: torch.Tensor | None = None  # [B, 3] of ``sorted_partners``; None: B is the batch
    kl: float = 0.0  # of unpaired data, see ``kl_divergence``


class Objective(Protocol):
    """Loss over examples, and its metrics. The caller divides by the denominator."""

    reads_margins: ClassVar[bool]  # whether the loss reads margins of the data
    reads_ends: ClassVar[bool]  # whether only a response's last token counts

    @property
    def statistics(self) -> bool:
        """Whether the trained model's outputs include statistics."""
        ...

    @property
    def reading(self) -> Reading:
        """Reading of rows, by all models."""
        ...

    @property
    def sorts_batch(self) -> bool:
        """Whether a pair's loss needs its partners in the whole batch."""
        ...

    @property
    def num_values(self) -> int:
        """Number C of values that the metrics need of an example."""
        ...

    def losses(self, examples: ExampleOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute differentiable losses [B], and the metrics' values, float64 [B, C]."""
        ...

    def metrics(self, values: torch.Tensor) -> dict[str, float]:
        """Metrics by name, from the values [n, C] of all examples of a batch."""
        ...


class _PlainObjective:
    """Objective without token weights, in which every example has its own loss."""

    @property
    def reading(self) -> Reading:
        """Read every response token with weight 1."""
        return PLAIN

    @property
    def sorts_batch(self) -> bool:
        """Whether partners in the batch are needed."""
        return False


@dataclass(frozen=True)
class DPOObjective:
    """DPO and its family: a policy against a frozen reference."""

    config: DPOConfig
    token_metrics: bool
    reads_margins: ClassVar[bool] = False
    reads_ends: ClassVar[bool] = False

    @property
    def statistics(self) -> bool:
        """Whether outputs include statistics."""
        return self.token_metrics or self.config.reads_statistics

    @property
    def reading(self) -> Reading:
        """Read response tokens, weighted for LD-DPO; also prompts' if in the likelihood."""
        return Reading(
            tail_weight=self.config.ld_alpha, predict_prompts=self.config.nll_scope == "sequence"
        )

    @property
    def sorts_batch(self) -> bool:
        """Whether partners in the batch are needed."""
        return self.config.sorts_batch

    @property
    def num_values(self) -> int:
        """Number of values of an example."""
        return preference_metrics.num_values(self.statistics)

    def losses(self, examples: ExampleOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute losses and the metrics' values."""
        return dpo_losses(self.config, examples)

    def metrics(self, values: torch.Tensor) -> dict[str, float]:
        """Summarize the values."""
        return preference_metrics.summarize(values)


@dataclass(frozen=True)
class RewardObjective(_PlainObjective):
    """Bradley-Terry: a reward model learns to rank the chosen response above the rejected one."""

    config: RewardLossConfig
    reads_margins: ClassVar[bool] = True
    reads_ends: ClassVar[bool] = True

    @property
    def reading(self) -> Reading:
        """The reward at each response's last token."""
        return Reading(output_kind="responses")

    @property
    def statistics(self) -> bool:
        """Whether outputs include statistics."""
        return False

    @property
    def num_values(self) -> int:
        """Number of values of an example."""
        return reward_metrics.NUM_VALUES

    def losses(self, examples: ExampleOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute losses and the metrics' values."""
        chosen, rejected = examples.outputs[:, CHOSEN], examples.outputs[:, REJECTED]
        coefficient = self.config.center_rewards_coefficient
        losses = bradley_terry_loss(
            chosen, rejected, examples.labels, center_rewards_coefficient=coefficient
        )
        return losses, reward_metrics.pair_values(losses, chosen, rejected)

    def metrics(self, values: torch.Tensor) -> dict[str, float]:
        """Summarize the values."""
        return reward_metrics.summarize(values)


@dataclass(frozen=True)
class KTOObjective(_PlainObjective):
    """KTO and similar losses: a policy against a frozen reference, on single responses."""

    config: KTOConfig
    token_metrics: bool
    reads_margins: ClassVar[bool] = False
    reads_ends: ClassVar[bool] = False

    @property
    def statistics(self) -> bool:
        """Whether outputs include statistics."""
        return self.token_metrics

    @property
    def num_values(self) -> int:
        """Number of values of an example."""
        return unpaired_metrics.num_values(self.statistics)

    def losses(self, examples: ExampleOutputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute losses and the metrics' values."""
        sums = _sums(examples)
        logps, kl = sums.weighted[:, 0], examples.kl
        ratios = logps - examples.reference[:, 0]
        losses = kto_loss(ratios, examples.labels, kl, self.config)
        rewards = self.config.beta * ratios
        values = unpaired_metrics.response_values(losses, examples.labels, kl, rewards, logps)
        if sums.entropy is not None and sums.mean_logit is not None:
            token_values = unpaired_metrics.token_values(
                sums.entropy[:, 0], sums.mean_logit[:, 0], examples.lengths[:, 0]
            )
            values = torch.cat([values, token_values], dim=1)
        return losses, values

    def metrics(self, values: torch.Tensor) -> dict[str, float]:
        """Summarize the values."""
        return unpaired_metrics.summarize(values)


def objective_of(job: JobConfig) -> Objective:
    """Objective of the job's stage."""
    loss = getattr(job, STAGES[job.stage].loss)
    if isinstance(loss, RewardLossConfig):
        return RewardObjective(loss)
    if isinstance(loss, KTOConfig):
        return KTOObjective(loss, job.telemetry.token_metrics)
    return DPOObjective(loss, job.telemetry.token_metrics)


def num_responses(job: JobConfig) -> int:
    """Number K of responses of an example."""
    return 1 if STAGES[job.stage].data == "unpaired" else 2


def _sums(examples: ExampleOutputs) -> SequenceSums:
    outputs = examples.outputs
    return SequenceSums(*(outputs if outputs.dim() == 3 else (outputs,) * 2))


def dpo_losses(config: DPOConfig, pairs: ExampleOutputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute losses [B] and values [B, C] of B pairs under DPO."""
    sums = _sums(pairs)
    logps = PairLogps(
        chosen=sums.weighted[:, CHOSEN],
        rejected=sums.weighted[:, REJECTED],
        ref_chosen=pairs.reference[:, CHOSEN],
        ref_rejected=pairs.reference[:, REJECTED],
        chosen_lengths=pairs.lengths[:, CHOSEN],
        rejected_lengths=pairs.lengths[:, REJECTED],
        chosen_likelihood=sums.likelihood[:, CHOSEN],
        rejected_likelihood=sums.likelihood[:, REJECTED],
        mean_nll_length=pairs.mean_nll_length,
        partners=pairs.partners,
    )
    if sums.log_sum_squares is not None:
        chosen, rejected = sums.log_sum_squares.unbind(dim=1)
        logps = replace(logps, chosen_log_squares=chosen, rejected_log_squares=rejected)
    losses, chosen_rewards, rejected_rewards = preference_loss(logps, config)
    chosen, rejected = logps.chosen, logps.rejected
    if config.compares_means:
        chosen, rejected = logps.chosen_means, logps.rejected_means
    values = preference_metrics.pair_values(
        losses, chosen_rewards, rejected_rewards, chosen, rejected
    )
    if sums.entropy is not None and sums.mean_logit is not None and sums.is_top1 is not None:
        token_values = preference_metrics.token_values(
            sums.entropy, sums.mean_logit, sums.is_top1, pairs.lengths
        )
        values = torch.cat([values, token_values], dim=1)
    return losses, values
