"""PPO as one reads it in the papers: transformers' models in float64, one sequence at a time.

Nothing here is batched, packed, sharded or shared with the runtime: it is what the runtime's
numbers are compared with.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.rl import GenerationConfig
from tests.bounds import LOGIT_BOUND

RewardFunction = Callable[..., list[float]]  # by keyword, with completions


@dataclass
class Sample:
    """A response and all that is known of it."""

    prompt: list[int]
    tokens: list[int]
    stopped: bool
    logps: torch.Tensor
    ref_logps: torch.Tensor
    values: torch.Tensor  # one more than tokens
    score: float
    rewards: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of the tokens
    advantages: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    returns: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class PlainPPO:
    """The models in ``folder/{actor,reference,reward,critic}``, greedy, an epoch one mini-batch."""

    def __init__(self, folder: Path, job: JobConfig, function: RewardFunction) -> None:
        def load(name: str, kind: type) -> torch.nn.Module:
            return kind.from_pretrained(folder / name, dtype=torch.float64).eval()

        self.actor = load("actor", AutoModelForCausalLM)
        self.reference = load("reference", AutoModelForCausalLM)
        self.reward = load("reward", AutoModelForSequenceClassification)
        self.critic = load("critic", AutoModelForSequenceClassification)
        self.job, self.ppo, self.function = job, job.ppo, function
        self.optimizers = [adamw(model, job.optimizer) for model in (self.actor, self.critic)]

    def iteration(self, prompts: list[list[int]]) -> dict[str, float]:
        """Sample, score and learn; the metrics."""
        samples = [self._sample(prompt) for prompt in prompts]
        with torch.no_grad():
            self._advantages(samples)
        kls = [(s.logps - s.ref_logps).sum().item() for s in samples]
        metrics = {
            "objective/kl": sum(kls) / len(samples),
            "objective/scores": sum(s.score for s in samples) / len(samples),
            "objective/entropy": -sum(s.logps.sum().item() for s in samples) / len(samples),
        }
        learned: list[dict[str, float]] = []
        updates: list[dict[str, float]] = []
        for _ in range(self.ppo.ppo_epochs):
            found, losses = self._epoch(samples)
            learned.append(found)
            target = self.ppo.target_kl
            if target is not None and found["policy/approxkl_avg"] > target:
                break
            updates.append(self._update(losses))
        for group in (learned, updates):
            metrics |= {name: sum(m[name] for m in group) / len(group) for name in group[0]}
        return metrics

    def _sample(self, prompt: list[int]) -> Sample:
        assert self.job.generation.temperature == 0
        with torch.no_grad():
            tokens, stopped = greedy_response(self.actor, prompt, self.job.generation)
            whole = prompt + tokens
            score = self.function(completions=[text_of(tokens, stopped)])[0]
            score += _scalars(self.reward, whole)[-1].item()
            return Sample(
                prompt,
                tokens,
                stopped,
                logps_of(self.actor, prompt, tokens)[0],
                logps_of(self.reference, prompt, tokens)[0],
                _scalars(self.critic, whole)[len(prompt) - 1 :],
                score,
            )

    def _advantages(self, samples: list[Sample]) -> None:
        config = self.ppo
        for s in samples:
            if config.cliprange_reward is not None:
                s.score = max(-config.cliprange_reward, min(config.cliprange_reward, s.score))
            s.score -= 0.0 if s.stopped else config.missing_eos_penalty
            s.rewards = torch.zeros_like(s.logps)
            if not config.use_kl_loss:
                s.rewards -= config.kl_coef * kls(s.logps, s.ref_logps, config.kl_estimator)
            s.rewards[-1] += s.score
        every = torch.cat([s.rewards for s in samples])
        for s in samples:
            if config.whiten_rewards:
                spread = torch.sqrt(every.var() + 1e-8)
                s.rewards = (s.rewards - every.mean()) / spread + every.mean()
            values = s.values.clone()
            if s.stopped or not config.bootstrap_truncated:
                values[-1] = 0.0
            deltas = s.rewards + config.gamma * values[1:] - values[:-1]
            decay = config.gamma * config.lam
            s.advantages = torch.stack(
                [
                    sum(decay ** (j - i) * deltas[j] for j in range(i, len(deltas)))  # type: ignore[misc]
                    for i in range(len(deltas))
                ]
            )
            s.returns = s.advantages + s.values[:-1]
        every = torch.cat([s.advantages for s in samples])
        for s in samples if config.whiten_advantages else []:
            s.advantages = (s.advantages - every.mean()) / torch.sqrt(every.var() + 1e-8)

    def _epoch(
        self, samples: list[Sample]
    ) -> tuple[dict[str, float], tuple[torch.Tensor, torch.Tensor]]:
        """Metrics, and the losses of actor and critic."""
        config = self.ppo
        count = sum(len(s.tokens) for s in samples)
        total = dict.fromkeys(_NAMES, 0.0)
        policy = value = torch.zeros((), dtype=torch.float64)
        for s in samples:
            logps, entropies = logps_of(self.actor, s.prompt, s.tokens)
            ratios = torch.exp(logps - s.logps)
            low, high = 1 - config.clip_ratio, 1 + config.clip_ratio
            surrogate = torch.min(ratios * s.advantages, ratios.clamp(low, high) * s.advantages)
            if config.clip_ratio_c is not None:
                least = torch.where(s.advantages < 0, config.clip_ratio_c * s.advantages, -math.inf)
                surrogate = torch.max(surrogate, least)
            policy = policy - surrogate.sum() - config.entropy_coeff * entropies.sum()
            if config.use_kl_loss:
                to_reference = kls(logps, s.ref_logps, config.kl_estimator)
                policy = policy + config.kl_coef * to_reference.sum()
            values = _scalars(self.critic, s.prompt + s.tokens)[len(s.prompt) - 1 : -1]
            old, reach = s.values[:-1], config.cliprange_value
            assert reach is not None
            near = old + (values - old).clamp(-reach, reach)
            errors = torch.max((values - s.returns) ** 2, (near - s.returns) ** 2)
            value = value + errors.sum() / 2
            total["loss/policy_avg"] -= surrogate.sum().item()
            total["loss/value_avg"] += errors.sum().item() / 2
            total["policy/approxkl_avg"] += ((logps - s.logps) ** 2).sum().item() / 2
            total["policy/entropy_avg"] += entropies.sum().item()
            total["val/ratio"] += ratios.sum().item()
        found = {name: sum_ / count for name, sum_ in total.items()}
        return found, (policy / count, value / count)

    def _update(self, losses: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
        """Step both optimizers; the gradients' norms."""
        found = {}
        for model, optimizer, loss, name in zip(
            (self.actor, self.critic),
            self.optimizers,
            losses,
            ("policy/grad_norm", "val/grad_norm"),
            strict=True,
        ):
            optimizer.zero_grad()
            loss.backward()
            limit = self.job.optimizer.max_grad_norm
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or math.inf)
            found[name] = norm.item()
            optimizer.step()
        return found


