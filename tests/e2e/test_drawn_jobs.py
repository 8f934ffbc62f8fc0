"""Jobs drawn at random have one rank's numbers under any plan, and the same bits when resumed.

A seed draws a stage, a model's shape and options of its loss or sampling; then ranks, the plan of
each role, and options that may change no number.
"""

import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.launch import run_job
from tests.jobs import parallel
from tests.metrics import numbers

QUICK, ALL = range(6), range(60)
SHORT = ("max_steps=4", "checkpoint.save_every=2", "checkpoint.keep_last=0", "optimizer.lr=3e-4")
QUIET = ("telemetry.log_every=1", "telemetry.progress=false", "telemetry.tensorboard=false")
PAIRS = ("data.num_synthetic=40", "data.eval_fraction=0.1", "data.max_length=64")
PROMPTS = (
    *("data.num_synthetic=40", "generation.num_generations=3", "generation.max_new_tokens=9"),
    "reward.function=tests.e2e.test_drawn_jobs:varied",
)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "granite")
# Of a stage's options, any may be set beside the others.
OPTIONS = {
    "dpo": (
        *("dpo.ld_alpha=0.5", "dpo.f_divergence_type=js_divergence", "dpo.sft_loss_weight=0.3"),
        *("dpo.use_weighting=true", "dpo.label_smoothing=0.1", "packing.scope=dataset"),
    ),
    "kto": ("kto.undesirable_weight=1.5", "kto.loss_type=apo_zero_unpaired", "data.shuffle=false"),
    "reward": ("reward_loss.center_rewards_coefficient=0.1", "telemetry.eval_every=2"),
    "ppo": (
        *("ppo.whiten_rewards=true", "ppo.kl_target=1.0", "ppo.critic_warmup=1"),
        *("ppo.clip_ratio_c=3.0", "generation.top_p=0.9", "ppo.entropy_coeff=0.01"),
    ),
    "grpo": (
        *("ppo.loss_mode=gspo", "ppo.loss_agg_mode=seq-mean-token-sum", "generation.top_k=20"),
        *("ppo.recompute_log_probs=true", "ppo.missing_eos_penalty=0.5", "ppo.kl_estimator=k2"),
    ),
}
# Options that decide how a job is run, and no number of it.
EXECUTION = (
    "engine.attention=dense",
    "engine.logprob_chunk_size=5",
    "optimizer.overlap_grad_reduce=true",
    "optimizer.use_distributed_optimizer=true",
    "optimizer.cpu_offload=true",
)
OF_SAMPLING = (
    "packing.layout=paired",
    "placement.score=sequential",
    "placement.learn=sequential",
    "generation.decode_batch_size=3",
    "generation.prefill_tokens=32",
    "generation.num_scheduler_steps=5",
    "generation.offload_optimizer=true",
    "generation.overlap_switch=true",
)
# Metrics that count comparisons of numbers which may be equal but for rounding.
COUNTS = ("accuracies", "clipfrac", "clip_ratio")


def varied(completions: list[str], **_: object) -> list[float]:
    """Rewards that are seldom equal.

    Of equal ones the gradient is rounding alone, of which AdamW makes steps as large as any.
    """
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


