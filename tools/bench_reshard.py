#!/usr/bin/env python3
"""Measure switches between parallel plans, and print JSON.

``measured``, on gloo ranks of this machine, moves a random model from plan to plan three ways, in
turns: by routing table; by way of rank 0, which gathers all of it and broadcasts it whole; and with
every rank gathering all of it, as ZeRO-3 does. "ratios" are medians over the repeats of another
way's seconds over the routing table's; "received_over_bound" is what the table has the ranks
receive over the least that they must.

    python tools/bench_reshard.py measured --ranks 4
    python tools/bench_reshard.py paper

``paper`` counts, for each switch, what the busiest rank receives, on links inside of a node and
between nodes, beside the lower bound; and seconds on links of the declared bandwidths, each way of
a rank by itself, all of its traffic that way one after the other: "declared_seconds" if no rank
ever waits, "declared_seconds_in_rounds" if all ranks meet after each of the runtime's rounds.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - what routing tables are compared with
from local_ranks import run_ranks

from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import ModelOptions, ModelSpec, num_parameters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import ranks_of_least_traffic
from puzzle_align.models.hf_weights import RandomSource, load_weights
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import RoutingTable, lower_bound, routing_table
from puzzle_align.runtime.context import Context, build_context
from puzzle_align.runtime.groups import World, build_communicators
from puzzle_align.runtime.reshard import reshard

BUCKET = 2**22  # numbers
PAPER_BUCKET = 2**25  # numbers: the runtime's 64 MiB, of bf16
PAIRS = {
    2: (((2, 1, 1), (1, 1, 2)), ((1, 1, 2), (1, 2, 1))),
    4: (
        ((4, 1, 1), (2, 1, 2)),
        ((2, 1, 2), (1, 2, 2)),
        ((2, 2, 1), (1, 1, 4)),
        ((1, 1, 1), (1, 4, 1)),
        ((1, 1, 2), (1, 4, 1)),
    ),
    8: (
        ((2, 2, 2), (1, 4, 2)),
        ((1, 1, 8), (1, 4, 2)),
        ((4, 2, 1), (1, 2, 4)),
        ((1, 1, 2), (1, 4, 2)),
    ),
}
LLAMA = {  # PUZZLE's Table 1: hidden size, intermediate size, layers, heads
    "7B": (4096, 11008, 32, 32),
    "13B": (5120, 13824, 40, 40),
    "33B": (6656, 17920, 64, 52),
}
ON_PAPER = (
    ("7B", (1, 1, 8), (1, 4, 2)),
    ("7B", (1, 1, 8), (1, 4, 8)),
    ("7B", (4, 2, 1), (2, 2, 2)),
    ("7B", (4, 8, 1), (2, 8, 2)),
    ("13B", (4, 4, 2), (2, 4, 4)),
    ("33B", (8, 2, 2), (4, 2, 4)),
    ("33B", (8, 4, 4), (2, 16, 4)),
    ("33B", (8, 16, 4), (2, 64, 4)),
)
Way = Callable[[], None]


def llama(hidden: int, intermediate: int, num_layers: int, num_heads: int) -> ModelSpec:
    """A Llama of these dimensions, with a vocabulary of 32,000."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    return from_hf_config(config, "")


def plan_of(sizes: tuple[int, int, int]) -> ParallelPlan:
    """(P, D, T) as a plan."""
    pipeline, data, tensor = sizes
    return ParallelPlan(pipeline=pipeline, data=data, tensor=tensor)


def switch(
    model: ModelSpec, before: tuple[int, int, int], after: tuple[int, int, int]
) -> tuple[Holdings, Holdings]:
    """From the first ranks in order to the same ones, as the runtime would order them.

    To more ranks, the source's and others, it goes in the usual order.
    """
    source = Holdings(model, plan_of(before), tuple(range(plan_of(before).world_size)))
    plan = plan_of(after)
    ranks = tuple(range(plan.world_size))
    if len(ranks) == len(source.ranks):
        ranks = ranks_of_least_traffic(source, plan)
    return source, Holdings(model, plan, ranks)


def measured(world: World, options: dict[str, int]) -> list[dict[str, Any]]:
    """All pairs of plans on this many ranks. Collective over the world."""
    hidden = options["hidden"]
    model = llama(hidden, 4 * hidden, options["layers"], 16)
    return [_measure(model, pair, world, options["repeats"]) for pair in PAIRS[world.size]]


