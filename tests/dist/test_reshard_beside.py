"""Weights that move while their optimizer steps: as if they had moved after it, only sooner."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import Message, rounds
from puzzle_align.resharding.routing import RoutingTable, routing_table
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.world import World, build_communicators
from puzzle_align.runtime.optimizer.optimizer import Optimizer, Update
from puzzle_align.runtime.reshard import reshard, reshard_beside
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import TINY

BUCKET = 500  # numbers
SWITCHES = (
    (
        Holdings(TINY, ParallelPlan(pipeline=2), (0, 1)),
        Holdings(TINY, ParallelPlan(tensor=2), (0, 1)),
    ),
    (Holdings(TINY, ParallelPlan(tensor=2), (0, 1)), Holdings(TINY, ParallelPlan(data=2), (1, 0))),
    (Holdings(TINY, ParallelPlan(), (0,)), Holdings(TINY, ParallelPlan(), (1,))),
)


@dataclass
class Ends:
    """A switch, and this rank's part of its two models."""

    source: Context | None
    destination: Context | None
    table: RoutingTable
    schedule: list[list[Message]]
    dtype: str

    def shards(self) -> list[Shards | None]:
        both = (self.source, self.destination)
        return [None if each is None else Shards(each.chunks, TINY) for each in both]

    def after(self) -> None:
        reshard(self.table, self.schedule, *self.shards(), **self._how())

    def beside(self, update: Update) -> None:
        reshard_beside(self.table, self.schedule, *self.shards(), **self._how(), update=update)

    def weights(self) -> list[torch.Tensor]:
        chunks = [] if self.destination is None else self.destination.chunks
        return [value.detach().clone() for chunk in chunks for value in chunk.parameters()]

    def _how(self) -> dict:
        return {"dtype": DTYPES[self.dtype], "device": torch.device("cpu")}


def _open(world: World, before: Holdings, after: Holdings, dtype: str) -> Ends:
    models: list[Context | None] = []
    for number, each in enumerate((before, after)):
        communicators = build_communicators(each.plan, world, each.ranks, trained=number == 0)
        models.append(
            communicators
            and random_context(
                TINY, each.plan, world, seed=number, communicators=communicators, dtype=dtype
            )
        )
    table = routing_table(before, after, max_size=BUCKET)
    return Ends(models[0], models[1], table, rounds(table.routes, BUCKET), dtype)


def _optimizer(source: Context | None) -> Optimizer | None:
    if source is None:
        return None
    optimizer = trainable(source, OptimizerConfig(lr=0.01))
    for chunk in source.chunks:
        for number, parameter in enumerate(chunk.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    return optimizer


def _both_ways(rank: int, world_size: int) -> list[int]:
    """Rounds of every switch, each of which moved, bitwise, what it moves after the step."""
    world = World(rank, world_size, torch.device("cpu"))
    found = []
    for before, after in SWITCHES:
        for dtype in ("fp32", "bf16"):
            first, second = (_open(world, before, after, dtype) for _ in range(2))
            for ends, overlap in ((first, False), (second, True)):
                optimizer, at_first = _optimizer(ends.source), ends.weights()
                if optimizer is not None:
                    optimizer.step(0.01, ends.beside if overlap else None)
                elif overlap:
                    ends.beside(lambda _: None)
                if not overlap:
                    ends.after()
                moved = [
                    not torch.equal(*two) for two in zip(at_first, ends.weights(), strict=True)
                ]
                # All but embedding and head of a tensor rank whose part of them is padding.
                assert sum(moved) >= len(moved) - 2
            assert all(map(torch.equal, first.weights(), second.weights()))
            found.append(len(second.schedule))
    return found


def test_a_switch_beside_the_step_is_bitwise_the_one_after_it() -> None:
    for found in run_ranks(_both_ways, 2):
        assert min(found) > 3


def _until(arrived: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not arrived():
        assert time.monotonic() < deadline, "not within 30 s"
        time.sleep(0.01)


def _first_before_last(rank: int, world_size: int) -> int:
    """Rank 0 goes on to its second part when rank 1 has said that something of the first is there.

    Returns the parts that this rank updated after that.
    """
    world = World(rank, world_size, torch.device("cpu"))
    ends = _open(world, *SWITCHES[-1], "fp32")
    optimizer, at_first = _optimizer(ends.source), ends.weights()
    store = dist.distributed_c10d._get_default_store()
    parts: list[int] = []  # parameters of each

    def step_when_there(update: Update) -> None:
        known: set[int] = set()

        def wait_and_update(parameters: Sequence[torch.Tensor] | None) -> None:
            new = {id(parameter) for parameter in parameters or ()} - known
            if new and known:
                _until(lambda: store.check(["arrived"]))
                parts.append(len(new))
            known.update(new)
            update(parameters)

        ends.beside(wait_and_update)

    def tell(_: object) -> None:
        _until(lambda: not all(map(torch.equal, at_first, ends.weights())))
        store.set("arrived", "")

    if optimizer is None:
        ends.beside(tell)
    else:
        optimizer.step(0.01, step_when_there)
    return sum(parts)


def test_weights_arrive_before_others_are_updated() -> None:
    after, _ = run_ranks(_first_before_last, 2)
    assert after > 5
