"""Losses of preference data: for pairs, unpaired responses and rewards; formulas as in TRL 1.16.

Shapes: B pairs, or responses of unpaired data. Every loss is a tensor [B]; the caller divides by
the global number of examples. In the formulas ``c`` and ``r`` are the log-probabilities of the
chosen and the rejected response under the policy minus those under the reference, ``|y|`` is a
response's number of tokens, ``s`` the sigmoid.

A new loss of pairs is a row of ``PREFERENCE_LOSSES`` (its name and traits, in the config's section)
and a function ``NAME_loss`` here, named in ``LOSSES``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch.nn.functional import logsigmoid, relu

from puzzle_align.algos.logprobs import sum_by_slot
from puzzle_align.config.sections.preference import (
    DIVERGENCES,
    PREFERENCE_LOSSES,
    DPOConfig,
    KTOConfig,
)

# Upper bound of log p in ORPO's odds p / (1 - p), which are infinite at p = 1.
_MAX_MEAN_LOGPROB = -1e-7
# TRL's bounds for the alpha-divergence: an alpha this near to 1 counts as 1, and powers of ratios
# are at most exp(80), so that gradients in float32 do not overflow.
_NEAR_ONE, _MAX_EXPONENT = 1e-6, 80.0


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of B pairs, summed over a response's tokens; all tensors are [B].

    The reference's are zeros for losses without one. Lengths are numbers of response tokens, at
    least 1. Under LD-DPO the first four are weighted sums; ``chosen_likelihood`` and
    ``rejected_likelihood`` are always unweighted. If prompts are predicted, ``chosen_likelihood``
    includes the prompt's.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor
    chosen_likelihood: torch.Tensor
    rejected_likelihood: torch.Tensor
    # Mean number of tokens in a ``chosen_likelihood``, over all pairs whose losses are averaged.
    mean_nll_length: float
    # For WPO: logarithms of tokens' sums of squared probabilities, summed over a response.
    chosen_log_squares: torch.Tensor | None = None
    rejected_log_squares: torch.Tensor | None = None
    partners: torch.Tensor | None = None  # [B, 3] of ``sorted_partners``; None: B is the batch
    # Of rankings: a number below B, equal for pairs with the same chosen response, int64 [B].
    groups: torch.Tensor | None = None
    pairs_per_example: float = 1.0  # mean over the batch

    @property
    def chosen_ratios(self) -> torch.Tensor:
        """Log-ratios c of policy and reference on chosen responses."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> torch.Tensor:
        """Log-ratios r of policy and reference on rejected responses."""
        return self.rejected - self.ref_rejected

    @property
    def chosen_means(self) -> torch.Tensor:
        """The policy's mean log-probability of a token of the chosen response."""
        return self.chosen / self.chosen_lengths

    @property
    def rejected_means(self) -> torch.Tensor:
        """The policy's mean log-probability of a token of the rejected response."""
        return self.rejected / self.rejected_lengths


LossFunction = Callable[[PairLogps, DPOConfig], torch.Tensor]  # values [B], differentiable


def sigmoid_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """DPO, ``-log s(beta (c - r))``; with label smoothing cDPO (conservative)."""
    return _smoothed(_logits(logps, dpo), dpo.label_smoothing)


def sigmoid_norm_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """DPO on means over tokens: ``-log s(beta (c/|yc| - r/|yr|))``."""
    chosen, rejected = _mean_scores(logps, dpo)
    return -logsigmoid(dpo.beta * (chosen - rejected))


def ipo_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """IPO on means over tokens: ``(c/|yc| - r/|yr| - 1/(2 beta))^2``."""
    chosen, rejected = _mean_scores(logps, dpo)
    return (chosen - rejected - 1 / (2 * dpo.beta)) ** 2


def hinge_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """SLiC: ``max(0, 1 - beta (c - r))``."""
    return relu(1 - _logits(logps, dpo))


def robust_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """DPO's loss, corrected for the bias of labels that are flipped with probability e.

    ``(-(1-e) log s(x) + e log s(-x)) / (1 - 2e)`` with ``x = beta (c - r)``.
    """
    logits = _logits(logps, dpo)
    flipped = dpo.label_smoothing
    biased = -(1 - flipped) * logsigmoid(logits) + flipped * logsigmoid(-logits)
    return biased / (1 - 2 * flipped)


def exo_pair_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """EXO: the KL of ``(s(x), s(-x))`` to the labels' ``(1 - e, e)``, with ``x = beta (c - r)``."""
    logits, flipped = _logits(logps, dpo), dpo.label_smoothing
    won = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-flipped))
    return won + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(flipped))


