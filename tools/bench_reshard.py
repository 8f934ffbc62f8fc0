#!/usr/bin/env python3
"""Measure switches between parallel plans. Prints JSON.

A random model moves from plan to plan on gloo ranks of this machine, in three ways that take turns:
- "table": by routing table;
- "rank 0": rank 0 gathers the whole model and broadcasts it;
- "all-gather": every rank gathers the whole model, as ZeRO-3 does.

Plans are made beforehand. "seconds" are medians. "ratios" are medians over the repeats of a way's
seconds over the routing table's. "received_over_bound" is the count of numbers that ranks received
over the least possible. After each way's first turn the weights are compared bitwise with loaded
ones. For volumes of large models: puzzle-align inspect reshard.

    python tools/bench_reshard.py --ranks 4
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist  # noqa: TID251 - what routing tables are compared with
from bench_run import parser_of, run_ranks, show

from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.layout.weights import num_parameters
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.hf.sources import RandomSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import Message, rounds
from puzzle_align.resharding.routing import RoutingTable, lower_bound, routing_table
from puzzle_align.runtime.context import build_context
from puzzle_align.runtime.groups.world import World, build_communicators
from puzzle_align.runtime.reshard import Endpoints, reshard

TABLE = "table"
PAIRS = {  # of sizes (P, D, T), by number of ranks
    2: (((2, 1, 1), (1, 1, 2)), ((1, 1, 2), (1, 2, 1)), ((1, 1, 2), (2, 1, 1))),
    4: (((4, 1, 1), (2, 1, 2)), ((2, 1, 2), (1, 2, 2)), ((2, 2, 1), (1, 1, 4))),
    8: (((2, 2, 2), (1, 4, 2)), ((1, 1, 8), (1, 4, 2)), ((4, 2, 1), (1, 2, 4))),
}
Way = Callable[[], None]


def measured(world: World, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all pairs of plans on this many ranks. Collective over the world."""
    model = llama(options["hidden"], options["layers"])
    results = []
    ranks = tuple(range(world.size))
    for pair in PAIRS[world.size]:
        before, after = (ParallelPlan(pipeline=p, data=d, tensor=t) for p, d, t in pair)
        source = Holdings(model, before, ranks)
        # In the runtime's order of ranks.
        destination = Holdings(model, after, ordered_ranks(source, after, ranks, world.size))
        models = Models(source, destination, world, options["bucket"] * 2**20 // 4)
        measures = _measure(models, options["repeats"])
        results.append(
            {"from": pair[0], "to": pair[1], "parameters": num_parameters(model), **measures}
        )
    return results


def llama(hidden: int, num_layers: int) -> ModelSpec:
    """A Llama of these dimensions."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    return from_hf_config(config, "")


class Models:
    """One model under both plans of a switch, and the weights expected after it."""

    def __init__(
        self,
        source: Holdings,
        destination: Holdings,
        world: World,
        bucket: int,
        ranks_per_node: int | None = None,
    ) -> None:
        """Load the model under both plans, and whole on every rank. Collective over the world.

        Args:
            bucket: numbers that a rank sends at once.
            ranks_per_node: passed to ``routing_table``.
        """
        self.source, self.destination, self.bucket = source, destination, bucket
        self.ranks_per_node = ranks_per_node
        self.everywhere = Holdings(source.model, ParallelPlan(data=world.size), source.ranks)
        self.first = Holdings(source.model, ParallelPlan(), (0,))
        self.is_first = world.rank == 0
        self.given = _open(source, world)
        self.taken = _open(destination, world)
        self.whole = _open(self.everywhere, world)
        self._expected = [value.detach().clone() for value in self.taken.parameters()]

    @torch.no_grad()
    def clear(self) -> None:
        """Set the weights at the destinations to zero."""
        for chunk in (self.taken, self.whole):
            for value in chunk.parameters():
                value.zero_()

    def is_right(self) -> bool:
        """True if all ranks hold bitwise what loading gives them. Collective over the world."""
        pairs = zip(self.taken.parameters(), self._expected, strict=True)
        right = torch.tensor(all(torch.equal(value, expected) for value, expected in pairs))
        dist.all_reduce(right, op=dist.ReduceOp.MIN)
        return bool(right)


def _measure(models: Models, repeats: int) -> dict[str, Any]:
    ways = Moves(models).ways
    least = max(1, sum(lower_bound(models.source, models.destination).values()))
    over_bound = {}
    for name, way in ways.items():  # the first turn makes connections, too
        models.clear()
        over_bound[name] = _received(way) / least
        assert models.is_right(), f"{name}: the weights differ from loaded ones"
    seconds = in_turns(ways, repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {
        name: statistics.median(s / t for s, t in zip(times, seconds[TABLE], strict=True))
        for name, times in seconds.items()
        if name != TABLE
    }
    return {"seconds": medians, "ratios": ratios, "received_over_bound": over_bound}


def in_turns(ways: Mapping[str, Way], repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, from when all ranks begin until the last is done. Collective.

    Every repeat begins with another way, since a way's time depends on the one before it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            started = time.perf_counter()
            ways[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    return seconds


@dataclass(frozen=True)
class Move:
    """A switch by routing table, for this rank's parts of both models."""

    table: RoutingTable
    schedule: Sequence[Sequence[Message]]
    ends: Endpoints

    def __call__(self) -> None:
        """Make the switch. Collective over the world."""
        reshard(self.table, self.schedule, self.ends)


class Moves:
    """Switches of a model: to its plan, to rank 0, to all ranks, and from all ranks to its plan."""

    def __init__(self, models: Models) -> None:
        """Make the routing tables."""
        self.models = models
        model = models.source.model
        given, taken, whole = (
            Shards([chunk], model) for chunk in (models.given, models.taken, models.whole)
        )
        source, destination, everywhere = models.source, models.destination, models.everywhere
        first = whole if models.is_first else None
        self.by_table = self._move(source, destination, given, taken)
        self.to_first = self._move(source, models.first, given, first)
        self.to_all = self._move(source, everywhere, given, whole)
        self.to_shard = self._move(everywhere, destination, whole, taken)

    @property
    def ways(self) -> dict[str, Way]:
        """Three ways to make the switch to the plan, by name."""
        return {TABLE: self.by_table, "rank 0": self.by_rank_zero, "all-gather": self.by_all}

    def by_rank_zero(self) -> None:
        """Gather the model on rank 0, and broadcast it. Collective over the world."""
        self.to_first()
        for value in self.models.whole.parameters():
            dist.broadcast(value.data, src=0)
        self.to_shard()

    def by_all(self) -> None:
        """Gather the model on every rank. Collective over the world."""
        self.to_all()
        self.to_shard()

    def _move(
        self, source: Holdings, destination: Holdings, given: Shards, taken: Shards | None
    ) -> Move:
        bucket = self.models.bucket
        table = routing_table(
            source, destination, max_size=bucket, ranks_per_node=self.models.ranks_per_node
        )
        ends = Endpoints(given, taken, torch.float32, torch.device("cpu"))
        return Move(table, rounds(table.routes, bucket), ends)


def _received(way: Way) -> int:
    """Numbers that all ranks together receive from others by ``way``. Collective over the world."""
    with _counted() as sizes:
        way()
    total = torch.tensor(sum(sizes))
    dist.all_reduce(total)
    return int(total)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the numbers in each message that this rank receives from another one."""
    sizes: list[int] = []
    batch, broadcast, rank = dist.batch_isend_irecv, dist.broadcast, dist.get_rank()

    def counted_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        received = (o for o in operations if o.op is dist.irecv and o.peer != rank)
        sizes.extend(operation.tensor.numel() for operation in received)
        return batch(operations)

    def counted_broadcast(tensor: torch.Tensor, src: int) -> None:
        sizes.append(tensor.numel() * (src != rank))
        broadcast(tensor, src=src)

    with (
        mock.patch.object(dist, "batch_isend_irecv", counted_batch),
        mock.patch.object(dist, "broadcast", counted_broadcast),
    ):
        yield sizes


def _open(holdings: Holdings, world: World) -> ModelChunk:
    """This rank's part of the model, loaded. Collective over the world."""
    communicators = build_communicators(holdings.plan, world, holdings.ranks, trained=False)
    assert communicators is not None, "every rank has a part"
    source = RandomSource(holdings.model, 0)
    context = build_context(
        "actor",
        holdings.model,
        ModelOptions(),
        holdings.plan,
        world,
        communicators=communicators,
        fill=lambda chunk: load_weights(chunk, holdings.model, source),
    )
    (chunk,) = context.chunks
    return chunk


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, choices=tuple(PAIRS), default=2)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket", type=int, default=16, help="MiB at once (16); runs have 64")
    parser.add_argument(
        "--repeats", type=int, default=10, help="measured switches of each way (10)"
    )
    options = parser.parse_args(arguments)
    show(run_ranks(measured, options.ranks, vars(options)))


if __name__ == "__main__":
    main()
