"""Objectives of the preference stages: losses of examples, and metrics.

Shapes: B examples of K responses, C values a loss, P losses. Examples are pairs (K = 2: chosen,
rejected; P = B) or rankings (K responses, fewer for some; P comparisons of two of them) or, in
unpaired data, single responses (K = 1; P = B).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from puzzle_align.algos.preference import (
    LossFunction,
    PairLogps,
    bradley_terry_loss,
    kto_loss,
    preference_loss,
)
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.preference import DPOConfig, KTOConfig, RewardLossConfig
from puzzle_align.config.stages import STAGES, UNPAIRED
from puzzle_align.runtime.columns import REFERENCE
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.runtime.row_input import (
    PLAIN,
    Comparisons,
    Reading,
    RowInput,
    SequenceSums,
    sum_responses,
)
from puzzle_align.stages.rewards.functions import import_function, raised_fault
from puzzle_align.telemetry import preference_metrics

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
    partners: torch.Tensor | None = None  # [P, 3] of ``sorted_partners``; None: B is the batch
    kl: float = 0.0  # of unpaired data, see ``kl_divergence``
    comparisons: Comparisons | None = None  # of rankings
    pairs_per_example: float = 1.0  # mean over the loss's batch

    def compared(self, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of the better and the worse responses."""
        return split(column, self.comparisons)