def nca_pair_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """NCA: ``-log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2``."""
    chosen, rejected = dpo.beta * logps.chosen_ratios, dpo.beta * logps.rejected_ratios
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def bco_pair_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """BCO: ``-log s(beta c) - log s(-beta r)``; without the paper's reward shift, as in TRL."""
    return -logsigmoid(dpo.beta * logps.chosen_ratios) - logsigmoid(
        -dpo.beta * logps.rejected_ratios
    )


def sppo_hard_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """SPPO with hard labels: ``(c - 1/(2 beta))^2 + (r + 1/(2 beta))^2``."""
    half = 0.5 / dpo.beta
    return (logps.chosen_ratios - half) ** 2 + (logps.rejected_ratios + half) ** 2


def aot_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """AOT: DPO's loss on the batch's margins of policy and reference, each sorted.

    ``-log s(beta (p(i) - q(i)))`` with p the policy's chosen less rejected, q the reference's.
    """
    margins = logps.chosen - logps.rejected
    return _smoothed(dpo.beta * (margins - _partners(logps)[:, 0]), dpo.label_smoothing)


def aot_unpaired_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """AOT on the batch's c and r, each sorted: ``-log s(beta (c(i) - r(i)))``.

    Each term is the value of the pair of its c. The pair of its r adds only the gradient of r, with
    value 0: so the batch's gradient is complete even if the two pairs are on different ranks.
    """
    _, below, above = _partners(logps).unbind(dim=1)
    of_chosen = _smoothed(dpo.beta * (logps.chosen_ratios - below), dpo.label_smoothing)
    of_rejected = _smoothed(dpo.beta * (above - logps.rejected_ratios), dpo.label_smoothing)
    return of_chosen + (of_rejected - of_rejected.detach())


def apo_zero_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """APO-zero, chosen up and rejected down: ``1 - s(beta c) + s(beta r)``."""
    chosen = torch.sigmoid(dpo.beta * logps.chosen_ratios)
    return 1 - chosen + torch.sigmoid(dpo.beta * logps.rejected_ratios)


def apo_down_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """APO-down, both down, rejected more: ``s(beta c) + 1 - s(beta (c - r))``."""
    margin = torch.sigmoid(dpo.beta * (logps.chosen_ratios - logps.rejected_ratios))
    return torch.sigmoid(dpo.beta * logps.chosen_ratios) + 1 - margin


def discopop_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """DiscoPOP: ``-(1 - w) log s(x) + w exp(-x)``, ``x = beta (c - r)``, ``w = s(x / tau)``."""
    logits = _logits(logps, dpo)
    log_weight = logsigmoid(logits / dpo.discopop_tau)
    # Together in the exponent: far below 0 the second factor is 0, and the first infinite.
    return -logsigmoid(logits) * (1 - log_weight.exp()) + torch.exp(log_weight - logits)


def sft_loss(logps: PairLogps, _dpo: DPOConfig) -> torch.Tensor:
    """SFT: the chosen responses' negative log-likelihood, a mean over the whole batch's tokens."""
    return -logps.chosen_likelihood / logps.mean_nll_length


def simpo_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """SimPO: ``-log s(beta (mean chosen - mean rejected) - gamma)``, without a reference."""
    margin = dpo.beta * (logps.chosen_means - logps.rejected_means)
    return _smoothed(margin - dpo.simpo_gamma, dpo.label_smoothing)


def orpo_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """ORPO: ``-mean chosen - beta log s(log odds chosen - log odds rejected)``, no reference.

    Odds are of the exponentials of the mean log-probabilities. ``dpo.nll_scope`` selects the first
    term: over the response, as in the paper, or (``sequence``) with the prompt, as in TRL.
    """
    log_odds = _log_odds(logps.chosen_means) - _log_odds(logps.rejected_means)
    return _nll(logps, dpo) - dpo.beta * logsigmoid(log_odds)


