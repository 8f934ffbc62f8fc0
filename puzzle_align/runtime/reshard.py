"""Execute routing tables: move a model's weights from one plan's ranks to another's (PUZZLE, 5.2).

In each round a rank packs outgoing boxes into flat buckets and receives into others: beyond both
models' weights it needs at most one bucket of a round's size for each direction. A large contiguous
box is sent between the two models' memories without a bucket. Boxes that a rank already has are
copied locally; a relayed box is sent from this rank's destination, which received it in an earlier
round.

Resharding can overlap the optimizer's step: the step is split into parts, one for each round, and a
round is sent on a second stream (CUDA), or in a thread (CPU), while the next part is updated.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from puzzle_align.layout.rules import extents
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import Message
from puzzle_align.resharding.routing import Kept, Route, RoutingTable
from puzzle_align.runtime.liveness.activity import waiting
from puzzle_align.runtime.optimizer.optimizer import Update

# Least elements of a box that is sent alone: avoiding the copy is then worth the extra transfer.
DIRECT = 2**14
Run = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Endpoints:
    """This rank's parts of the models that weights leave and enter; None: it has none.

    Weights are rounded to ``dtype``, the destination's, before they are sent.
    """

    source: Shards | None
    destination: Shards | None
    dtype: torch.dtype
    device: torch.device


def reshard(table: RoutingTable, schedule: Sequence[Sequence[Message]], ends: Endpoints) -> None:
    """Set the destination's weights to the source's. Collective over the ranks of both.

    Args:
        table: equal on all ranks.
        schedule: the table's rounds (``resharding.rounds``), equal on all ranks.
    """
    keep(table.kept, ends)
    for messages in schedule:
        _move(messages, ends)


def reshard_beside(
    table: RoutingTable, schedule: Sequence[Sequence[Message]], ends: Endpoints, update: Update
) -> None:
    """Reshard weights while they are updated, part by part. Returns when all have arrived.

    Args:
        update: updates these parameters of the source, unless already updated; None: all that are
            left. It must not communicate: transfers use the default group.
    """
    rank, source = dist.get_rank(), ends.source
    with _stream(ends.device) if ends.device.type == "cuda" else _thread() as run:
        for messages in schedule:
            if source is not None:
                sent = [route for one in messages if one.source == rank for route in one.routes]
                update(source.parameters(route.tensor for route in sent if not route.relayed))
            run(functools.partial(_move, messages, ends))
        update(None)
        run(lambda: keep(table.kept, ends))


def keep(kept: Sequence[Kept], ends: Endpoints) -> None:
    """Copy boxes that this rank already has."""
    if ends.source is not None and ends.destination is not None:
        rank = dist.get_rank()
        for box in kept:
            if rank in box.ranks:
                ends.destination.copy_from(ends.source, box.tensor, box.box)


def _move(messages: Sequence[Message], ends: Endpoints) -> None:
    """Run one round of ``reshard``. Collective over the ranks that send or receive in it."""
    rank = dist.get_rank()
    sends: list[dist.P2POp] = []
    receives: list[dist.P2POp] = []
    arriving: list[tuple[Sequence[Route], Tensor]] = []  # buckets to unpack
    # Two ranks post their transfers in the same order.
    for message in (one for one in messages if rank in (one.source, *one.destinations)):
        for parcel in _parcels(message):
            if message.source == rank:
                outgoing = _packed(parcel, ends)
                sends += [dist.P2POp(dist.isend, outgoing, to) for to in message.destinations]
            else:
                assert ends.destination is not None
                incoming = _place(parcel, ends.destination, ends.dtype)
                if incoming is None:
                    incoming = _bucket(parcel, ends)
                    arriving.append((parcel, incoming))
                receives.append(dist.P2POp(dist.irecv, incoming, message.source))
    # Gloo's sender waits for word that its receive is posted, and that word goes the way of the
    # receiver's own data, behind what was posted before: with sends first, two ranks that exchange
    # data would take turns at sending.
    operations = [*receives, *sends]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    for parcel, bucket in arriving:
        assert ends.destination is not None
        for route, part in zip(parcel, _parts(parcel, bucket), strict=True):
            ends.destination.write(route.tensor, route.box, part)


def _parcels(message: Message) -> list[list[Route]]:
    """Group routes into transfers: small boxes together, a large one by itself."""
    small = [route for route in message.routes if route.size < DIRECT]
    large = [[route] for route in message.routes if route.size >= DIRECT]
    return [small, *large] if small else large


def _packed(parcel: Sequence[Route], ends: Endpoints) -> Tensor:
    """Return the memory to send: a parameter's, or else a packed bucket."""
    holders = [ends.destination if route.relayed else ends.source for route in parcel]
    in_place = None if holders[0] is None else _place(parcel, holders[0], ends.dtype)
    if in_place is not None:
        return in_place
    bucket = _bucket(parcel, ends)
    for route, holder, part in zip(parcel, holders, _parts(parcel, bucket), strict=True):
        assert holder is not None
        holder.read(route.tensor, route.box, part)
    return bucket


def _place(parcel: Sequence[Route], shards: Shards, dtype: torch.dtype) -> Tensor | None:
    """Return the memory of a single box, if it is contiguous and in this precision."""
    if len(parcel) > 1:
        return None
    return shards.view(parcel[0].tensor, parcel[0].box, dtype)


def _bucket(parcel: Sequence[Route], ends: Endpoints) -> Tensor:
    """Allocate a bucket for the boxes, one after the other."""
    size = sum(route.size for route in parcel)
    return torch.empty(size, dtype=ends.dtype, device=ends.device)


def _parts(parcel: Sequence[Route], bucket: Tensor) -> list[Tensor]:
    """Split a bucket into its boxes."""
    parts = bucket.split([route.size for route in parcel])
    return [part.view(extents(route.box)) for route, part in zip(parcel, parts, strict=True)]


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all resharding: memory freed on a stream is reused only on it."""
    return torch.cuda.Stream(device)


@contextmanager
def _stream(device: torch.device) -> Iterator[Run]:
    """Open a second stream that runs work in order; the exit waits for all work."""
    first, second = torch.cuda.current_stream(device), _second_stream(device)

    def run(work: Callable[[], None]) -> None:
        second.wait_stream(first)  # for the last updated part of the step
        with torch.cuda.stream(second):
            work()

    yield run
    first.wait_stream(second)


@contextmanager
def _thread() -> Iterator[Run]:
    """Open a second thread that runs work in order; the exit waits for all work."""
    thread = ThreadPoolExecutor(max_workers=1)
    done: list[Future[None]] = []
    try:
        yield lambda work: done.append(thread.submit(work))
        with waiting():  # for other ranks, whose transfers the thread awaits
            for work in done:
                work.result()
    finally:  # after an error the rest is dropped: this rank is about to report its failure
        thread.shutdown(wait=False, cancel_futures=True)
