#!/usr/bin/env python3
"""Measure switches between parallel plans, and print JSON.

``measured`` moves a random model from plan to plan on gloo ranks of this machine, three ways in
turns: by routing table; by way of rank 0, which gathers all of it and broadcasts it whole; and with
every rank gathering all of it, as ZeRO-3 does. Planning is done before. "seconds" are medians,
"ratios" medians over the repeats of another way's seconds over the routing table's;
"received_over_bound" is what the ranks received, counted at their calls, over the least that they
must. What each way brings is compared bitwise with what loading gives.

    python tools/bench_reshard.py measured --ranks 4
    python tools/bench_reshard.py paper

``paper`` counts what the busiest rank receives, within its node and from others, beside the lower
bound and what HybridFlow's 3D-HybridEngine has it receive, where that serves the switch: as its
paper's formula has it, which cuts all of the model evenly, and on these layers. "declared_seconds"
are a bound: the busiest rank's traffic, one after the other, on links of nominal bandwidths, those
of PUZZLE's two clusters for its Table 3 ("paper_seconds": what it measured there; "plans_stated":
whether it names the plans), else those of the options. "planning_seconds" are what a rank of a run
takes to find its ranks, the table and its rounds of 64 MiB ("rounds").
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist  # noqa: TID251 - what routing tables are compared with
from bench_run import parser_of, run_ranks, show
from reshard_cases import (
    LLAMA,
    PAIRS,
    SCALED,
    TABLE_3,
    Case,
    Links,
    in_turns,
    llama,
    plan_of,
    random_part,
    switch,
)

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import BYTES_PER_PARAMETER, num_parameters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.chunk import ModelChunk
from puzzle_align.models.shards import Shards
from puzzle_align.resharding import hybridflow
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import lower_bound, routing_table
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.reshard import reshard
from puzzle_align.runtime.shadow import BUCKET_BYTES

OWN = "table"
BUCKET = BUCKET_BYTES // BYTES_PER_PARAMETER["bf16"]  # numbers, of a run's
Way = Callable[[], None]


def measured(world: World, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All pairs of plans on this many ranks. Collective over the world."""
    hidden = options["hidden"]
    model = llama(hidden, 4 * hidden, options["layers"], 16, tied=options["tied"])
    found = []
    for before, after in PAIRS[world.size]:
        ends = switch(model, plan_of(before), plan_of(after))
        models = _Models(*ends, world, options["bucket"] * 2**20 // 4)
        measures = _measure(models, options["repeats"])
        found.append({"from": before, "to": after, "parameters": num_parameters(model), **measures})
    return found


class _Models:
    """One model under the plans of a switch, and what is to be there after it."""

    def __init__(self, source: Holdings, destination: Holdings, world: World, bucket: int) -> None:
        self.source, self.destination, self.bucket = source, destination, bucket
        self.everywhere = Holdings(source.model, ParallelPlan(data=world.size), source.ranks)
        self.first = Holdings(source.model, ParallelPlan(), (0,))
        self.is_first = world.rank == 0
        self.given = _open(source, world)
        self.taken = _open(destination, world)
        self.whole = _open(self.everywhere, world)
        self._expected = [value.detach().clone() for value in self.taken.parameters()]

    @torch.no_grad()
    def clear(self) -> None:
        """Forget what was brought before."""
        for chunk in (self.taken, self.whole):
            for value in chunk.parameters():
                value.zero_()

    def is_right(self) -> bool:
        """True if all ranks hold bitwise what loading gives them. Collective over the world."""
        pairs = zip(self.taken.parameters(), self._expected, strict=True)
        right = torch.tensor(all(torch.equal(value, expected) for value, expected in pairs))
        dist.all_reduce(right, op=dist.ReduceOp.MIN)
        return bool(right)


def _measure(models: _Models, repeats: int) -> dict[str, Any]:
    ways = _ways(models)
    least = max(1, sum(lower_bound(models.source, models.destination).values()))
    over_bound = {}
    for name, way in ways.items():  # this first turn makes connections, too
        models.clear()
        over_bound[name] = _received(way) / least
        assert models.is_right(), f"{name}: the weights differ from loaded ones"
    seconds = in_turns(ways, repeats)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    ratios = {
        name: statistics.median(o / own for o, own in zip(taken, seconds[OWN], strict=True))
        for name, taken in seconds.items()
        if name != OWN
    }
    return {"seconds": medians, "ratios": ratios, "received_over_bound": over_bound}


def _ways(models: _Models) -> dict[str, Way]:
    """The switch by routing table, through rank 0, and by gathering everything."""
    model = models.source.model
    given, taken, whole = (
        Shards([chunk], model) for chunk in (models.given, models.taken, models.whole)
    )
    mover = partial(_mover, models.bucket)
    to_first = mover(models.source, models.first, given, whole if models.is_first else None)
    to_all = mover(models.source, models.everywhere, given, whole)
    own_part = mover(models.everywhere, models.destination, whole, taken)

    def by_rank_zero() -> None:
        to_first()
        for value in models.whole.parameters():
            dist.broadcast(value.data, src=0)
        own_part()

    def by_all() -> None:
        to_all()
        own_part()

    by_table = mover(models.source, models.destination, given, taken)
    return {OWN: by_table, "rank 0": by_rank_zero, "all-gather": by_all}


def _received(way: Way) -> int:
    """Numbers that all ranks together receive from others by ``way``. Collective over the world."""
    with _counted() as sizes:
        way()
    total = torch.tensor(sum(sizes))
    dist.all_reduce(total)
    return int(total)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The numbers of every message that this rank receives meanwhile, from it to it left out."""
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
    """This rank's part of the model, loaded: on all ranks it has one chunk."""
    context = random_part(holdings, world)
    assert context is not None
    (chunk,) = context.chunks
    return chunk


def _mover(
    bucket: int, source: Holdings, destination: Holdings, given: Shards, taken: Shards | None
) -> Callable[[], None]:
    """The switch in buckets of so many numbers, ready to be made again and again."""
    table = routing_table(source, destination, max_size=bucket)
    schedule = rounds(table.routes, bucket)

    def move() -> None:
        reshard(table, schedule, given, taken, dtype=torch.float32, device=torch.device("cpu"))

    return move


def on_paper(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The large switches, in GB of bf16."""
    declared = Links(options.node_bandwidth, options.network_bandwidth, options.ranks_per_adapter)
    for case in (case for case in (*TABLE_3, *SCALED) if options.case in case.name):
        yield _case(case, case.links or declared, options.ranks_per_node)


def _case(case: Case, links: Links, ranks_per_node: int) -> dict[str, Any]:
    model = llama(*LLAMA[case.model])
    started = time.perf_counter()
    source, destination = switch(model, case.before, case.after)
    table = routing_table(source, destination, ranks_per_node=ranks_per_node, max_size=BUCKET)
    num_rounds = len(rounds(table.routes, BUCKET))
    taken = time.perf_counter() - started
    inside: Counter[int] = Counter()
    between: Counter[int] = Counter()
    for (sender, receiver), numbers in table.links.items():
        near = sender // ranks_per_node == receiver // ranks_per_node
        for side in (sender, -1 - receiver):  # a rank sends and receives at the same time
            (inside if near else between)[side] += numbers
    least = lower_bound(source, destination)
    serves = hybridflow.applies(case.before, case.after)
    share = hybridflow.even_share(case.before, case.after) if serves else None
    return {
        "case": case.name,
        "model": case.model,
        "ranks": len({*source.ranks, *destination.ranks}),
        "from": str(case.before),
        "to": str(case.after),
        "plans_stated": case.stated,
        "model_gb": _gb(num_parameters(model)),
        "sent_gb": _gb(max(table.sent.values(), default=0)),
        "received_gb": _gb(max(table.received.values(), default=0)),
        "inside_nodes_gb": _gb(max((n for r, n in inside.items() if r < 0), default=0)),
        "between_nodes_gb": _gb(max((n for r, n in between.items() if r < 0), default=0)),
        "lower_bound_gb": _gb(max(least.values())),
        "all_received_gb": _gb(sum(table.received.values())),
        "all_lower_bound_gb": _gb(sum(least.values())),
        "hybridflow_gb": _gb(hybridflow.most_received(source, case.after)) if serves else None,
        "hybridflow_formula_gb": None if share is None else share * _gb(num_parameters(model)),
        "declared_links": asdict(links),
        "declared_seconds": _declared_seconds(inside, between, links),
        "paper_seconds": case.paper_seconds,
        "rounds": num_rounds,
        "planning_seconds": taken,
    }


def _declared_seconds(inside: Counter[int], between: Counter[int], links: Links) -> float:
    """The busiest rank's; sides are ranks that send, and -1 less ranks that receive."""
    adapters: Counter[int] = Counter()
    for side, numbers in between.items():
        adapters[side // links.ranks_per_adapter] += numbers  # of those that send: 0 and on
    return max(
        (
            _gb(inside[side]) / links.node
            + _gb(adapters[side // links.ranks_per_adapter] if between[side] else 0) / links.network
            for side in {*inside, *between}
        ),
        default=0.0,
    )


def _gb(numbers: int) -> float:
    """Gigabytes of so many bf16 numbers."""
    return 2e-9 * numbers


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = parser_of(__doc__)
    ways = parser.add_subparsers(dest="what", required=True)
    run = ways.add_parser("measured", help="on gloo ranks of this machine")
    run.add_argument("--ranks", type=int, choices=tuple(PAIRS), default=2)
    run.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    run.add_argument("--layers", type=int, default=8)
    run.add_argument("--bucket", type=int, default=16, help="MiB at once (16); runs have 64")
    run.add_argument("--tied", action="store_true", help="the head is the embedding")
    run.add_argument("--repeats", type=int, default=10, help="measured switches of each way (10)")
    paper = ways.add_parser("paper", help="of large models on many ranks")
    paper.add_argument("--case", default="", help="those that have this in their name (all)")
    paper.add_argument("--ranks-per-node", type=int, default=8)
    paper.add_argument("--node-bandwidth", type=float, default=200.0, help="GB/s a rank (200)")
    paper.add_argument(
        "--network-bandwidth", type=float, default=12.5, help="GB/s a network adapter (12.5)"
    )
    paper.add_argument("--ranks-per-adapter", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    options = parse_arguments(arguments)
    if options.what == "paper":
        found: Any = list(on_paper(options))
    else:
        found = run_ranks(measured, options.ranks, vars(options))
    show(found)


if __name__ == "__main__":
    main()
