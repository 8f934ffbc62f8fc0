"""Groups of responses without a critic as the papers have them: float64, one sequence at a time.

The responses are given: only what is made of them is computed here, by transformers' models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from puzzle_align.config.job import JobConfig
from tests.dist.plain_ppo import adamw, greedy_response, kls, logps_of, text_of
from tests.dist.split_rewards import mean_code

EPSILON = 1e-4  # TRL's


@dataclass
class Response:
    """A sampled response, and all that is known of it."""

    prompt: list[int]
    tokens: list[int]
    stopped: bool
    score: float
    group: int
    sampled_logps: torch.Tensor
    old_logps: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    ref_logps: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of the tokens
    advantages: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class PlainGroups:
    """Actor and reference of ``folder``; an epoch is one mini-batch."""

    def __init__(self, folder: Path, job: JobConfig) -> None:
        self.actor, self.reference = (
            AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()
            for name in ("actor", "reference")
        )
        self.job, self.ppo = job, job.ppo
        self.optimizer = adamw(self.actor, job.optimizer)

    def iteration(self, responses: Sequence[Response]) -> dict[str, float]:
        """Learn from an iteration's responses; the metrics."""
        with torch.no_grad():
            for r in responses:
                r.old_logps = logps_of(self.actor, r.prompt, r.tokens)[0]
                r.ref_logps = logps_of(self.reference, r.prompt, r.tokens)[0]
                r.rewards = torch.zeros_like(r.old_logps)
                if not self.ppo.use_kl_loss:
                    estimates = kls(r.old_logps, r.ref_logps, self.ppo.kl_estimator)
                    r.rewards -= self.ppo.kl_coef * estimates
                r.rewards[-1] += r.score
            self._advantages(responses)
        count = len(responses)
        metrics = {
            "objective/scores": sum(r.score for r in responses) / count,
            "objective/kl": sum((r.old_logps - r.ref_logps).sum().item() for r in responses)
            / count,
        }
        epochs = [self._epoch(responses) for _ in range(self.ppo.ppo_epochs)]
        return metrics | {name: sum(e[name] for e in epochs) / len(epochs) for name in epochs[0]}

    def _advantages(self, responses: Sequence[Response]) -> None:
        name, everyone = self.ppo.advantage_estimator, [r.rewards.sum() for r in responses]
        for r, own in zip(responses, everyone, strict=True):
            group = [other for other in responses if other.group == r.group]
            sums = torch.stack([other.rewards.sum() for other in group])
            if name == "reinforce_plus_plus":
                decay = self.ppo.gamma ** torch.arange(len(r.tokens), dtype=torch.float64)
                r.advantages = torch.stack(
                    [
                        (r.rewards[t:] * decay[: len(r.tokens) - t]).sum()
                        for t in range(len(r.tokens))
                    ]
                )
                continue
            if name == "remax":
                following = [r.rewards[t:].sum() for t in range(len(r.tokens))]
                r.advantages = torch.stack(following) - self._greedy_score(r.prompt)
                continue
            if name == "rloo":
                advantage = own - (sums.sum() - own) / (len(group) - 1)
            elif name == "opo":
                lengths = torch.tensor([float(len(other.tokens)) for other in group])
                advantage = own - (lengths * sums).sum() / lengths.sum()
            else:
                advantage = own - sums.mean()
            if name == "grpo" and self.ppo.scale_rewards != "none":
                by_group = self.ppo.scale_rewards == "group"
                spread = sums.std() if by_group else torch.stack(everyone).std()
                advantage = advantage / (spread + EPSILON)
            r.advantages = advantage.expand(len(r.tokens)).clone()
        if self.ppo.whiten_advantages:
            every = torch.cat([r.advantages for r in responses])
            for r in responses:
                r.advantages = (r.advantages - every.mean()) / torch.sqrt(every.var() + 1e-8)

    def _greedy_score(self, prompt: list[int]) -> float:
        response = greedy_response(self.actor, prompt, self.job.generation)
        return mean_code([text_of(*response)])[0]

    def _mean(self, tables: list[torch.Tensor]) -> torch.Tensor:
        """Mean of the responses' tokens as ``loss_agg_mode`` says."""
        mode = self.ppo.loss_agg_mode
        if mode == "token-mean":
            return torch.cat(tables).mean()
        parts = [table.mean() if mode == "seq-mean-token-mean" else table.sum() for table in tables]
        longest = self.job.generation.max_new_tokens
        return torch.stack(parts).mean() / (longest if mode == "seq-mean-token-sum-norm" else 1)

    def _correction(self, r: Response) -> torch.Tensor:
        mode, cap = self.ppo.importance_sampling_mode, self.ppo.importance_sampling_cap
        if mode is None:
            return torch.ones_like(r.old_logps)
        ratios = torch.exp(r.old_logps - r.sampled_logps)
        if mode.startswith("sequence"):
            ratios = ratios.prod().expand_as(ratios)
        beyond = cap if mode.endswith("truncate") else 0.0
        return torch.where(ratios > cap, beyond, ratios)

    def _policy(self, logps: torch.Tensor, r: Response) -> torch.Tensor:
        """Losses of a response's tokens."""
        return self._correction(r) * self._uncorrected(logps, r)

    def _uncorrected(self, logps: torch.Tensor, r: Response) -> torch.Tensor:
        low, high = 1 - self.ppo.clip_ratio, 1 + self.ppo.clip_ratio
        ratios = torch.exp(logps - r.old_logps)
        if self.ppo.loss_mode == "cispo":
            return -ratios.clamp(low, high).detach() * r.advantages * logps
        if self.ppo.loss_mode == "gspo":  # the response's ratio, once for each of its tokens
            ratios = torch.exp((logps - r.old_logps).mean()).expand_as(logps)
        return -torch.min(ratios * r.advantages, ratios.clamp(low, high) * r.advantages)

    def _epoch(self, responses: Sequence[Response]) -> dict[str, float]:
        masks = self.ppo.mask_truncated_completions
        kept = [r for r in responses if r.stopped or not masks]
        logps, entropies = zip(
            *(logps_of(self.actor, r.prompt, r.tokens) for r in kept), strict=True
        )
        policy = self._mean([self._policy(own, r) for own, r in zip(logps, kept, strict=True)])
        loss = policy - self.ppo.entropy_coeff * self._mean(list(entropies))
        if self.ppo.use_kl_loss:
            estimator = self.ppo.kl_estimator
            estimates = [
                kls(own, r.ref_logps, estimator) for own, r in zip(logps, kept, strict=True)
            ]
            loss = loss + self.ppo.kl_coef * self._mean(estimates)
        self.optimizer.zero_grad()
        loss.backward()
        limit = self.job.optimizer.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.actor.parameters(), limit)
        self.optimizer.step()
        with torch.no_grad():
            moved = torch.cat([own - r.old_logps for own, r in zip(logps, kept, strict=True)])
        return {
            "loss/policy_avg": policy.item(),
            "policy/approxkl_avg": (moved**2).mean().item() / 2,
            "policy/entropy_avg": torch.cat(list(entropies)).mean().item(),
            "policy/grad_norm": norm.item(),
        }
