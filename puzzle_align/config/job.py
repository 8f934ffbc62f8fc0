"""The config of a job: every key a user can write in YAML, with its default, unit and meaning.

Each dataclass is one YAML mapping; nesting is the dotted path (``dpo.beta``).
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


def key(default: T, doc: str, *, unit: str = "", choices: tuple[str, ...] = ()) -> T:
    """A config key with its documentation; typed as its default: checkers see a plain field."""
    metadata = {"doc": doc, "unit": unit, "choices": choices}
    return field(default=default, metadata=metadata)  # type: ignore[return-value]


def section(cls: type[T], doc: str) -> T:
    """A nested mapping of keys, default-constructed when absent."""
    return field(default_factory=cls, metadata={"doc": doc})  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where a model's architecture and weights come from."""

    path: str | None = key(None, "directory of a Hugging Face model: config.json and safetensors")
    config: dict[str, Any] | None = key(
        None,
        "the keys of a config.json, given inline; not read where there is a path; random weights",
    )
    random_weights: bool = key(False, "ignore the weights under path: initialise from seed")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The parallel plan of one model."""

    pipeline_model_parallel_size: int = key(1, "P: pipeline ranks", unit="ranks")
    data_parallel_size: int | None = key(
        None, "D: replicas; null: the world size over P*T", unit="ranks"
    )
    tensor_model_parallel_size: int = key(1, "T: tensor ranks", unit="ranks")
    virtual_pipeline_model_parallel_size: int = key(
        1, "model chunks a pipeline rank (> 1: interleaved 1F1B)", unit="chunks"
    )
    sequence_parallel: bool = key(False, "shard norms and residuals over the tensor ranks")
    recompute: str = key("none", "activation recompute", choices=("none", "selective", "full"))


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """One model of the job."""

    model: ModelConfig = section(
        ModelConfig,
        "the model; empty: of the reference, the actor's; of the critic, the reward model's or "
        "the actor's",
    )
    parallel: ParallelConfig | None = field(
        default=None,
        metadata={
            "doc": "its parallel plan; null: 1, all, 1; of the reference, and in stage ppo: the "
            "actor's"
        },
    )
    ranks: str | None = key(
        None,
        "stage ppo: the ranks that hold it, as 0-3; null: all (where it has no plan of its own: "
        "the actor's)",
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(RoleConfig):
    """What responses are worth: a reward model, a function, or both, summed."""

    function: str | None = key(
        None,
        "stage ppo: module:function; function(prompts, responses, **columns) of lists gives a list",
    )
    timeout: float | None = key(
        600.0, "a call of the function that takes longer ends the job; null: none does", unit="s"
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Device, precision and kernels, the same for every model."""

    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = key("auto", "auto: bf16 on cuda, fp32 on cpu", choices=("auto", "fp32", "bf16"))
    attention: str = key(
        "auto",
        "auto: flex on cuda, segments on cpu",
        choices=("auto", "flex", "dense", "segments"),
    )
    transformer_impl: str = key(
        "auto", "auto: te where Transformer Engine imports", choices=("auto", "te", "local")
    )
    logprob_chunk_size: int = key(1024, "predictions whose logits exist at once", unit="tokens")
    distributed_timeout: float = key(
        600.0,
        "a collective that takes longer ends the job (not what models of stage ppo wait for each "
        "other)",
        unit="s",
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens."""

    path: str | None = key(
        None,
        "directory of a Hugging Face tokenizer, or 'byte'; null: the trained model's, or 'byte'",
    )
    chat_template: str | None = key(None, "Jinja template, or a file of one; null: the tokenizer's")
    add_eos: bool = key(True, "end every response of the data with the end-of-sequence token")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Preference pairs; of stage ppo, prompts."""

    train: str | None = key(None, "JSONL(.gz) or Parquet file, datasets directory or hub name")
    eval: str | None = key(None, "held-out data of the same form; null: eval_fraction of train")
    eval_fraction: float = key(0.0, "share of train held out when eval is null")
    format: str = key(
        "auto",
        "auto: by the columns (prompt/chosen/rejected strings, message lists, implicit prompt, HH)",
        choices=("auto", "packed", "synthetic"),
    )
    prompt_key: str = key("prompt", "stage ppo: the column of prompts (strings, or message lists)")
    num_synthetic: int = key(
        4096, "pairs (or prompts) that format synthetic generates", unit="pairs"
    )
    max_length: int = key(1024, "longest prompt plus one response", unit="tokens")
    max_prompt_length: int | None = key(
        None,
        "longest prompt; null: no bound of its own (stage ppo: max_length less "
        "generation.max_new_tokens)",
        unit="tokens",
    )
    truncation_mode: str = key(
        "keep_end",
        "which end of a too long prompt stays",
        choices=("keep_end", "keep_start", "error"),
    )
    on_error: str = key("raise", "bad rows: raise, or count and skip", choices=("raise", "skip"))
    shuffle: bool = key(True, "new order each epoch, from seed")
    cache_dir: str | None = key(None, "tokenized data; null: output_dir/cache")

    def longest_prompt(self, max_new_tokens: int) -> int:
        """Tokens of a prompt at most, beside a response of so many; below 1: none fits."""
        return self.max_prompt_length or self.max_length - max_new_tokens


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How pairs become rows."""

    enabled: bool = key(True, "pack pairs into rows; false, or layout padded: pad every sequence")
    layout: str = key(
        "shared",
        "shared: one prompt, both responses; paired: two sequences; padded: two, as long as the "
        "longest",
        choices=("shared", "paired", "padded"),
    )
    scope: str = key(
        "batch",
        "batch: pack each global batch; dataset: pack once over everything",
        choices=("batch", "dataset"),
    )
    row_tokens: int = key(4096, "tokens in a row (one microbatch)", unit="tokens")

    @property
    def row_layout(self) -> str:
        """How a pair lies in a row: shared or paired."""
        return "paired" if self.layout == "padded" else self.layout

    @property
    def is_packed(self) -> bool:
        """Whether segments follow each other; else each has a slot as long as the longest."""
        return self.enabled and self.layout != "padded"


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """The preference loss."""

    loss_type: str = key(
        "sigmoid",
        "the loss",
        choices=("sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down", "simpo", "orpo"),
    )
    beta: float = key(0.1, "deviation from the reference is penalised by beta")
    label_smoothing: float = key(0.0, "probability that a label is flipped (cDPO, robust)")
    reference_free: bool = key(False, "take the reference's log-probabilities as zero")
    simpo_gamma: float = key(0.5, "SimPO's target reward margin")
    sft_loss_weight: float = key(
        0.0, "weight of the chosen response's mean negative log-likelihood"
    )
    precompute_ref_log_probs: bool = key(
        False, "run the reference once over the data before training, cached on disk"
    )


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """The reward model's loss."""

    center_rewards_coefficient: float = key(
        0.0, "weight of the squared sum of a pair's rewards, which pulls their mean to 0"
    )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How responses are sampled."""

    num_generations: int = key(1, "responses a prompt", unit="responses")
    max_new_tokens: int = key(128, "longest response, stop token included", unit="tokens")
    min_new_tokens: int = key(0, "tokens before any stop token", unit="tokens")
    temperature: float = key(1.0, "logits are divided by it; 0: greedy")
    top_k: int = key(0, "sample among the k likeliest tokens; 0: among all", unit="tokens")
    top_p: float = key(1.0, "sample among the likeliest tokens that together have p")
    stop_token_ids: list[int] | None = key(
        None, "tokens that end a response; null: the tokenizer's end of sequence"
    )
    prefill_tokens: int = key(4096, "prompt tokens in one microbatch", unit="tokens")
    decode_batch_size: int = key(
        64, "sequences in one decode microbatch; a pipeline has several under way", unit="sequences"
    )


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Proximal policy optimization on sampled responses."""

    ppo_epochs: int = key(1, "passes over an iteration's responses", unit="epochs")
    num_mini_batches: int = key(1, "optimizer steps a pass", unit="steps")
    gamma: float = key(1.0, "discount a token")
    lam: float = key(0.95, "GAE's lambda")
    bootstrap_truncated: bool = key(
        False,
        "a response cut off earns the critic's value of going on, beside its score; gamma below 1",
    )
    clip_ratio: float = key(0.2, "how far from 1 a probability ratio counts")
    clip_ratio_low: float | None = key(None, "downwards; null: clip_ratio")
    clip_ratio_high: float | None = key(None, "upwards; null: clip_ratio")
    cliprange_value: float | None = key(
        0.2, "how far a value may move from its old one; null: no clipping"
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    kl_coef: float = key(0.05, "weight of the KL to the reference; 0: no reference is run")
    kl_estimator: str = key("k1", "of the KL at a token", choices=("k1", "k2", "k3"))
    use_kl_loss: bool = key(False, "the KL is a term of the loss, not of the rewards")
    kl_target: float | None = key(
        None, "adapt kl_coef to this KL a response; null: it is fixed", unit="nats"
    )
    kl_horizon: int = key(10000, "how slowly kl_coef adapts", unit="responses")
    cliprange_reward: float | None = key(
        None, "scores are clipped to so far from 0; null: they are not"
    )
    whiten_rewards: bool = key(False, "scale token rewards to variance 1")
    whiten_advantages: bool = key(True, "shift and scale advantages to mean 0 and variance 1")
    missing_eos_penalty: float = key(0.0, "taken off the score of a response without a stop token")
    recompute_log_probs: bool = key(
        False,
        "score the responses with the actor anew, in place of the log-probabilities of sampling",
    )
    critic_warmup: int = key(
        0, "iterations that train the critic alone, at first", unit="iterations"
    )
    target_kl: float | None = key(
        None,
        "end an iteration's training when policy/approxkl_avg exceeds it; null: never",
        unit="nats",
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = key(1e-6, "peak learning rate")
    min_lr: float = key(0.0, "learning rate at the end of the decay")
    lr_scheduler_type: str = key("cosine", "decay", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "linear warm-up", unit="optimizer steps")
    weight_decay: float = key(0.0, "decoupled decay of matrices")
    adam_beta1: float = key(0.9, "first moment")
    adam_beta2: float = key(0.95, "second moment")
    adam_eps: float = key(1e-8, "denominator's floor")
    max_grad_norm: float = key(1.0, "clip the global gradient norm; 0: never")
    use_distributed_optimizer: bool = key(False, "shard optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = key(False, "reduce gradients during the backward pass")


@dataclass(frozen=True, kw_only=True)
class CriticConfig(RoleConfig):
    """The value model of stage ppo."""

    optimizer: OptimizerConfig | None = field(
        default=None, metadata={"doc": "its optimizer; null: as the actor's"}
    )


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How models that share ranks take turns."""

    reference: str = key(
        "auto",
        "stage dpo: before the policy, in its bubbles (auto: where both have one plan), or on the "
        "last ranks",
        choices=("auto", "sequential", "time_shared", "concurrent"),
    )
    score: str = key(
        "auto",
        "stage ppo: reference, reward and critic one by one, or in one stream (auto: where they "
        "can)",
        choices=("auto", "sequential", "time_shared"),
    )
    learn: str = key(
        "auto",
        "stage ppo: the training of actor and critic, in the same way",
        choices=("auto", "sequential", "time_shared"),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    dir: str | None = key(None, "null: output_dir/checkpoints")
    save_every: int = key(0, "0: only at the end; stage ppo counts iterations", unit="steps")
    keep_last: int = key(2, "older checkpoints are deleted; 0: keep all", unit="checkpoints")
    resume: str = key(
        "auto",
        "auto: from the latest checkpoint if there is one",
        choices=("auto", "never", "must"),
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is logged, and where."""

    log_every: int = key(
        1, "metrics go out every so many steps; stage ppo counts iterations", unit="steps"
    )
    eval_every: int = key(
        0, "of held-out data; 0: only before the first and after the last step", unit="steps"
    )
    sample_every: int = key(
        10,
        "stage ppo: log a few responses with their rewards, at the first and the last iteration "
        "too; 0: never",
        unit="iterations",
    )
    trace_steps: int = key(
        0,
        "after a run's first two steps (of ppo: iterations), draw so many, predicted and measured",
        unit="steps",
    )
    progress: bool = key(True, "progress bar on rank 0")
    tensorboard: bool = key(True, "write TensorBoard events under output_dir/tensorboard")
    wandb_project: str | None = key(None, "log to this Weights & Biases project")
    peak_tflops: float | None = key(
        None,
        "dense bf16 peak of one device, for MFU (stage ppo reports none); null: known for A100, "
        "H100, H200",
        unit="TFLOP/s",
    )


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A whole job."""

    stage: str = key("dpo", "what to run", choices=("dpo", "reward", "ppo"))
    output_dir: str = key("runs/dpo", "logs, checkpoints and caches go here")
    seed: int = key(42, "weights, data order and packing")
    global_batch_size: int = key(
        64, "preference pairs an optimizer step, or prompts an iteration of stage ppo", unit="pairs"
    )
    num_train_epochs: int = key(1, "passes over the data", unit="epochs")
    max_steps: int = key(
        -1, "stop after so many steps (of stage ppo: iterations); -1: by epochs", unit="steps"
    )
    engine: EngineConfig = section(EngineConfig, "device, precision, kernels")
    actor: RoleConfig = section(RoleConfig, "the policy")
    reference: RoleConfig = section(RoleConfig, "the frozen reference")
    reward: RewardConfig = section(RewardConfig, "the reward model")
    critic: CriticConfig = section(CriticConfig, "the value model")
    placement: PlacementConfig = section(PlacementConfig, "how models that share ranks take turns")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "text to tokens")
    data: DataConfig = section(DataConfig, "preference pairs, or prompts")
    packing: PackingConfig = section(PackingConfig, "pairs, or prompts with responses, to rows")
    dpo: DPOConfig = section(DPOConfig, "the preference loss")
    reward_loss: RewardLossConfig = section(RewardLossConfig, "the reward model's loss")
    generation: GenerationConfig = section(GenerationConfig, "how responses are sampled")
    ppo: PPOConfig = section(PPOConfig, "proximal policy optimization")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW and its schedule")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving and resuming")
    telemetry: TelemetryConfig = section(TelemetryConfig, "logs")
