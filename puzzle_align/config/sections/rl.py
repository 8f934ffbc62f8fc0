"""Reinforcement learning: sampling of responses, and PPO."""

from dataclasses import dataclass, fields

from puzzle_align.config.schema import key, section
from puzzle_align.config.sections.models import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """Requirements of an advantage estimator."""

    uses_critic: bool = False  # reads a critic's values, and computes the critic's returns
    least_generations: int = 1  # responses per prompt
    scales: bool = False  # reads ``scale_rewards``
    samples_greedily: bool = False  # reads the reward of a greedy response to each prompt


# Choices of ``ppo.advantage_estimator``, each a file in ``algos.estimators``.
ESTIMATORS = {
    "gae": EstimatorTraits(uses_critic=True),
    "grpo": EstimatorTraits(least_generations=2, scales=True),
    "dr_grpo": EstimatorTraits(least_generations=2),
    "rloo": EstimatorTraits(least_generations=2),
    "opo": EstimatorTraits(least_generations=2),
    "reinforce_plus_plus": EstimatorTraits(),
    "remax": EstimatorTraits(samples_greedily=True),
}


# Choices of ``ppo.importance_sampling_mode``, under TRL's names: level and treatment.
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    num_generations: int = key(
        1, "responses to each prompt", unit="responses", at_least=1, binding=True
    )
    max_new_tokens: int = key(
        128, "longest response, stop token included", unit="tokens", at_least=1, binding=True
    )
    min_new_tokens: int = key(
        0, "fewest tokens before a stop token", unit="tokens", at_least=0, binding=True
    )
    temperature: float = key(1.0, "logits are divided by it; 0: greedy", at_least=0, binding=True)
    top_k: int = key(
        0,
        "sample among the k likeliest tokens; 0: among all",
        unit="tokens",
        at_least=0,
        binding=True,
    )
    top_p: float = key(
        1.0,
        "sample among the likeliest tokens that together have p",
        above=0,
        at_most=1,
        binding=True,
    )
    stop_token_ids: list[int] | None = key(
        None,
        "tokens that end a response; null: the tokenizer's EOS and those in generation_config.json",
        binding=True,
    )
    prefill_tokens: int = key(4096, "prompt tokens in one microbatch", unit="tokens", at_least=1)
    decode_batch_size: int = key(
        64,
        "sequences in one decode microbatch; a pipeline has several under way",
        unit="sequences",
        at_least=1,
    )
    num_scheduler_steps: int | None = key(
        None,
        "tokens of a sequence between two checks for its end; null: 1 on CPU, 8 on CUDA",
        unit="tokens",
        at_least=1,
    )
    enforce_eager: bool = key(False, "decode without CUDA graphs (used by default on CUDA)")
    parallel: ParallelConfig | None = key(
        None, "the actor's plan while it samples; null: the one that it trains under"
    )
    ranks: str | None = key(None, "ranks that sample, as 0-3; null: those that train the actor")
    overlap_switch: bool = key(
        False, "send weights to the plan for sampling during the actor's last optimizer step"
    )
    offload_optimizer: bool = key(
        False,
        "while sampling, keep optimizer state in host memory, and no gradients",
    )


_BESIDE_TRAINING = ("parallel", "ranks", "overlap_switch", "offload_optimizer")
# Keys that ``puzzle-align generate`` reads too.
SAMPLING_KEYS = tuple(f.name for f in fields(GenerationConfig) if f.name not in _BESIDE_TRAINING)