class Drawn:
    """A job by its overrides: ``common`` decide its numbers, ``execution`` how it is run."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.stage = self.random.choice(tuple(OPTIONS))
        self.ranks = self.random.choice((2, 3, 4, 4))
        self.model = self._model()
        samples = self.stage in ("ppo", "grpo")
        trained = "reward" if self.stage == "reward" else "actor"
        shape = [f"{trained}.model.config.{k}={json.dumps(v)}" for k, v in self.model.items()]
        self.common = ["--config", f"{self.stage}_tiny", *SHORT, *QUIET, *shape, f"seed={seed}"]
        self.common += [*(PROMPTS if samples else PAIRS), "global_batch_size=8"]
        self.common += self._some(OPTIONS[self.stage])
        adapters = self.random.random() < 0.3
        if adapters:
            self.common += [f"{trained}.lora.r=3"]
        plans = {trained: self._plan()}
        plans |= {role: self._plan() for role in self._others() if self.random.random() < 0.5}
        self.execution = self._some(EXECUTION) + (self._some(OF_SAMPLING) if samples else [])
        for role, sizes in plans.items():
            self.execution += parallel(role, **sizes)
            recompute = self.random.choice(("none", "none", "selective", "full"))
            self.execution += [f"{role}.parallel.recompute={recompute}"]
        if "optimizer.cpu_offload=true" in self.execution:
            self.execution += ["optimizer.use_distributed_optimizer=true"]
        moves = any(plans[trained][k] != plans.get("generation", plans[trained])[k] for k in "PT")
        if adapters or not moves:  # a switch that sends little or nothing is not overlapped
            self.execution = [key for key in self.execution if "overlap_switch" not in key]

    def _others(self) -> tuple[str, ...]:
        if self.stage == "ppo":
            return ("reference", "critic", "generation")
        return {"reward": (), "grpo": ("reference", "generation")}.get(self.stage, ("reference",))

    def _some(self, options: tuple[str, ...]) -> list[str]:
        return [option for option in options if self.random.random() < 0.4]

    def _model(self) -> dict[str, Any]:
        """A shape, with weights large enough that mistakes are seen."""
        return {
            "model_type": self.random.choice(FAMILIES),
            "hidden_size": 32,
            "intermediate_size": self.random.choice((48, 64)),
            "num_hidden_layers": self.random.choice((4, 5, 6)),
            "num_attention_heads": 4,
            "num_key_value_heads": self.random.choice((1, 2, 4)),
            "head_dim": 8,
            "vocab_size": self.random.choice((260, 261)),
            "tie_word_embeddings": self.random.random() < 0.5,
            "initializer_range": 0.2,
        }

    def _plan(self) -> dict[str, int | bool]:
        layers, groups = self.model["num_hidden_layers"], self.model["num_key_value_heads"]
        pipeline, tensor = self.random.choice(
            [
                (pipeline, tensor)
                for pipeline in range(1, layers + 1)
                for tensor in (1, 2, 4)
                if self.ranks % (pipeline * tensor) == 0 and groups % tensor == 0
            ]
        )
        sizes: dict[str, int | bool] = {"P": pipeline, "T": tensor}
        if tensor > 1:
            sizes["sp"] = self.random.random() < 0.5
        if pipeline > 1 and layers >= 2 * pipeline:
            sizes["V"] = self.random.choice((1, 2, 2))
        return sizes


def _run(folder: Path, ranks: int, *overrides: str) -> list[dict[str, Any]]:
    done = run_job(*overrides, f"output_dir={folder}", ranks=ranks)
    assert done.returncode == 0, (overrides, done.stderr)
    return numbers(folder, "fill")


def _check(folder: Path, common: list[str], ranks: int, execution: list[str]) -> None:
    alone = _run(folder / "alone", 1, *common)
    several = _run(folder / "several", ranks, *common, *execution)
    for expected, record in zip(alone, several, strict=True):
        assert record.keys() == expected.keys()
        for name in (name for name in expected if not any(part in name for part in COUNTS)):
            right = math.isclose(record[name], expected[name], rel_tol=1e-3, abs_tol=3e-5)
            assert right, (common, execution, name, record, expected)
    resumed, later = folder / "resumed", shutil.ignore_patterns("*.jsonl", "*_00000004")
    shutil.copytree(folder / "several", resumed, ignore=later)  # as if cut after step 2
    again = _run(resumed, ranks, *common, *execution)
    assert again == [record for record in several if record["step"] > 2]


def _check_drawn(seed: int, folder: Path) -> None:
    job = Drawn(seed)
    _check(folder, job.common, job.ranks, job.execution)


@pytest.mark.parametrize("seed", QUICK)
def test_numbers_are_those_of_one_rank_and_of_a_run_without_a_break(
    seed: int, tmp_path: Path
) -> None:
    _check_drawn(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in ALL if seed not in QUICK])
def test_and_so_are_those_of_other_draws(seed: int, tmp_path: Path) -> None:
    _check_drawn(seed, tmp_path)


@pytest.mark.parametrize("host", [False, True])
def test_a_rank_may_be_without_a_shard(host: bool, tmp_path: Path) -> None:
    """Of the adapters' 512 numbers two ranks have 256 each, as shards are multiples of 128."""
    model = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape = [f"actor.model.config.{name}={value}" for name, value in model.items()]
    adapters = ["actor.lora.r=2", "actor.lora.target_modules=[q_proj,o_proj]"]
    common = ["--config", "dpo_tiny", *SHORT, *QUIET, *PAIRS, *shape, *adapters]
    shards = ["optimizer.use_distributed_optimizer=true", f"optimizer.cpu_offload={host}".lower()]
    _check(tmp_path, [*common, "global_batch_size=6"], 3, shards)
