"""Outputs of a run: checkpoints and telemetry."""

from dataclasses import dataclass

from puzzle_align.config.schema import key
from puzzle_align.config.stages import AGAINST_REFERENCE, PREFERENCES, PROMPTS


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    dir: str | None = key(None, "folder of checkpoints; null: output_dir/checkpoints", is_path=True)
    save_every: int = key(
        0,
        "steps (stage ppo: iterations) between checkpoints; 0: only one at the end",
        unit="steps",
        at_least=0,
    )
    keep_last: int = key(
        2,
        "checkpoints to keep, at least the last two; 0: keep all",
        unit="checkpoints",
        at_least=0,
    )
    resume: str = key(
        "auto",
        "auto: from the last good checkpoint if there is one; must: there must be; or its path",
        is_path=True,
    )

    @property
    def names_path(self) -> bool:
        """Whether ``resume`` is the path of a checkpoint."""
        return self.resume not in ("auto", "must")


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Logged metrics, samples and traces."""

    log_every: int = key(
        1,
        "steps (stage ppo: iterations) between logged metrics",
        unit="steps",
        at_least=1,
    )
    eval_every: int = key(
        0,
        "steps between evaluations; 0: only before the first and after the last step",
        unit="steps",
        at_least=0,
        stages=PREFERENCES,
    )
    sample_every: int = key(
        10,
        "iterations between logged responses, beside the first and last iteration's; 0: none",
        unit="iterations",
        at_least=0,
        stages=PROMPTS,
    )
    trace_steps: int = key(
        0,
        "steps (ppo: iterations) to draw, predicted and measured, after a run's first two",
        unit="steps",
        at_least=0,
    )
    host_waits: bool = key(
        False,
        "log how often the host waits for its CUDA device in a step, and how much is compiled",
    )
    token_metrics: bool = key(
        True,
        "log entropy, mean logits and accuracy of the responses' tokens: a few percent of the head",
        stages=AGAINST_REFERENCE,
    )
    progress: bool = key(True, "progress bar on rank 0", generate=True)
    tensorboard: bool = key(True, "write TensorBoard events under output_dir/tensorboard")
    wandb_project: str | None = key(None, "log to this Weights & Biases project")
    peak_tflops: float | None = key(
        None,
        "dense bf16 peak of one device, for MFU; null: known for A100, H100, H200",
        unit="TFLOP/s",
        above=0,
        stages=PREFERENCES,
    )
