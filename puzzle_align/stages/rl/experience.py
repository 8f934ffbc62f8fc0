"""Experience: token rewards, advantages and returns from sampled and scored responses.

Shapes: n samples that this rank owns, T tokens of the longest one. In padded tensors a sample
is [T], true in ``mask`` at its tokens.

Every input of training must be finite in float32. Other numbers raise an error as soon as they
appear, before sums over all samples spread them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from puzzle_align.algos.advantages import (
    KLEstimator,
    deviation_sums,
    kl_estimates,
    moment_sums,
    response_scores,
    token_rewards,
    unbiased_variance,
    whiten,
)
from puzzle_align.algos.estimators import Samples, estimator
from puzzle_align.algos.ppo import sampling_corrections
from puzzle_align.config.sections.rl import PPOConfig
from puzzle_align.files.typed import LARGEST_FP32
from puzzle_align.runtime.columns import Items, Table
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl.rewards import Rewarded
from puzzle_align.stages.rl.rollout import Rollout
from puzzle_align.telemetry.ppo_metrics import Spread, rollout_sums, spread_of

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]

_LEARNED = ("old_logps", "ref_logps", "advantages")
_VALUED = ("old_values", "returns")
KEPT = "kept"  # 0 in a response that the policy's loss leaves out, else 1
CORRECTION = "correction"  # factor of the policy's loss, see ``sampling_corrections``


def columns_to_learn(config: PPOConfig, has_critic: bool) -> tuple[str, ...]:
    """Names of the columns by token that training reads, in the order of ``Experience.columns``."""
    further = {
        KEPT: config.mask_truncated_completions,
        CORRECTION: config.importance_sampling_mode is not None,
    }
    names = (*_LEARNED, *_VALUED * has_critic)
    return (*names, *(name for name, is_read in further.items() if is_read))


@dataclass(frozen=True)
class Scored:
    """Scored samples of one owner: padded float64 tensors."""

    samples: Sequence[int]
    mask: torch.Tensor  # bool [n, T]
    stopped: torch.Tensor  # bool [n]
    logps: torch.Tensor  # [n, T], under the actor that sampled them
    ref_logps: torch.Tensor  # [n, T]; without a reference, the actor's
    scores: torch.Tensor  # [n], from reward model and functions; NaN if none applies
    prompts: torch.Tensor  # int64 [n], of the iteration
    values: torch.Tensor | None = None  # [n, T]; None without a critic
    final_values: torch.Tensor | None = None  # [n], of the states after the last tokens
    baselines: torch.Tensor | None = None  # [n], shaped scores of greedy responses
    sampled_logps: torch.Tensor | None = None  # [n, T], of sampling; None if ``logps`` are these


@dataclass(frozen=True)
class Experience:
    """Inputs of training for an owner's samples, and values to report."""

    scored: Scored
    columns: dict[str, Items]  # ``columns_to_learn``, by sample
    scores: torch.Tensor  # [n], clipped and less the penalty; NaN as above
    kls: torch.Tensor  # [n, T], estimated with k1
    rewards: torch.Tensor  # [n, T], of the tokens, before whitening
    corrections: torch.Tensor | None = None  # [n, T]
    by_response: bool = False  # whether a response's corrections are one
    returns: torch.Tensor | None = None  # [n, T]; None without a critic

    def sums(self) -> torch.Tensor:
        """Sums over the samples, for ``telemetry.ppo_metrics.rollout_metrics``."""
        return rollout_sums(
            scores=self.scores,
            rewards=self.rewards,
            kls=self.kls,
            logps=self.scored.logps,
            stopped=self.scored.stopped,
            mask=self.scored.mask,
            prompts=self.scored.prompts,
            values=self.scored.values,
            returns=self.returns,
        )

    def off_policy(self) -> tuple[Spread, Spread]:
        """Spreads of the log-probabilities' differences from sampling, and of the corrections."""
        scored, none = self.scored, torch.zeros(0)
        differences = corrections = none
        if scored.sampled_logps is not None:
            differences = (scored.logps - scored.sampled_logps).abs()[scored.mask]
        if self.corrections is not None:
            corrections = self.corrections[scored.mask]
            if self.by_response:
                corrections = self.corrections[:, :1][scored.mask[:, :1]]
        return spread_of(differences), spread_of(corrections)