def split(
    column: torch.Tensor, comparisons: Comparisons | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the better and the worse responses, [P] each, from those of all, [B, K]."""
    if comparisons is None:
        return column[:, CHOSEN], column[:, REJECTED]
    cells = column.flatten()
    return cells[comparisons.better], cells[comparisons.worse]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Loss over examples, and its metrics. The caller divides by the denominator."""

    # Differentiable losses [P], and the metrics' values, float64 [P, C].
    losses: Callable[[ExampleOutputs], tuple[torch.Tensor, torch.Tensor]]
    metrics: Callable[[torch.Tensor], dict[str, float]]  # from the values of a whole batch
    num_values: int  # C
    reading: Reading = PLAIN  # of rows, by all models
    statistics: bool = False  # whether the trained model's outputs include statistics
    sorts_batch: bool = False  # whether a pair's loss needs its partners in the whole batch
    reads_reference: bool = True  # whether the loss or a metric reads the reference's column
    reads_margins: bool = False  # whether the loss reads margins of the data
    reads_ends: bool = False  # whether only a response's last token counts


def objective_of(job: JobConfig) -> Objective:
    """Objective of the job's stage."""
    loss, token_metrics = getattr(job, STAGES[job.stage].loss), job.telemetry.token_metrics
    if isinstance(loss, RewardLossConfig):
        return Objective(
            losses=partial(reward_losses, loss),
            metrics=preference_metrics.summarize_rewards,
            num_values=len(preference_metrics.REWARD_COLUMNS),
            reading=Reading(output_kind="responses"),
            reads_reference=False,
            reads_margins=True,
            reads_ends=True,
        )
    if isinstance(loss, KTOConfig):
        return Objective(
            losses=partial(kto_losses, loss),
            metrics=preference_metrics.summarize_responses,
            num_values=preference_metrics.num_response_values(token_metrics),
            statistics=token_metrics,
        )
    statistics = token_metrics or loss.reads_statistics
    function = None
    if loss.loss_function is not None:
        function = _users_loss(loss.loss_function)
    return Objective(
        losses=partial(dpo_losses, loss, function=function),
        metrics=preference_metrics.summarize,
        num_values=preference_metrics.num_values(statistics),
        reading=Reading(tail_weight=loss.ld_alpha, predict_prompts=loss.nll_scope == "sequence"),
        statistics=statistics,
        sorts_batch=loss.sorts_batch,
        reads_reference=loss.uses_reference,
    )


def _users_loss(name: str) -> LossFunction:
    """Import ``dpo.loss_function``; CannotGoOn, one line, if it cannot be, raises or is no loss."""
    key = "dpo.loss_function"
    function = import_function(name, key)

    def loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
        if not len(logps.chosen):  # an empty row: a data rank had no more
            return logps.chosen
        try:
            losses = function(logps, dpo)
        except Exception as error:
            raise raised_fault(name, error, key) from error
        if not torch.is_tensor(losses) or losses.shape != logps.chosen.shape:
            shape = [*losses.shape] if torch.is_tensor(losses) else type(losses).__name__
            wanted = f"a tensor {[*logps.chosen.shape]}, a loss for each pair"
            raise CannotGoOn(f"{key}={name}: returned {shape}; return {wanted}")
        if logps.chosen.requires_grad and not losses.requires_grad:
            what = "returned values without a gradient; compute them from logps, not detached"
            raise CannotGoOn(f"{key}={name}: {what}")
        return losses

    return loss


def num_responses(job: JobConfig) -> int:
    """Number K of responses of an example."""
    return 1 if job.stage in UNPAIRED else 2


def _sums(examples: ExampleOutputs) -> SequenceSums:
    outputs = examples.outputs
    return SequenceSums(*(outputs if outputs.dim() == 3 else (outputs,) * 2))


def dpo_losses(
    config: DPOConfig, pairs: ExampleOutputs, function: LossFunction | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute losses [P] and values [P, C] of P pairs under DPO, or under the user's function."""
    sums = _sums(pairs)
    columns = (sums.weighted, pairs.reference, pairs.lengths, sums.likelihood)
    (chosen, rejected), references, lengths, likelihoods = map(pairs.compared, columns)
    logps = PairLogps(
        chosen,
        rejected,
        *references,
        *lengths,
        *likelihoods,
        mean_nll_length=pairs.mean_nll_length,
        partners=pairs.partners,
        groups=None if pairs.comparisons is None else pairs.comparisons.groups,
        pairs_per_example=pairs.pairs_per_example,
    )
    if sums.log_sum_squares is not None:
        chosen, rejected = pairs.compared(sums.log_sum_squares)
        logps = replace(logps, chosen_log_squares=chosen, rejected_log_squares=rejected)
    losses, chosen_rewards, rejected_rewards = preference_loss(logps, config, function)
    chosen, rejected = logps.chosen, logps.rejected
    if config.compares_means:
        chosen, rejected = logps.chosen_means, logps.rejected_means
    values = preference_metrics.pair_values(
        losses, chosen_rewards, rejected_rewards, chosen, rejected
    )
    if sums.entropy is not None and sums.mean_logit is not None and sums.is_top1 is not None:
        columns = (sums.entropy, sums.mean_logit, sums.is_top1, pairs.lengths)
        token_values = preference_metrics.token_values(
            *(torch.stack(pairs.compared(column), dim=1) for column in columns)
        )
        values = torch.cat([values, token_values], dim=1)
    return losses, values


def kto_losses(config: KTOConfig, examples: ExampleOutputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute losses [B] and values [B, C] of B responses under KTO or a similar loss."""
    sums = _sums(examples)
    logps, kl = sums.weighted[:, 0], examples.kl
    ratios = logps - examples.reference[:, 0]
    losses = kto_loss(ratios, examples.labels, kl, config)
    kls = torch.full_like(examples.labels, kl)
    columns = [losses, examples.labels, kls, config.beta * ratios, logps]
    if sums.entropy is not None and sums.mean_logit is not None:
        columns += [sums.entropy[:, 0], sums.mean_logit[:, 0], examples.lengths[:, 0]]
    return losses, preference_metrics.rows(*columns)


def reward_losses(
    config: RewardLossConfig, pairs: ExampleOutputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute losses [P] and values [P, C] of P pairs under Bradley-Terry or Plackett-Luce."""
    chosen, rejected = pairs.compared(pairs.outputs)
    margins, _ = pairs.compared(pairs.labels[:, None].expand_as(pairs.outputs))
    groups = None
    if config.loss_type == "plackett_luce" and pairs.comparisons is not None:
        groups = pairs.comparisons.groups
    losses = bradley_terry_loss(
        chosen,
        rejected,
        margins,
        center_rewards_coefficient=config.center_rewards_coefficient,
        groups=groups,
        pairs_per_example=pairs.pairs_per_example,
    )
    return losses, preference_metrics.rows(losses, chosen, rejected)


@dataclass(frozen=True)
class ExampleLoss:
    """Loss of a step on one row: its share of the mean over the step's losses.

    ``values`` [P, C] collects, row by row, the metrics' values of every loss.
    """

    objective: Objective
    values: torch.Tensor
    mean_nll_length: float
    kl: float = 0.0
    partners: torch.Tensor | None = None  # [P, 3] of ``sorted_partners``, of the step
    pairs_per_example: float = 1.0

    def __call__(
        self, row: RowInput, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the row's share, and store the values of its losses."""
        numbers = row.examples if row.comparisons is None else row.comparisons.numbers
        examples = ExampleOutputs(
            outputs=sum_responses(row, outputs),
            reference=reference_column(self.objective, columns, row.lengths),
            lengths=row.lengths,
            labels=row.labels,
            mean_nll_length=self.mean_nll_length,
            partners=None if self.partners is None else self.partners[numbers],
            kl=self.kl,
            comparisons=row.comparisons,
            pairs_per_example=self.pairs_per_example,
        )
        losses, values = self.objective.losses(examples)
        self.values[numbers] = values
        return losses.sum() / len(self.values)


def reference_column(
    objective: Objective, columns: Mapping[str, torch.Tensor], lengths: torch.Tensor
) -> torch.Tensor:
    """Take the reference's column [B, K]; zeros for losses without a reference."""
    if objective.reads_reference:
        return columns[REFERENCE]
    return torch.zeros_like(lengths, dtype=torch.float64)
