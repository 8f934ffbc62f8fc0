"""A tiny preference run through the training loop, whole or resumed, with all its numbers."""

import math
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.data import DataConfig, PackingConfig, TokenizerConfig
from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.config.sections.models import LoraConfig, ModelConfig, ParallelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.sections.output import CheckpointConfig, TelemetryConfig
from puzzle_align.layout.model import Dtype
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.telemetry import StepStats
from tests.dist.several_models import digest
from tests.jobs import resolved, run_to_end

STEPS, SAVED = 5, 2
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
TIED = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """Settings that a run's checkpoints may depend on."""

    name: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tied: bool = False
    dtype: Dtype = "fp32"
    distributed_optimizer: bool = False
    state_dtype: Dtype = "fp32"  # another, as the next one, needs the distributed optimizer
    cpu_offload: bool = False
    lora: LoraConfig | None = None
    skipped: tuple[int, ...] = (1,)  # steps (from 0) whose gradients are made infinite


@dataclass(frozen=True)
class Numbers:
    """All that a run computed on one rank: by step, and at the end."""

    steps: list[dict[str, float]]
    state: str  # hash of weights and optimizer state
    num_skipped: int

    def since(self, step: int) -> "Numbers":
        """Numbers of a run that started after ``step`` steps."""
        return replace(self, steps=self.steps[step:])


def job(case: Case, folder: Path, name: str, **checkpoint: Any) -> JobConfig:
    """The case's config, writing to ``folder/name``."""
    return JobConfig(
        output_dir=str(folder / name),
        global_batch_size=8,
        max_steps=STEPS,
        engine=EngineConfig(device="cpu", dtype=case.dtype),
        actor=RoleConfig(
            model=ModelConfig(config=TIED if case.tied else LLAMA),
            parallel=case.parallel,
            lora=case.lora,
        ),
        tokenizer=TokenizerConfig(path="byte"),
        data=DataConfig(
            format="synthetic", num_synthetic=64, max_length=64, cache_dir=str(folder / "cache")
        ),
        packing=PackingConfig(row_tokens=256),
        optimizer=OptimizerConfig(
            lr=1e-2,
            warmup_steps=2,
            weight_decay=0.1,
            use_distributed_optimizer=case.distributed_optimizer,
            state_dtype=case.state_dtype,
            cpu_offload=case.cpu_offload,
        ),
        checkpoint=CheckpointConfig(save_every=SAVED, keep_last=0, **checkpoint),
        telemetry=TelemetryConfig(progress=False, tensorboard=False),
    )


def run(case: Case, config: JobConfig, rank: int, world_size: int) -> Numbers:
    """Train to the end, as in a process of its own. Collective over the world."""
    torch.manual_seed(len(config.output_dir))  # what is there before must not matter
    world = World(rank, world_size, torch.device("cpu"))
    trainer = _Recording(resolved(config, world.size), world)
    trainer.case, trainer.steps = case, []
    run_to_end(trainer)
    return Numbers(trainer.steps, state_hash(trainer), trainer.num_skipped)


def run_from(source: Path, case: Case, folder: Path, name: str, *ranks: int) -> Numbers:
    """Train on from ``source``'s checkpoint, in a new folder. Collective over the world."""
    config = job(case, folder, name, resume="must")
    if ranks[0] == 0:
        checkpoint = f"checkpoints/step_{SAVED:08d}"
        shutil.copytree(source / checkpoint, folder / name / checkpoint)
    return run(case, config, *ranks)


def state_hash(trainer: DPOTrainer) -> str:
    """Hash of this rank's weights, main weights and optimizer state."""
    assert trainer.policy is not None
    return digest(Trained(trainer.policy, trainer.optimizer))


class _Recording(DPOTrainer):
    """Notes every step's metrics; spoils some gradients."""

    case: Case
    steps: list[dict[str, float]]

    def train_step(self, step: int) -> tuple[dict[str, float], StepStats]:
        reduce = self.optimizer.reduce_gradients

        def spoil() -> None:
            reduce()
            for chunk in self.policy.chunks:
                for parameter in chunk.parameters():
                    if parameter.requires_grad:
                        parameter.main_grad.fill_(math.inf)

        if step in self.case.skipped:
            self.optimizer.reduce_gradients = spoil
        metrics, stats = super().train_step(step)
        self.optimizer.reduce_gradients = reduce
        self.updates = []  # as if all had been made: the loop saves steps that were skipped, too
        self.steps.append(metrics)
        return metrics, stats
