"""Gradients and optimizer state that are set aside: their memory is free, and nothing is lost."""

from typing import Any

import pytest
import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer, on_host, set_aside
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import TINY


def test_storages_come_back_with_what_they_held() -> None:
    """On a CPU, where ``set_aside`` has no reason to do it with an optimizer's state."""
    whole = torch.arange(10, dtype=torch.float32)
    half, other = whole[5:], torch.full((3, 2), 2.5, dtype=torch.bfloat16)
    with on_host([half, other, whole]):
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert torch.equal(whole, torch.arange(10, dtype=torch.float32))
    assert torch.equal(other, torch.full((3, 2), 2.5, dtype=torch.bfloat16))
    half.zero_()
    assert whole.sum() == 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_device_s_memory_is_free_meanwhile() -> None:
    values = torch.randn(2**20, device="cuda")
    expected, held = values.cpu(), torch.cuda.memory_allocated()
    with on_host([values]):
        assert torch.cuda.memory_allocated() <= held - 4 * 2**20
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(values.cpu(), expected)


def _gradient_bytes(optimizer: Optimizer) -> int:
    wrappers: list[Any] = list(optimizer.context.wrappers)
    buffers = [buffer for wrapper in wrappers for buffer in wrapper.buffers]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def _steps(
    world: World, distributed: bool, dtype: str, *, aside: bool, **state: Any
) -> list[torch.Tensor]:
    """The weights after three steps, between which what trains is set aside, or is not."""
    context = random_context(TINY, ParallelPlan(data=world.size), world, seed=3, dtype=dtype)
    config = OptimizerConfig(lr=0.01, use_distributed_optimizer=distributed, **state)
    optimizer = trainable(context, config)
    held = _gradient_bytes(optimizer)
    assert held >= 4 * sum(parameter.numel() for parameter in context.chunks[0].parameters())
    for step in range(3):
        optimizer.zero_grad()
        for number, parameter in enumerate(context.chunks[0].parameters()):
            seed = torch.Generator().manual_seed(100 * step + number)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=seed))
        optimizer.reduce_gradients()
        assert optimizer.step(0.01)[0]
        if aside:
            with set_aside([optimizer]):
                assert _gradient_bytes(optimizer) == 0
            assert _gradient_bytes(optimizer) == held
    return [parameter.detach().clone() for parameter in context.chunks[0].parameters()]


def _compare(rank: int, world_size: int) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    for distributed in (False, True):
        for dtype in ("fp32", "bf16"):
            one, other = (_steps(world, distributed, dtype, aside=aside) for aside in (False, True))
            assert all(map(torch.equal, one, other))
    for state in ({"state_dtype": "bf16"}, {"cpu_offload": True}):
        one, other = (_steps(world, True, "bf16", aside=aside, **state) for aside in (False, True))
        assert all(map(torch.equal, one, other))


def test_training_goes_on_bitwise() -> None:
    run_ranks(_compare, 2)
