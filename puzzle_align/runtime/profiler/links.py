"""Measure messages between the job's ranks, on the backend that jobs use."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from puzzle_align.layout.rules import Box, Piece, extents
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import Kept, Route, RoutingTable
from puzzle_align.resharding.switch import BUCKET_BYTES
from puzzle_align.runtime.groups.collectives import sum_over_world
from puzzle_align.runtime.groups.world import World, named
from puzzle_align.runtime.moments import now
from puzzle_align.runtime.profiler.timing import Samples, repeated
from puzzle_align.runtime.reshard import Endpoints, reshard

Transport = Literal["p2p", "exchange", "all_reduce", "all_gather", "copy"]

# A sample is the mean of at most this many messages, bytes or seconds: on gloo a few of a hundred
# messages take ten times as long as the others, and a job waits for each of them.
_MESSAGES, _BATCH_BYTES, _SAMPLE_S = 60, 512 * 2**20, 2.0
# Between messages a CPU computes for some 3 ms, about as long as a small layer: idle threads would
# answer twice as fast as in a job, where ranks compute and wait for the slowest. Messages also slow
# that work down (gloo's threads take processors), which counts as theirs.
_BETWEEN = 500  # rows and columns of a matrix product


class LinkMeter:
    """Measures messages of each transport among ranks; makes each process group once."""

    def __init__(self, world: World) -> None:
        """Collective over the world: NCCL's default group connects in a collective of all ranks."""
        self._world = world
        sum_over_world(torch.zeros(1, device=world.device))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def measure(
        self, transport: Transport, groups: Sequence[tuple[int, ...]], size: int, repeats: int
    ) -> list[float]:
        """Measure seconds per message, in all ``groups`` at the same time; empty on other ranks.

        Collective over each group's ranks. ``p2p`` is half the time of a message from a group's
        first rank to its second and back. ``exchange`` and ``copy`` are of many boxes at once, and
        resharded: packed, sent and written by the code of a switch, into memory that is allocated
        and freed each time.

        Args:
            size: bytes of a message; of an all-gather's result, rounded up to equal parts.
        """
        my_group = next((ranks for ranks in groups if self._world.rank in ranks), None)
        if my_group is None:
            return []
        group = self._group(my_group)
        send = self._sender(transport, my_group, group, size)
        number = min(_MESSAGES, max(1, math.ceil(_BATCH_BYTES / size / 8)))
        number = min(number, max(1, math.ceil(_SAMPLE_S / self._slowest(send, group))))
        in_one = 2 if transport == "p2p" else num_at_once(transport, size)
        start = torch.zeros(1, device=self._world.device)
        work = torch.ones(_BETWEEN, _BETWEEN)

        def in_turn(call: Callable[[], object]) -> tuple[float, float]:
            """Seconds of work and of ``call``, in turn; what it makes is freed between them."""
            dist.all_reduce(start, group=group)
            working, taken = 0.0, 0.0
            for _ in range(number):
                begun = now(self._world.device)
                if self._world.device.type == "cpu":
                    work.matmul(work)
                called = now(self._world.device)
                made = call()
                taken += now(self._world.device) - called
                working += called - begun
                del made
            return working, taken

        def sample() -> Samples:
            alone, _ = in_turn(lambda: None)
            working, taken = in_turn(send)
            return {"message": [(taken + max(0.0, working - alone)) / number / in_one]}

        # Equally often on all ranks: each sample is collective.
        return repeated(sample, repeats, adaptive=False)["message"]

    def _slowest(self, send: Callable[[], object], group: dist.ProcessGroup) -> float:
        """Seconds of a message after the first, which connects, on the group's slowest rank."""
        send()
        begun = now(self._world.device)
        send()
        seconds = torch.tensor([now(self._world.device) - begun], device=self._world.device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        return max(seconds.item(), 1e-6)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._groups:
            with named(f"links {' '.join(map(str, ranks))}"):
                made = dist.new_group(
                    list(ranks), timeout=self._world.timeout, use_local_synchronization=True
                )
            assert isinstance(made, dist.ProcessGroup)
            self._groups[ranks] = made
        return self._groups[ranks]

    def _sender(
        self, transport: Transport, ranks: tuple[int, ...], group: dist.ProcessGroup, size: int
    ) -> Callable[[], object]:
        device, number = self._world.device, len(ranks)
        if transport == "all_reduce":
            tensor = torch.zeros(max(1, size // 4), device=device)
            return lambda: dist.all_reduce(tensor, group=group)
        if transport == "all_gather":
            part = torch.zeros(max(1, math.ceil(size / 4 / number)), device=device)
            whole = torch.empty(number * len(part), device=device)
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        if transport in ("exchange", "copy"):
            number_at_once, elements = num_at_once(transport, size), max(1, size // 4)
            return _resharding(number_at_once, elements, ranks, device)
        tensor = torch.zeros(max(1, size // 4), device=device)
        first, second = ranks

        def there_and_back() -> None:
            if self._world.rank == first:
                dist.send(tensor, second, group=group)
                dist.recv(tensor, second, group=group)
            else:
                dist.recv(tensor, first, group=group)
                dist.send(tensor, first, group=group)

        return there_and_back


def num_at_once(transport: Transport, size: int) -> int:
    """Number of boxes of ``size`` bytes that a rank sends (or copies) at once."""
    if transport not in ("exchange", "copy"):
        return 1
    return min(_MESSAGES, max(1, BUCKET_BYTES // size))


class _Boxes(Shards):
    """Tensors of one box each."""

    def __init__(self, names: Sequence[str], box: Box, device: torch.device) -> None:
        self._whole = {}
        self._places = {
            name: [(Piece(name, box, (0,)), torch.empty(extents(box), device=device))]
            for name in names
        }


def _resharding(
    number: int, elements: int, ranks: Sequence[int], device: torch.device
) -> Callable[[], object]:
    """A switch in which two ranks send one another boxes; with one rank it copies them."""
    names, box = [f"box {n}" for n in range(number)], ((0, elements),)
    routes = [
        Route(name, box, source, (destination,))
        for source, destination in zip(ranks, reversed(ranks), strict=True)
        for name in names
        if source != destination
    ]
    kept = [Kept(name, box, tuple(ranks)) for name in names if not routes]
    table = RoutingTable(tuple(routes), tuple(kept))
    schedule = rounds(table.routes, max(BUCKET_BYTES // 4, elements))
    source = _Boxes(names, box, device)
    for name in names:
        source.write(name, box, torch.zeros(extents(box), device=device))

    def switch() -> object:
        destination = _Boxes(names, box, device)
        reshard(table, schedule, Endpoints(source, destination, torch.float32, device))
        return destination

    return switch