def scored_of(rollout: Rollout, table: Table, rewarded: Rewarded) -> Scored:
    """Read the samples that this rank owns from its table, with their rewards."""
    samples = [*rollout.sampled]
    lengths = torch.from_numpy(rollout.lengths[samples])
    width = int(lengths.max()) if samples else 0
    columns = table.by_token
    logps, values = _padded(columns["logps"], samples, lengths), columns.get("values")
    sampled = {s: response.log_probs for s, response in rollout.sampled.items()}
    is_new = any(columns["logps"][s] is not sampled[s] for s in samples)
    scored = Scored(
        samples=samples,
        mask=torch.arange(width) < lengths[:, None],
        stopped=torch.from_numpy(rollout.stopped[samples]),
        logps=logps,
        ref_logps=(
            _padded(columns["ref_logps"], samples, lengths) if "ref_logps" in columns else logps
        ),
        scores=torch.from_numpy(rewarded.scores),
        baselines=None if rewarded.baselines is None else torch.from_numpy(rewarded.baselines),
        prompts=torch.tensor([s // rollout.num_generations for s in samples], dtype=torch.int64),
        sampled_logps=_padded(sampled, samples, lengths) if is_new else None,
    )
    if values is None:
        return scored
    last = torch.tensor([values[s][-1] for s in samples], dtype=torch.float64)
    return replace(scored, values=_padded(values, samples, lengths), final_values=last)


def shaped_scores(config: PPOConfig, rollout: Rollout, rewarded: Rewarded) -> torch.Tensor:
    """Scores of this rank's samples as they are trained on, float64 [n]; NaN without a score."""
    return response_scores(
        torch.from_numpy(rewarded.scores),
        torch.from_numpy(rollout.stopped[[*rollout.sampled]]),
        clip=config.cliprange_reward,
        missing_eos_penalty=config.missing_eos_penalty,
    )


def _padded(items: Items, samples: Sequence[int], lengths: torch.Tensor) -> torch.Tensor:
    """Pad the values of every sample's tokens: float64 [n, T], zeros beyond."""
    width = int(lengths.max()) if samples else 0
    table = torch.zeros(len(samples), width, dtype=torch.float64)
    for lane, (sample, length) in enumerate(zip(samples, lengths.tolist(), strict=True)):
        table[lane, :length] = torch.from_numpy(items[sample][:length])
    return table


def make_experience(
    config: PPOConfig,
    scored: Scored,
    kl_coef: float,
    sum_over_ranks: SumOverRanks,
) -> Experience:
    """Make token rewards and advantages of an owner's samples. Collective if they are whitened.

    The tokens of a sample without a score have advantages of 0 and the critic's values as returns,
    and are left out of whitening. (TRL's GRPOTrainer does the same to the advantages of completions
    to which no reward function applies.)

    Args:
        kl_coef: the current coefficient of the KL penalty.
        sum_over_ranks: adds the owners' sums, float64 [2].

    Raises:
        CannotGoOn: for a number that is not finite, or overflows float32.
    """
    mask = scored.mask
    _check_scored(scored)
    kl_estimator = cast(KLEstimator, config.kl_estimator)
    penalties = kl_estimates(scored.logps, scored.ref_logps, kl_estimator, mask)
    scores = response_scores(
        scored.scores,
        scored.stopped,
        clip=config.cliprange_reward,
        missing_eos_penalty=config.missing_eos_penalty,
    )
    in_reward = 0.0 if config.use_kl_loss else kl_coef
    has_score = ~scores.isnan()
    known = mask & has_score[:, None]
    paid = scores.masked_fill(~has_score, 0.0)
    rewards = token_rewards(paid, penalties, mask, kl_coef=in_reward)
    _check(scored.samples, "the reward less the KL", rewards)
    shaped = rewards
    if config.whiten_rewards:
        shaped = _whitened(rewards, known, sum_over_ranks, shift_mean=False)
    advantages, returns = _estimated(config, scored, shaped, has_score, sum_over_ranks)
    if config.whiten_advantages:
        advantages = _whitened(advantages, known, sum_over_ranks, shift_mean=True)
    _check(scored.samples, "the advantage", advantages)
    if returns is not None:
        _check(scored.samples, "the return", returns)
    kls = kl_estimates(scored.logps, scored.ref_logps, "k1", mask)
    corrections = None
    if config.importance_sampling_mode is not None:
        corrections = sampling_corrections(
            scored.logps,
            scored.logps if scored.sampled_logps is None else scored.sampled_logps,
            mask,
            mode=config.importance_sampling_mode,
            cap=config.importance_sampling_cap,
        )
    columns = _columns(config, scored, advantages, returns, corrections)
    by_response = (config.importance_sampling_mode or "").startswith("sequence")
    return Experience(scored, columns, scores, kls, rewards, corrections, by_response, returns)


def _estimated(
    config: PPOConfig,
    scored: Scored,
    rewards: torch.Tensor,
    has_score: torch.Tensor,
    sum_over_ranks: SumOverRanks,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages and returns [n, T] by the config's estimator; no returns without a critic."""
    # A truncated response has a score as well: it ends the episode.
    ended = scored.stopped if config.bootstrap_truncated else torch.ones_like(scored.stopped)
    samples = Samples(
        rewards=rewards,
        mask=scored.mask,
        has_score=has_score,
        ended=ended,
        prompts=scored.prompts,
        gamma=config.gamma,
        lam=config.lam,
        values=scored.values,
        final_values=scored.final_values,
        baselines=scored.baselines,
        scale_rewards=config.scale_rewards,
    )
    if config.estimator.scales and config.scale_rewards == "batch":
        totals = samples.of_responses()
        sums = sum_over_ranks(moment_sums(totals, has_score))
        deviations = sum_over_ranks(deviation_sums(totals, has_score, sums))
        samples = replace(samples, batch_std=unbiased_variance(sums, deviations).sqrt())
    advantages, returns = estimator(config.advantage_estimator)(samples)
    known = scored.mask & has_score[:, None]
    if returns is not None and scored.values is not None:
        returns = torch.where(known, returns, scored.values)
    return advantages.masked_fill(~known, 0.0), returns


def _columns(
    config: PPOConfig,
    scored: Scored,
    advantages: torch.Tensor,
    returns: torch.Tensor | None,
    corrections: torch.Tensor | None,
) -> dict[str, Items]:
    """Columns of every sample's tokens."""
    names = columns_to_learn(config, has_critic=returns is not None)
    padded = [scored.logps, scored.ref_logps, advantages]
    if returns is not None and scored.values is not None:
        padded += [scored.values, returns]
    if config.mask_truncated_completions:
        padded.append((scored.mask & scored.stopped[:, None]).double())
    if corrections is not None:
        padded.append(corrections)
    lengths = scored.mask.sum(dim=1).tolist()
    lanes = list(enumerate(scored.samples))
    return {
        name: {sample: table[lane, : lengths[lane]].numpy() for lane, sample in lanes}
        for name, table in zip(names, padded, strict=True)
    }


def _check_scored(scored: Scored) -> None:
    _check(scored.samples, "the actor's log-probability", scored.logps)
    _check(scored.samples, "the reference's log-probability", scored.ref_logps)
    if scored.values is not None and scored.final_values is not None:
        _check(scored.samples, "the critic's value", scored.values)
        _check(scored.samples, "the critic's last value", scored.final_values[:, None])


def _check(samples: Sequence[int], what: str, table: torch.Tensor) -> None:
    """Raise CannotGoOn if a number of [n, any] is not finite in float32."""
    bad = ~(table.abs() <= LARGEST_FP32)  # NaN too
    for place in torch.nonzero(bad.any(dim=1))[:1, 0].tolist():
        value = table[place][bad[place]][0].item()
        raise CannotGoOn(
            f"{what} of a token of response {samples[place]} of the iteration is {value:.4g}, which"
            " is not finite in float32: look at the rewards, ppo.kl_coef, the models' weights and"
            " engine.dtype"
        )


def _whitened(
    values: torch.Tensor, mask: torch.Tensor, sum_over_ranks: SumOverRanks, *, shift_mean: bool
) -> torch.Tensor:
    """Whiten the values under the mask, together with all owners'. Collective."""
    sums = sum_over_ranks(moment_sums(values, mask))
    deviations = sum_over_ranks(deviation_sums(values, mask, sums))
    return whiten(values, mask, sums, deviations, shift_mean=shift_mean)