def plackett_luce_loss(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """DPO of a whole ranking (arXiv 2305.18290, appendix A.3), a mean over the batch's rankings.

    See ``ranking_losses``; the scores are ``beta`` times log-ratios. Of pairs it is ``sigmoid``.
    """
    return ranking_losses(_logits(logps, dpo), logps.groups, logps.pairs_per_example)


LOSSES: dict[str, LossFunction] = {
    "sigmoid": sigmoid_loss,
    "sigmoid_norm": sigmoid_norm_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "robust": robust_loss,
    "exo_pair": exo_pair_loss,
    "nca_pair": nca_pair_loss,
    "bco_pair": bco_pair_loss,
    "sppo_hard": sppo_hard_loss,
    "aot": aot_loss,
    "aot_unpaired": aot_unpaired_loss,
    "apo_zero": apo_zero_loss,
    "apo_down": apo_down_loss,
    "discopop": discopop_loss,
    "sft": sft_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
    "plackett_luce": plackett_luce_loss,
}
assert LOSSES.keys() == PREFERENCE_LOSSES.keys()


def preference_loss(
    logps: PairLogps, dpo: DPOConfig, function: LossFunction | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(losses, rewards_chosen, rewards_rejected)``, [B] each; rewards are detached.

    ``dpo.use_weighting`` multiplies every pair's loss by WPO's weight. Then the chosen response's
    negative log-likelihood is added, times ``dpo.sft_loss_weight``. Rewards are beta times the
    log-ratio to the reference; for losses without a reference, beta times the mean log-probability
    (as TRL logs them). ``function`` is computed in place of ``dpo.loss_type``.
    """
    if function is not None:
        losses = function(logps, dpo)
    else:
        weighted = (weight * LOSSES[name](logps, dpo) for name, weight in dpo.losses.items())
        losses = reduce(torch.add, weighted)
    if dpo.use_weighting:
        losses = losses * _pair_weights(logps)
    if dpo.sft_loss_weight:
        losses = losses + dpo.sft_loss_weight * _nll(logps, dpo)
    if dpo.compares_means:
        chosen, rejected = logps.chosen_means, logps.rejected_means
    else:
        chosen, rejected = logps.chosen_ratios, logps.rejected_ratios
    return losses, dpo.beta * chosen.detach(), dpo.beta * rejected.detach()


@torch.no_grad()
def sorted_partners(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Values that AOT compares every pair of a batch with, [n, 3], matched by sorting the batch.

    Columns: for ``aot``, the reference's margin (chosen less rejected) of the same sorted index as
    the pair's policy margin; for ``aot_unpaired``, the r of the same sorted index as the pair's c,
    and the c of the same sorted index as its r.

    Args:
        policy, reference: summed log-probabilities [n, 2] of the whole batch, chosen first.
    """
    ratios = policy - reference
    of_policy, of_reference = policy[:, 0] - policy[:, 1], reference[:, 0] - reference[:, 1]
    matched = ((of_policy, of_reference), ratios.unbind(dim=1), ratios.flip(1).unbind(dim=1))
    partners = policy.new_empty(len(policy), len(matched))
    for column, (values, others) in enumerate(matched):
        partners[values.argsort(stable=True), column] = others.sort().values
    return partners


def _partners(logps: PairLogps) -> torch.Tensor:
    if logps.partners is not None:
        return logps.partners
    return sorted_partners(
        torch.stack([logps.chosen, logps.rejected], dim=1),
        torch.stack([logps.ref_chosen, logps.ref_rejected], dim=1),
    )


def _nll(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """Chosen response's negative log-likelihood, over its length or the batch's mean length."""
    if dpo.nll_scope == "response":
        return -logps.chosen_likelihood / logps.chosen_lengths
    return -logps.chosen_likelihood / logps.mean_nll_length


def _pair_weights(logps: PairLogps) -> torch.Tensor:
    """WPO's weights, detached: the product of both responses' ``exp(mean(log p - log sum p^2))``.

    p are the policy's probabilities at a token; the sum is over the vocabulary.
    """
    assert logps.chosen_log_squares is not None and logps.rejected_log_squares is not None
    chosen = logps.chosen_likelihood - logps.chosen_log_squares
    rejected = logps.rejected_likelihood - logps.rejected_log_squares
    means = chosen / logps.chosen_lengths + rejected / logps.rejected_lengths
    return torch.exp(means).detach()


def _logits(logps: PairLogps, dpo: DPOConfig) -> torch.Tensor:
    """``beta (c - r)``, with the scores of ``dpo.f_divergence_type``."""
    chosen, rejected = _scores(logps, dpo)
    return dpo.beta * (chosen - rejected)


def _mean_scores(logps: PairLogps, dpo: DPOConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """``c/|yc|`` and ``r/|yr|``, with the scores of ``dpo.f_divergence_type``."""
    chosen, rejected = _scores(logps, dpo)
    return chosen / logps.chosen_lengths, rejected / logps.rejected_lengths


def _scores(logps: PairLogps, dpo: DPOConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """f-DPO's scores ``f'(u)`` of the ratios u of policy to reference; ``log u`` for reverse KL.

    They are up to an additive constant, which is the same for both responses.
    """
    slope = _SLOPES[dpo.f_divergence_type]
    alpha = dpo.f_alpha_divergence_coef
    return slope(logps.chosen_ratios, alpha), slope(logps.rejected_ratios, alpha)


def _alpha_slope(log_ratios: torch.Tensor, alpha: float) -> torch.Tensor:
    """``(u^(alpha-1) - 1) / (alpha - 1)``; for alpha 1 its limit, ``log u``."""
    if abs(alpha - 1) < _NEAR_ONE:
        return log_ratios
    powers = torch.exp(((alpha - 1) * log_ratios).clamp(max=_MAX_EXPONENT))
    return (powers - 1) / (alpha - 1)


_SLOPES: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "reverse_kl": lambda log_ratios, _: log_ratios,
    "forward_kl": lambda log_ratios, _: 1 - torch.exp(-log_ratios),
    "js_divergence": lambda log_ratios, _: math.log(2) + logsigmoid(log_ratios),
    "alpha_divergence": _alpha_slope,
}
assert _SLOPES.keys() == set(DIVERGENCES)


def _smoothed(logits: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """``-(1-e) log s(x) - e log s(-x)``."""
    right = -(1 - label_smoothing) * logsigmoid(logits)
    return right - label_smoothing * logsigmoid(-logits) if label_smoothing else right


def _log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """``log(p / (1 - p))`` of ``p = exp(x)``, stable for p near 0 and near 1."""
    x = mean_logprobs.clamp(max=_MAX_MEAN_LOGPROB)
    log_rest = torch.where(x < -math.log(2), torch.log1p(-x.exp()), torch.log(-torch.expm1(x)))
    return x - log_rest


def ranking_losses(
    margins: torch.Tensor, groups: torch.Tensor | None, pairs_per_example: float = 1.0
) -> torch.Tensor:
    """Negative log-probabilities of rankings under Plackett and Luce, divided among their pairs.

    A response of score x contributes ``log(1 + sum exp(x' - x))`` over all worse x': the negative
    log-probability of being drawn before them. Equally good responses are not compared. Each
    contribution is shared equally by the pairs with that better response. The result is float64
    [P], scaled so that its mean over a batch's pairs is a mean over its rankings.

    Args:
        margins: score of the better response less that of the worse one, [P].
        groups: equal numbers, below P, for pairs with the same better response, int64 [P]; None:
            no two pairs have the same, and the losses are those of Bradley and Terry.
        pairs_per_example: mean over the whole batch.
    """
    if groups is None:
        return -logsigmoid(margins)
    ones = torch.ones_like(margins, dtype=torch.float64)
    largest = torch.zeros_like(ones).scatter_reduce(0, groups, -margins.detach().double(), "amax")
    exponentials = torch.exp(-margins - largest[groups])
    sums = torch.exp(-largest) + sum_by_slot(exponentials, groups, len(ones))
    shares = sum_by_slot(ones, groups, len(ones)).clamp(min=1)  # some numbers stand for no pair
    return pairs_per_example * ((largest + sums.log()) / shares)[groups]


def bradley_terry_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margins: torch.Tensor,
    *,
    center_rewards_coefficient: float = 0.0,
    groups: torch.Tensor | None = None,
    pairs_per_example: float = 1.0,
) -> torch.Tensor:
    """``-log s(c - r - margin) + coefficient (c + r)^2``, [B]; with groups ``ranking_losses``.

    Args:
        chosen: rewards c of the chosen responses, [B].
        rejected: rewards r of the rejected ones, [B].
        margins: required differences of c and r, [B]; 0 without margins.
        center_rewards_coefficient: weight of a term that draws the mean of a pair's rewards to 0;
            the first term depends on their difference alone.
        groups, pairs_per_example: of ``ranking_losses``.
    """
    losses = ranking_losses(chosen - rejected - margins, groups, pairs_per_example)
    if center_rewards_coefficient:
        losses = losses + center_rewards_coefficient * (chosen + rejected) ** 2
    return losses


def kto_loss(
    log_ratios: torch.Tensor, labels: torch.Tensor, kl: float, kto: KTOConfig
) -> torch.Tensor:
    """KTO's losses: ``w (1 - s(beta (r - z)))`` if desirable, else ``w (1 - s(beta (z - r)))``.

    In KTO (arXiv 2402.01306, equation 7) z is the batch's KL divergence; in the unpaired form of
    APO-zero (arXiv 2408.06266, equation 7) it is 0. w is ``desirable_weight`` or
    ``undesirable_weight``. The result is [B], differentiable.

    Args:
        log_ratios: r, the policy's summed log-probability less the reference's, [B].
        labels: 1 for desirable responses, 0 for others, [B].
        kl: z, from ``kl_divergence``; 0 if ``kto.estimates_kl`` is false.
    """
    scaled = kto.beta * (log_ratios - kl)
    return torch.where(
        labels > 0,
        kto.desirable_weight * torch.sigmoid(-scaled),
        kto.undesirable_weight * torch.sigmoid(scaled),
    )


def kl_divergence(policy: torch.Tensor, reference: torch.Tensor) -> float:
    """KTO's z: estimated KL of policy to reference on responses to other prompts, at least 0.

    Args:
        policy, reference: summed log-probabilities of a batch's mismatched responses, [B].
    """
    return (policy - reference).mean().clamp(min=0).item()