@dataclass(frozen=True, kw_only=True)
class FilterGroupsConfig:
    """Dynamic sampling: groups whose rewards are all equal are left out, and others sampled."""

    enable: bool = key(False, "sample on until the batch is full of groups with unequal rewards")
    max_num_gen_batches: int = key(
        10, "most batches to sample in an iteration", unit="batches", at_least=1
    )
    allow_smaller: bool = key(
        False, "then train on the groups that there are; else the job ends with an error"
    )


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Proximal policy optimization on sampled responses."""

    ppo_epochs: int = key(1, "passes over an iteration's responses", unit="epochs", at_least=1)
    num_mini_batches: int = key(1, "optimizer steps a pass", unit="steps", at_least=1)
    gamma: float = key(1.0, "discount for each token", at_least=0, at_most=1)
    lam: float = key(0.95, "GAE's lambda", at_least=0, at_most=1)
    bootstrap_truncated: bool = key(
        False,
        "add the critic's last value to a truncated response's reward; needs gamma below 1",
    )
    clip_ratio: float = key(
        0.2, "clipping of probability ratios: their greatest distance from 1", at_least=0, below=1
    )
    clip_ratio_low: float | None = key(
        None, "greatest distance below 1; null: clip_ratio", at_least=0, at_most=1
    )
    clip_ratio_high: float | None = key(
        None, "greatest distance above 1; null: clip_ratio", at_least=0
    )
    clip_ratio_c: float | None = key(
        None,
        "dual clip: largest ratio with a negative advantage (verl: 3.0); null: no limit",
        above=1,
    )
    cliprange_value: float | None = key(
        0.2, "clipping of values: greatest distance from the old value; null: none", above=0
    )
    advantage_estimator: str = key(
        "gae",
        "gae: by a critic; else by a group, by all (reinforce_plus_plus), by a greedy one (remax)",
        choices=tuple(ESTIMATORS),
    )
    scale_rewards: str = key(
        "group",
        "grpo divides by the standard deviation of rewards to the prompt, of all, or by none",
        choices=("group", "batch", "none"),
    )
    loss_mode: str = key(
        "vanilla",
        "vanilla: clipped ratios of tokens; gspo: of responses; cispo: clipped as constant weights",
        choices=("vanilla", "gspo", "cispo"),
    )
    loss_agg_mode: str = key(
        "token-mean",
        "mean over tokens; or over responses, of sums, means, or sums over max_new_tokens (-norm)",
        choices=(
            "token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",
        ),
    )
    mask_truncated_completions: bool = key(
        False, "leave responses without a stop token out of the policy's loss"
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", at_least=0)
    kl_coef: float = key(
        0.05, "weight of the KL to the reference; 0: no reference is run", at_least=0
    )
    kl_estimator: str = key(
        "k1",
        "estimator of the KL at a token; k3 is at most 10, as in verl",
        choices=("k1", "k2", "k3"),
    )
    use_kl_loss: bool = key(False, "add the KL to the loss instead of the rewards")
    use_bias_correction_kl: bool = key(
        False, "multiply the k3 in the loss by the probability ratio: its gradient is then the KL's"
    )
    kl_target: float | None = key(
        None,
        "adapt kl_coef towards this KL of a response; null: kl_coef is fixed",
        unit="nats",
        above=0,
    )
    kl_horizon: int = key(
        10000,
        "responses over which kl_coef adapts: more make it slower",
        unit="responses",
        at_least=1,
    )
    cliprange_reward: float | None = key(
        None, "clipping of scores: greatest distance from 0; null: none", above=0
    )
    whiten_rewards: bool = key(False, "scale token rewards to variance 1")
    whiten_advantages: bool = key(True, "shift and scale advantages to mean 0 and variance 1")
    missing_eos_penalty: float = key(
        0.0, "subtracted from the score of a response without a stop token", at_least=0
    )
    recompute_log_probs: bool = key(
        False,
        "compute the responses' log-probabilities again instead of keeping those of sampling",
    )
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling, as in DAPO")
    importance_sampling_mode: str | None = key(
        None,
        "weigh the policy's loss by the ratio of the recomputed probabilities to those of sampling",
        choices=CORRECTIONS,
    )
    importance_sampling_cap: float = key(
        3.0, "largest such ratio; beyond: the cap (truncate), or 0 (mask)", above=0
    )
    critic_warmup: int = key(
        0, "first iterations, which train the critic alone", unit="iterations", at_least=0
    )
    target_kl: float | None = key(
        None,
        "end an iteration's training when policy/approxkl_avg exceeds it; null: never",
        unit="nats",
        above=0,
    )

    @property
    def estimator(self) -> EstimatorTraits:
        """Requirements of the advantage estimator."""
        return ESTIMATORS[self.advantage_estimator]
