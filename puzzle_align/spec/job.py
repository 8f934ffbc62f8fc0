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

    model: ModelConfig = section(ModelConfig, "the model; of the reference, empty: the actor's")
    parallel: ParallelConfig | None = field(
        default=None,
        metadata={"doc": "its parallel plan; null: 1, all, 1 (of the reference: the actor's)"},
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
    distributed_timeout: float = key(600.0, "a collective that takes longer ends the job", unit="s")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens."""

    path: str | None = key(
        None,
        "directory of a Hugging Face tokenizer, or 'byte'; null: the trained model's, or 'byte'",
    )
    chat_template: str | None = key(None, "Jinja template, or a file of one; null: the tokenizer's")
    add_eos: bool = key(True, "end every response with the end-of-sequence token")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Preference pairs."""

    train: str | None = key(None, "JSONL(.gz) or Parquet file, datasets directory or hub name")
    eval: str | None = key(None, "held-out data of the same form; null: eval_fraction of train")
    eval_fraction: float = key(0.0, "share of train held out when eval is null")
    format: str = key(
        "auto",
        "auto: by the columns (prompt/chosen/rejected strings, message lists, implicit prompt, HH)",
        choices=("auto", "packed", "synthetic"),
    )
    num_synthetic: int = key(4096, "pairs that format synthetic generates", unit="pairs")
    max_length: int = key(1024, "longest prompt plus one response", unit="tokens")
    max_prompt_length: int | None = key(
        None, "longest prompt; null: no bound of its own", unit="tokens"
    )
    truncation_mode: str = key(
        "keep_end",
        "which end of a too long prompt stays",
        choices=("keep_end", "keep_start", "error"),
    )
    on_error: str = key("raise", "bad rows: raise, or count and skip", choices=("raise", "skip"))
    shuffle: bool = key(True, "new order each epoch, from seed")
    cache_dir: str | None = key(None, "tokenized data; null: output_dir/cache")


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
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = key(1e-6, "peak learning rate")
    min_lr: float = key(0.0, "learning rate at the end of the decay")
    lr_scheduler_type: str = key("cosine", "decay", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "linear warm-up", unit="steps")
    weight_decay: float = key(0.0, "decoupled decay of matrices")
    adam_beta1: float = key(0.9, "first moment")
    adam_beta2: float = key(0.95, "second moment")
    adam_eps: float = key(1e-8, "denominator's floor")
    max_grad_norm: float = key(1.0, "clip the global gradient norm; 0: never")
    use_distributed_optimizer: bool = key(False, "shard optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = key(False, "reduce gradients during the backward pass")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which models share ranks, and how."""

    reference: str = key(
        "auto",
        "before the policy, in its bubbles (auto: where both have one plan), or on the last ranks",
        choices=("auto", "sequential", "time_shared", "concurrent"),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    dir: str | None = key(None, "null: output_dir/checkpoints")
    save_every: int = key(0, "0: only at the end", unit="steps")
    keep_last: int = key(2, "older checkpoints are deleted; 0: keep all", unit="checkpoints")
    resume: str = key(
        "auto",
        "auto: from the latest checkpoint if there is one",
        choices=("auto", "never", "must"),
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What is logged, and where."""

    log_every: int = key(1, "metrics go out every so many steps", unit="steps")
    eval_every: int = key(0, "0: only before the first and after the last step", unit="steps")
    trace_steps: int = key(
        0,
        "after a run's first two steps, draw so many as predicted and as measured, under "
        "output_dir/trace",
        unit="steps",
    )
    progress: bool = key(True, "progress bar on rank 0")
    tensorboard: bool = key(True, "write TensorBoard events under output_dir/tensorboard")
    wandb_project: str | None = key(None, "log to this Weights & Biases project")
    peak_tflops: float | None = key(
        None,
        "dense bf16 peak of one device, for MFU; null: known for A100, H100, H200",
        unit="TFLOP/s",
    )


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """A whole job."""

    stage: str = key("dpo", "what to run", choices=("dpo", "reward"))
    output_dir: str = key("runs/dpo", "logs, checkpoints and caches go here")
    seed: int = key(42, "weights, data order and packing")
    global_batch_size: int = key(64, "preference pairs an optimizer step", unit="pairs")
    num_train_epochs: int = key(1, "passes over the data", unit="epochs")
    max_steps: int = key(-1, "stop after so many steps; -1: by epochs", unit="steps")
    engine: EngineConfig = section(EngineConfig, "device, precision, kernels")
    actor: RoleConfig = section(RoleConfig, "the policy")
    reference: RoleConfig = section(RoleConfig, "the frozen reference")
    reward: RoleConfig = section(RoleConfig, "the reward model")
    placement: PlacementConfig = section(PlacementConfig, "which models share ranks")
    tokenizer: TokenizerConfig = section(TokenizerConfig, "text to tokens")
    data: DataConfig = section(DataConfig, "preference pairs")
    packing: PackingConfig = section(PackingConfig, "pairs to rows")
    dpo: DPOConfig = section(DPOConfig, "the preference loss")
    reward_loss: RewardLossConfig = section(RewardLossConfig, "the reward model's loss")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW and its schedule")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving and resuming")
    telemetry: TelemetryConfig = section(TelemetryConfig, "logs")
