"""Transformer Engine's layers on CPUs, its kernels emulated: their numbers are local layers'.

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

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import LORA_TARGETS, Fusions, LoraSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.context import make_trainable
from puzzle_align.runtime.groups.world import World
from tests.dist import emulated_te
from tests.dist.random_models import random_context
from tests.dist.spawn import run_ranks
from tests.dist.test_kernels_gpu import SPEC, Result, distance, two_rows

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


class Ran(NamedTuple):
    """A case on a rank."""

    te: Result
    local: Result
    num_weight_gradients: int  # products of Transformer Engine's


def _run(rank: int, world_size: int, lora: LoraSpec | None) -> list[Ran]:
    """By plan and recompute."""
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.device = lambda *_args: nullcontext()  # type: ignore[misc, assignment]
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
    if not emulated_te.write(tmp_path):
        pytest.skip(f"pip cannot download transformer-engine {emulated_te.VERSION}")
    monkeypatch.syspath_prepend(tmp_path)
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
