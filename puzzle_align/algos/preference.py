"""Preference losses of pairs from their summed log-probabilities; formulas as TRL 1.x has them.

Shapes: B pairs. Every loss gives one value a pair; the caller divides by the global number of
pairs. In the formulas ``c`` and ``r`` are the policy's log-probabilities of chosen and rejected
minus the reference's, ``|y|`` a response's tokens.

A new loss is one function in ``LOSSES`` and one value of ``dpo.loss_type`` (and, if it has no
reference or takes label smoothing, its traits in ``PREFERENCE_LOSSES``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid, relu

from puzzle_align.config.sections.preference import PREFERENCE_LOSSES

# Nearest to certainty that ORPO's odds p / (1 - p) take a response: beyond, they are infinite.
_MAX_MEAN_LOGPROB = -1e-7


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of B pairs, summed over a response's tokens; all tensors are [B].

    The reference's are zeros where the loss uses none. Lengths are the responses' tokens.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor

    @property
    def chosen_ratios(self) -> torch.Tensor:
        """Policy over reference, in logarithms: c."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> torch.Tensor:
        """Policy over reference, in logarithms: r."""
        return self.rejected - self.ref_rejected

    @property
    def chosen_means(self) -> torch.Tensor:
        """The policy's mean log-probability of a token of the chosen response."""
        return self.chosen / self.chosen_lengths.clamp(min=1)

    @property
    def rejected_means(self) -> torch.Tensor:
        """The policy's mean log-probability of a token of the rejected response."""
        return self.rejected / self.rejected_lengths.clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What the losses are parametrised by; each uses those its formula names."""

    beta: float
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0


def sigmoid_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """DPO, ``-log s(beta (c - r))``; with label smoothing cDPO (conservative)."""
    logits = options.beta * (logps.chosen_ratios - logps.rejected_ratios)
    return _smoothed(logits, options.label_smoothing)


def ipo_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """IPO on means over tokens: ``(c/|yc| - r/|yr| - 1/(2 beta))^2``."""
    chosen = logps.chosen_ratios / logps.chosen_lengths.clamp(min=1)
    rejected = logps.rejected_ratios / logps.rejected_lengths.clamp(min=1)
    return (chosen - rejected - 1 / (2 * options.beta)) ** 2


def hinge_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """SLiC: ``max(0, 1 - beta (c - r))``."""
    return relu(1 - options.beta * (logps.chosen_ratios - logps.rejected_ratios))


def robust_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """DPO's loss without the bias that labels flipped with probability e give it.

    ``(-(1-e) log s(x) + e log s(-x)) / (1 - 2e)`` with ``x = beta (c - r)``.
    """
    logits = options.beta * (logps.chosen_ratios - logps.rejected_ratios)
    flipped = options.label_smoothing
    biased = -(1 - flipped) * logsigmoid(logits) + flipped * logsigmoid(-logits)
    return biased / (1 - 2 * flipped)


def apo_zero_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """APO-zero, chosen up and rejected down: ``1 - s(beta c) + s(beta r)``."""
    chosen = torch.sigmoid(options.beta * logps.chosen_ratios)
    return 1 - chosen + torch.sigmoid(options.beta * logps.rejected_ratios)


def apo_down_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """APO-down, both down, rejected more: ``s(beta c) + 1 - s(beta (c - r))``."""
    margin = torch.sigmoid(options.beta * (logps.chosen_ratios - logps.rejected_ratios))
    return torch.sigmoid(options.beta * logps.chosen_ratios) + 1 - margin


def simpo_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """SimPO: ``-log s(beta (mean chosen - mean rejected) - gamma)``, without a reference."""
    margin = options.beta * (logps.chosen_means - logps.rejected_means)
    return _smoothed(margin - options.simpo_gamma, options.label_smoothing)


def orpo_loss(logps: PairLogps, options: LossOptions) -> torch.Tensor:
    """ORPO: ``-mean chosen - beta log s(log odds chosen - log odds rejected)``, no reference.

    The odds are those of the mean log-probabilities. The first term is over the response, as in
    the paper; TRL takes it over prompt and response.
    """
    log_odds = _log_odds(logps.chosen_means) - _log_odds(logps.rejected_means)
    return -logps.chosen_means - options.beta * logsigmoid(log_odds)


LOSSES: dict[str, Callable[[PairLogps, LossOptions], torch.Tensor]] = {
    "sigmoid": sigmoid_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "robust": robust_loss,
    "apo_zero": apo_zero_loss,
    "apo_down": apo_down_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
}


def preference_loss(
    loss_type: str,
    logps: PairLogps,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.0,
    sft_loss_weight: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(losses, rewards_chosen, rewards_rejected)``, [B] each; rewards are detached.

    ``sft_loss_weight`` adds so many times the negative log-likelihood of the chosen response, a
    mean over the tokens of each pair's response. Rewards are beta times the log-ratio to the
    reference, or, where the loss has none, beta times the mean log-probability (as TRL logs them).
    """
    options = LossOptions(beta=beta, label_smoothing=label_smoothing, simpo_gamma=simpo_gamma)
    losses = LOSSES[loss_type](logps, options)
    if sft_loss_weight:
        losses = losses - sft_loss_weight * logps.chosen_means
    if not PREFERENCE_LOSSES[loss_type].uses_reference:
        chosen, rejected = logps.chosen_means, logps.rejected_means
    else:
        chosen, rejected = logps.chosen_ratios, logps.rejected_ratios
    return losses, beta * chosen.detach(), beta * rejected.detach()


def _smoothed(logits: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """``-(1-e) log s(x) - e log s(-x)``."""
    right = -(1 - label_smoothing) * logsigmoid(logits)
    return right - label_smoothing * logsigmoid(-logits) if label_smoothing else right


def _log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """``log(p / (1 - p))`` of ``p = exp(x)``, stable for p near 0 and near 1."""
    x = mean_logprobs.clamp(max=_MAX_MEAN_LOGPROB)
    log_rest = torch.where(x < -math.log(2), torch.log1p(-x.exp()), torch.log(-torch.expm1(x)))
    return x - log_rest