_NAMES = (
    "loss/policy_avg",
    "loss/value_avg",
    "policy/approxkl_avg",
    "policy/entropy_avg",
    "val/ratio",
)


def adamw(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The job's optimizer, without weight decay."""
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(model.parameters(), config.lr, betas, config.adam_eps, weight_decay=0)


def greedy_response(
    model: torch.nn.Module, prompt: list[int], config: GenerationConfig
) -> tuple[list[int], bool]:
    """The likeliest tokens, and whether a stop token ends them."""
    stops, tokens = config.stop_token_ids, list[int]()
    assert stops is not None
    while len(tokens) < config.max_new_tokens and not (tokens and tokens[-1] in stops):
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        if len(tokens) < config.min_new_tokens:
            logits[stops] = -math.inf
        first, second = logits.topk(2).values
        assert first - second > 3 * LOGIT_BOUND, "margins that rounding could turn"
        tokens.append(int(logits.argmax()))
    return tokens, tokens[-1] in stops


def text_of(tokens: list[int], stopped: bool) -> str:
    """Text of byte tokens, without the stop token."""
    return bytes(t for t in tokens[: len(tokens) - stopped] if t < 256).decode(errors="replace")


def kls(logps: torch.Tensor, ref_logps: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimates of every token's KL to the reference."""
    ratios = ref_logps - logps
    near = ratios.clamp(-20, 20)
    k3 = (torch.exp(near) - 1 - near).clamp(-10, 10)
    return {"k1": -ratios, "k2": ratios**2 / 2, "k3": k3}[estimator]


def logps_of(
    model: torch.nn.Module, prompt: list[int], tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens after the prompt, and the distributions' entropies."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    every = torch.log_softmax(logits, dim=1)
    entropies = -(every.exp() * every).sum(dim=1)
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0], entropies


def _scalars(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """The classifier's number at every token."""
    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0]  # type: ignore[union-attr, operator]
    return model.score(hidden)[:, 0]  # type: ignore[operator]
