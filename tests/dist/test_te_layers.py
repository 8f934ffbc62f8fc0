"""Transformer Engine's layers on CPUs, its kernels emulated: their numbers are local layers'.

Of single chunks, and of jobs with adapters under every kind of plan: DPO, and PPO whose roles have
one base, sampling with merged weights and under another plan.

What runs are the real Python modules of Transformer Engine and Megatron-core's on them, with our
adapters' hooks, recompute, sequence parallelism and accumulation into ``main_grad``. Kernels, FP8
and what they overlap need a GPU (``test_kernels_gpu``).
"""

import importlib
import importlib.metadata
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

from puzzle_align.config.load import load_job
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import LORA_TARGETS, Fusions, LoraSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import make_trainable
from puzzle_align.runtime.groups.world import World
from tests.dist import emulated_te
from tests.dist.random_models import random_context
from tests.dist.spawn import run_ranks
from tests.dist.test_kernels_gpu import SPEC, Result, distance, two_rows
from tests.dist.test_lora_dropout import JOB as PPO
from tests.dist.test_lora_runs import JOB, save_base
from tests.jobs import parallel, resolved

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version(importlib.metadata.version("megatron-core")) >= Version("0.17"),
        reason=f"Transformer Engine {emulated_te.VERSION} goes with Megatron-core 0.16",
    ),
]
LORA = LoraSpec(r=4, lora_alpha=8.0, target_modules=LORA_TARGETS)
FUSIONS = Fusions(
    gradient_accumulation_fusion=True, bias_activation_fusion=False, apply_rope_fusion=False
)
PLANS = {
    1: [ParallelPlan()],
    2: [ParallelPlan(tensor=2), ParallelPlan(tensor=2, sequence_parallel=True)],
}


ONE_BASE = (
    "actor.model.path=BASE",
    "actor.lora={r: 4, lora_alpha: 16}",
    "critic.base=actor",
    "critic.lora={r: 4, lora_alpha: 16}",
)


class Ran(NamedTuple):
    """A case on a rank."""

    te: Result
    local: Result
    num_weight_gradients: int  # products of Transformer Engine's


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new processes import the package; skip the test if there is none."""
    if not emulated_te.write(folder):
        pytest.skip(f"pip cannot download transformer-engine {emulated_te.VERSION}")
    monkeypatch.syspath_prepend(folder)


def _without_device() -> None:
    """Answer what Transformer Engine asks of CUDA."""
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda *_args: nullcontext()  # type: ignore[misc, assignment]


def _run(rank: int, world_size: int, lora: LoraSpec | None) -> list[Ran]:
    """By plan and recompute."""
    _without_device()
    kernels: Any = importlib.import_module("transformer_engine_torch")
    world, found = World(rank, world_size, torch.device("cpu")), []
    for plan in PLANS[world_size]:
        for recompute in ("none", "full"):
            made = []
            for implementation in ("te", "local"):
                kernels.products.clear()
                options: dict[str, Any] = {"recompute": recompute, "attention": "dense"}
                if implementation == "te":
                    options["fusions"] = FUSIONS
                context = random_context(
                    replace(SPEC, lora=lora),
                    plan,
                    world,
                    seed=1,
                    transformer_impl=implementation,
                    **options,
                )
                make_trainable(context, OptimizerConfig())
                made.append((two_rows(context), kernels.products["weight gradient"]))
            (te, number), (local, _) = made
            found.append(Ran(te, local, number))
    return found


@pytest.mark.parametrize("world_size", PLANS)
@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "all weights"])
def test_layers_have_the_numbers_of_local_ones(
    lora: LoraSpec | None, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch)
    for cases in run_ranks(_run, world_size, lora, fresh=True):
        for te, local, num_weight_gradients in cases:
            assert distance(te.log_probs, local.log_probs) < 1e-6
            shared = te.gradients.keys() & local.gradients.keys()
            if lora is not None:
                assert te.gradients.keys() == local.gradients.keys()
                assert len(shared) == SPEC.num_hidden_layers * len(LORA_TARGETS) * 2
            # Of frozen weights no gradients are computed; of others there are four in a layer.
            assert (num_weight_gradients == 0) == (lora is not None)
            assert len(shared) >= 4 * SPEC.num_hidden_layers
            for name in shared:
                assert distance(te.gradients[name], local.gradients[name]) < 5e-6, name


_LAYERS = "actor.parallel.pipeline_layers"
_CHUNKS = "actor.parallel.virtual_pipeline_model_parallel_size"
RUNS = {
    2: {
        "D2": (JOB, *parallel("actor", D=2)),
        "P2, uneven": (JOB, *parallel("actor", P=2), f"{_LAYERS}=[3,1]"),
        "P2, interleaved": (JOB, *parallel("actor", P=2), f"{_CHUNKS}=2"),
        "T2": (JOB, *parallel("actor", T=2, sp=True), "actor.parallel.recompute=full"),
        "PPO, P2, merged": (PPO, *ONE_BASE, *parallel("actor", P=2)),
        "PPO, P2, on T2": (PPO, *ONE_BASE, *parallel("actor", P=2), *parallel("generation", T=2)),
    },
    4: {"P2 T2": (JOB, *parallel("actor", P=2, T=2, sp=True))},
}
UNFUSED = ("engine.apply_rope_fusion=false", "engine.bias_activation_fusion=false")
IMPLEMENTATIONS = {"te": ("engine.transformer_impl=te", *UNFUSED), "local": ()}


def _train(rank: int, world_size: int, folder: Path, name: str) -> dict[str, list[Any]]:
    """Metrics by step, with either kind of layers."""
    _without_device()
    text, *overrides = RUNS[world_size][name]
    base, found = f"{folder}/base", {}
    for implementation, own in IMPLEMENTATIONS.items():
        given = (override.replace("BASE", base) for override in (*overrides, *own))
        output = f"output_dir={folder / name / implementation}"
        config = load_job(text.replace("BASE", base), [*given, output, "max_steps=2"])
        job = resolved(config, world_size)
        assert job.engine.options.transformer_impl == implementation
        stage = importlib.import_module(f"puzzle_align.stages.{config.stage}")
        trainer = stage.open_trainer(job, World(rank, world_size, torch.device("cpu")))
        found[implementation] = [trainer.train_step(step)[0] for step in range(2)]
    return found


@pytest.mark.parametrize(
    ("world_size", "name"), [(size, name) for size, runs in RUNS.items() for name in runs]
)
def test_jobs_with_adapters_have_the_metrics_of_local_layers(
    world_size: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch)
    save_base(tmp_path)
    for found in run_ranks(_train, world_size, tmp_path, name, fresh=True):
        for te, local in zip(found["te"], found["local"], strict=True):
            assert te.keys() == local.keys() and len(local) > 3
            for key, value in local.items():
                assert te[key] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), key
