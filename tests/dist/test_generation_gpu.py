"""CUDA graphs of decode steps: the tokens of steps that are launched kernel by kernel.

No step may make the host wait: CUDA's synchronizing calls are errors within them.
"""

from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest
import torch

from puzzle_align.layout.model import Dtype, ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.generation import engine
from puzzle_align.runtime.generation.step_graphs import StepGraphs
from puzzle_align.runtime.groups.world import World
from tests.dist.chunk_runs import VARIANTS, save_model
from tests.dist.spawn import run_ranks
from tests.dist.test_generation import context_of
from tests.dist.test_generation_steps import ALL, CASES, SAMPLINGS, answers, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
LONG = ("long", ALL)


class _Watched(StepGraphs):
    """Counts what is captured; a step that waits for the device fails."""

    num_captured = 0

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        def without_waiting() -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        super().run(key, without_waiting)

    def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        _Watched.num_captured += 1
        return super()._captured(step)


def _on_one_gpu(rank: int, world_size: int, folder: Path, dtype: Dtype) -> None:
    engine.StepGraphs = _Watched
    world = World(rank, world_size, torch.device("cuda", 0))
    torch.cuda.set_device(0)
    context = context_of(folder, ParallelPlan(), world, ModelOptions(dtype=dtype))
    for name, sizes in [*CASES["(1,1,1)"], LONG]:
        sampling = SAMPLINGS[name]
        wanted = answers(context, sampling, sizes, 1, enforce_eager=True)
        before = _Watched.num_captured
        for steps, eager in ((1, False), (8, False), (8, True), (None, False)):
            found = answers(context, sampling, sizes, steps, enforce_eager=eager)
            if dtype == "fp32":
                same(found, wanted, bitwise=False, rounding=1e-4)
            assert all(np.isfinite(response.log_probs).all() for response in found)
        assert (_Watched.num_captured > before) == (name != "one token")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_graphs_have_the_tokens_of_single_launches(dtype: str, tmp_path: Path) -> None:
    """In bf16 other batch sizes round so much otherwise that tokens part: no more than finite."""
    save_model(tmp_path, *VARIANTS["llama grouped"], seed=1)
    run_ranks(_on_one_gpu, 1, tmp_path, dtype, fresh=True)


def _waits_within_a_graph(rank: int, world_size: int) -> None:
    torch.cuda.set_device(0)
    value, graphs = torch.ones(3, device="cuda"), StepGraphs()
    graphs.run("key", value.tolist)
    with pytest.raises(RuntimeError, match="decode step: set generation.enforce_eager=true"):
        graphs.run("key", value.tolist)


def test_a_step_that_cannot_be_captured_has_a_cure() -> None:
    run_ranks(_waits_within_a_graph, 1, fresh=True)


def _frees_what_it_took(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    torch.cuda.set_device(0)
    world = World(rank, world_size, torch.device("cuda", 0))
    context = context_of(folder, ParallelPlan(), world)
    taken = []
    for _ in range(3):
        answers(context, SAMPLINGS["greedy"], ALL, None)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved())
    return taken[0], taken[-1]


def test_graphs_and_their_memory_end_with_the_generation(tmp_path: Path) -> None:
    save_model(tmp_path, *VARIANTS["llama grouped"], seed=1)
    ((first, last),) = run_ranks(_frees_what_it_took, 1, tmp_path, fresh=True)
    assert last <= first