def _measure(model: ModelSpec, pair: Any, world: World, repeats: int) -> dict[str, Any]:
    source, destination = switch(model, *pair)
    everywhere = Holdings(model, ParallelPlan(data=world.size), tuple(range(world.size)))
    first = Holdings(model, ParallelPlan(), (0,))
    contexts = {
        name: _open(each, world, filled=name == "source")
        for name, each in (("source", source), ("own", destination), ("whole", everywhere))
    }
    shards = {
        name: None if each is None else Shards(each.chunks, model)
        for name, each in contexts.items()
    }
    whole = contexts["whole"]
    assert whole is not None
    by_table = _mover(source, destination, shards["source"], shards["own"])
    to_first = _mover(source, first, shards["source"], shards["whole"] if world.rank == 0 else None)
    to_all = _mover(source, everywhere, shards["source"], shards["whole"])
    own_part = _mover(everywhere, destination, shards["whole"], shards["own"])

    def by_rank_zero() -> None:
        to_first()
        for value in whole.chunks[0].parameters():
            dist.broadcast(value.data, src=0)
        own_part()

    def by_all() -> None:
        to_all()
        own_part()

    ways: dict[str, Way] = {"table": by_table, "rank 0": by_rank_zero, "all-gather": by_all}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            taken = _seconds(way)
            if repeat:  # the first makes connections
                seconds[name].append(taken)
    received = routing_table(source, destination).received
    least = lower_bound(source, destination)
    return {
        "from": pair[0],
        "to": pair[1],
        "parameters": num_parameters(model),
        "seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "ratios": {
            name: statistics.median(
                other / own for other, own in zip(taken, seconds["table"], strict=True)
            )
            for name, taken in seconds.items()
            if name != "table"
        },
        "received_over_bound": sum(received.values()) / max(1, sum(least.values())),
    }


def _open(holdings: Holdings, world: World, *, filled: bool) -> Context | None:
    communicators = build_communicators(holdings.plan, world, holdings.ranks, trained=False)
    if communicators is None:
        return None
    source = RandomSource(holdings.model, 0)

    def fill(chunk: Any) -> None:
        if filled:
            load_weights(chunk, holdings.model, source)

    return build_context(
        "actor",
        holdings.model,
        ModelOptions(),
        holdings.plan,
        world,
        communicators=communicators,
        fill=fill,
        seed=0,
    )


def _mover(
    source: Holdings, destination: Holdings, given: Shards | None, taken: Shards | None
) -> Callable[[], None]:
    """The switch, ready to be made again and again."""
    table = routing_table(source, destination, max_size=BUCKET)
    schedule = rounds(table.routes, BUCKET)

    def move() -> None:
        reshard(table, schedule, given, taken, dtype=torch.float32, device=torch.device("cpu"))

    return move


def _seconds(way: Way) -> float:
    """From when all ranks begin to when the last is done. Collective over the world."""
    dist.barrier()
    started = time.perf_counter()
    way()
    dist.barrier()
    return time.perf_counter() - started


def on_paper(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The large switches, in GB of bf16."""
    per_node = options.ranks_per_node
    for size, before, after in ON_PAPER:
        source, destination = switch(llama(*LLAMA[size]), before, after)
        table = routing_table(source, destination, ranks_per_node=per_node, max_size=PAPER_BUCKET)
        between: Counter[int] = Counter()
        for (sender, receiver), numbers in table.links.items():
            between[receiver] += 2 * numbers * (sender // per_node != receiver // per_node)
        schedule = rounds(table.routes, PAPER_BUCKET)
        by_round = (
            RoutingTable(tuple(route for message in messages for route in message.routes), ())
            for messages in schedule
        )
        yield {
            "model": size,
            "ranks": len({*source.ranks, *destination.ranks}),
            "from": before,
            "to": after,
            "model_gb": 2e-9 * num_parameters(source.model),
            "sent_gb": 2e-9 * max(table.sent.values(), default=0),
            "received_gb": 2e-9 * max(table.received.values(), default=0),
            "between_nodes_gb": 1e-9 * max(between.values(), default=0),
            "lower_bound_gb": 2e-9 * max(lower_bound(source, destination).values()),
            "declared_seconds": _declared_seconds(table, options),
            "rounds": len(schedule),
            "declared_seconds_in_rounds": sum(_declared_seconds(t, options) for t in by_round),
        }


def _declared_seconds(table: RoutingTable, options: argparse.Namespace) -> float:
    """Until the busiest rank has sent, or received, all that the table says."""
    seconds: dict[int, float] = defaultdict(float)
    for (sender, receiver), numbers in table.links.items():
        near = sender // options.ranks_per_node == receiver // options.ranks_per_node
        bandwidth = options.node_bandwidth if near else options.network_bandwidth
        for side in (sender, -1 - receiver):  # a rank sends and receives at the same time
            seconds[side] += 2e-9 * numbers / bandwidth
    return max(seconds.values(), default=0.0)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(dest="what", required=True)
    run = ways.add_parser("measured", help="on gloo ranks of this machine")
    run.add_argument("--ranks", type=int, choices=tuple(PAIRS), default=2)
    run.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    run.add_argument("--layers", type=int, default=8)
    run.add_argument("--repeats", type=int, default=10, help="measured switches of each way (10)")
    paper = ways.add_parser("paper", help="of large models on many ranks")
    paper.add_argument("--ranks-per-node", type=int, default=8)
    paper.add_argument("--node-bandwidth", type=float, default=200.0, help="GB/s a rank (200)")
    paper.add_argument("--network-bandwidth", type=float, default=12.5, help="GB/s a rank (12.5)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    options = parse_arguments(arguments)
    if options.what == "paper":
        found: Any = list(on_paper(options))
    else:
        found = run_ranks(measured, options.ranks, vars(options))
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
