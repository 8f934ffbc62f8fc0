"""Copy of a trained model under another plan: at each opening it has the current weights.

A step that has sent them leaves nothing for the opening to send.
"""

from functools import partial
from unittest import mock

import pytest
import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.main_weights import Buckets
from puzzle_align.layout.model import Dtype
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime import shadow as shadow_module
from puzzle_align.runtime.context import Context, build_copy
from puzzle_align.runtime.groups.world import World, build_communicators
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.shadow import Shadow
from tests.dist.random_models import plan, random_context, trainable
from tests.dist.spawn import run_ranks
from tests.dist.test_reshard import move, placed, same, values
from tests.specs import TINY
from tests.unit.job_plans import context

# Before each opening: a step, a step that sends the weights, one that does so but is skipped, since
# gradients are not finite, or nothing, as before an evaluation.
WAYS = ("", "beside", "", "step", "beside", "beside", "skipped", "step")
SENDING = ("beside", "skipped")
RATE = 0.1


def _put_gradients(source: Context, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for chunk in source.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))


def _open_often(
    rank: int,
    world_size: int,
    training: ParallelPlan,
    sampling: ParallelPlan,
    dtype: Dtype,
    sharded: bool,
) -> list[tuple[bool, float, bool]]:
    """Of each opening whether it had the weights of a move, how far they were from the first ones,
    and whether it moved them.
    """
    world = World(rank, world_size, torch.device("cpu"))
    trained = context("actor", training, model=TINY, dtype=dtype)
    copied = context("actor", sampling, "generate", model=TINY, dtype=dtype)
    source = random_context(TINY, training, world, seed=1, dtype=dtype)
    optimizer: Optimizer = trainable(source, OptimizerConfig(use_distributed_optimizer=sharded))
    links = build_communicators(sampling, world, copied.ranks, trained=False)
    assert links is not None
    built = build_copy(copied, TINY, world, links)
    assert not any(weight.numel() for chunk in built.chunks for weight in chunk.parameters())
    shadow = Shadow(
        trained,
        copied,
        world,
        source,
        links,
        ranks_per_node=world_size,
        sharded=Buckets() if sharded else None,
    )
    moved = placed(TINY, sampling, world, links, filled=False, dtype=dtype)
    before, after = (Holdings(TINY, each.plan, each.ranks) for each in (trained, copied))
    found, first, copies = [], None, []
    for number, way in enumerate(WAYS):
        optimizer.zero_grad()
        _put_gradients(source, number)
        if way == "skipped":
            next(source.chunks[0].parameters()).main_grad.fill_(torch.inf)
        if way:
            optimizer.reduce_gradients()
            step = partial(shadow.step, optimizer) if way in SENDING else optimizer.step
            assert step(RATE)[0] == (way != "skipped")
        with (
            mock.patch.object(shadow_module, "reshard", wraps=shadow_module.reshard) as moves,
            shadow.opened() as copy,
        ):
            assert copy is not None
            copies.append(copy)
            assert copy is copies[0]  # its modules are built once
            weights = values(copy)
            for chunk in copy.chunks:
                assert chunk._fp8_copies_are_old  # they would be of earlier weights
                chunk._fp8_copies_are_old = False
        assert not any(weight.numel() for weight in values(copy))  # their memory is free
        move(before, after, source, moved, dtype)
        first = first or weights
        apart = max((a - b).abs().max().item() for a, b in zip(weights, first, strict=True))
        found.append((same(weights, values(moved)), apart, moves.called))
    return found


@pytest.mark.parametrize(
    ("training", "sampling", "dtype", "sharded"),
    [
        (plan(2, 1, 1), plan(1, 1, 2), "fp32", False),
        (plan(1, 2, 1), plan(1, 1, 2), "fp32", True),  # each rank gathers all
        (plan(2, 2, 1), plan(1, 2, 2), "bf16", True),
    ],
)
def test_every_opening_has_the_weights_of_the_last_step(
    training: ParallelPlan, sampling: ParallelPlan, dtype: Dtype, sharded: bool
) -> None:
    for found in run_ranks(_open_often, training.world_size, training, sampling, dtype, sharded):
        assert [right for right, _, _ in found] == [True] * len(WAYS)
        assert [moves for _, _, moves in found] == [way not in SENDING for way in WAYS]
        distances = [apart for _, apart, _ in found]
        num_steps = len([way for way in WAYS if way in ("step", "beside")])
        assert distances[0] == 0 and len({*distances}) == 1 + num_steps
