"""Executes routing tables: a model's weights go from one plan's ranks to another's (PUZZLE, 5.2).

Round by round, a rank packs what it sends into flat buckets and receives into others: beyond both
models' weights it needs no more than one bucket of a round's size for each. A large box that lies
without a gap goes straight from its place to its place. What a rank holds already it copies in
place; what it relays it takes from where it has put it, a round or more before.

A switch of plans can run beside the step of the optimizer whose weights it moves: the step is taken
in parts, one for each round of the table, and a round goes on a second stream (CUDA), or in a
thread (CPU), while the next part is updated.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from puzzle_align.layout.rules import extents
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import Message
from puzzle_align.resharding.routing import Kept, Route, RoutingTable
from puzzle_align.runtime.optimizer.optimizer import Update

# Numbers of a box that is a transfer of its own: to have it go straight is worth more than a
# transfer less.
DIRECT = 2**14
Run = Callable[[Callable[[], None]], None]


def reshard(
    table: RoutingTable,
    schedule: Sequence[Sequence[Message]],
    source: Shards | None,
    destination: Shards | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    direct: int = DIRECT,
) -> None:
    """Bring the destination's weights to what the source's are. Collective over both's ranks.

    Args:
        table: alike on all ranks.
        schedule: the table's rounds (``resharding.rounds``), alike on all ranks.
        source, destination: this rank's part of each; None where it has none.
        dtype: the destination's; what is sent is rounded to it before.
        direct: numbers of a box that is a transfer of its own, alike on all ranks.
    """
    keep(table.kept, source, destination)
    for messages in schedule:
        move(messages, source, destination, dtype=dtype, device=device, direct=direct)


def reshard_beside(
    table: RoutingTable,
    schedule: Sequence[Sequence[Message]],
    source: Shards | None,
    destination: Shards | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    update: Update,
) -> None:
    """Reshard weights while they are updated, part by part. Ends when all have arrived.

    Args:
        update: brings some of the source's parameters up to date, where they are not yet; with
            None, all that are left. It must not communicate: the transfers have the default group.
    """
    rank = dist.get_rank()
    with _second_lane(device) as run:
        for messages in schedule:
            if source is not None:
                sent = [route for one in messages if one.source == rank for route in one.routes]
                update(source.parameters(route.tensor for route in sent if not route.relayed))
            run(lambda now=messages: move(now, source, destination, dtype=dtype, device=device))
        update(None)
        run(lambda: keep(table.kept, source, destination))


def keep(kept: Sequence[Kept], source: Shards | None, destination: Shards | None) -> None:
    """Copy what this rank holds already."""
    if source is not None and destination is not None:
        rank = dist.get_rank()
        for box in kept:
            if rank in box.ranks:
                destination.copy_from(source, box.tensor, box.box)


def move(
    messages: Sequence[Message],
    source: Shards | None,
    destination: Shards | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    direct: int = DIRECT,
) -> None:
    """One round, as in ``reshard``. Collective over the ranks that send or receive in it."""
    rank = dist.get_rank()
    operations: list[dist.P2POp] = []
    arriving: list[tuple[Sequence[Route], Tensor]] = []  # what is to be unpacked
    for message in messages:  # two ranks' transfers are in one order on both
        for parcel in _parcels(message, direct):
            if message.source == rank:
                given = _packed(parcel, source, destination, dtype, device)
                operations += [dist.P2POp(dist.isend, given, to) for to in message.destinations]
            elif rank in message.destinations:
                assert destination is not None
                taken = _place(parcel, destination, dtype)
                if taken is None:
                    taken = _bucket(parcel, dtype, device)
                    arriving.append((parcel, taken))
                operations.append(dist.P2POp(dist.irecv, taken, message.source))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()
    for parcel, bucket in arriving:
        assert destination is not None
        for route, part in zip(parcel, _parts(parcel, bucket), strict=True):
            destination.write(route.tensor, route.box, part)


def _parcels(message: Message, direct: int) -> list[list[Route]]:
    """The routes that are one transfer: small boxes together, a large one by itself."""
    small = [route for route in message.routes if route.size < direct]
    large = [[route] for route in message.routes if route.size >= direct]
    return [small, *large] if small else large


def _packed(
    parcel: Sequence[Route],
    source: Shards | None,
    destination: Shards | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The memory to send: a parameter's, or else a bucket."""
    holders = [destination if route.relayed else source for route in parcel]
    in_place = None if holders[0] is None else _place(parcel, holders[0], dtype)
    if in_place is not None:
        return in_place
    bucket = _bucket(parcel, dtype, device)
    for route, holder, part in zip(parcel, holders, _parts(parcel, bucket), strict=True):
        assert holder is not None
        holder.read(route.tensor, route.box, part)
    return bucket


def _place(parcel: Sequence[Route], shards: Shards, dtype: torch.dtype) -> Tensor | None:
    """The memory of a single box, if it lies without a gap and in this precision."""
    if len(parcel) > 1:
        return None
    return shards.view(parcel[0].tensor, parcel[0].box, dtype)


def _bucket(parcel: Sequence[Route], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for the boxes, behind each other."""
    return torch.empty(sum(route.size for route in parcel), dtype=dtype, device=device)


def _parts(parcel: Sequence[Route], bucket: Tensor) -> list[Tensor]:
    """The boxes in a bucket."""
    parts = bucket.split([route.size for route in parcel])
    return [part.view(extents(route.box)) for route, part in zip(parcel, parts, strict=True)]


def _second_lane(device: torch.device) -> AbstractContextManager[Run]:
    """A second stream or thread, which does one thing after the other; its end waits for all."""
    return _stream(device) if device.type == "cuda" else _thread()


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all switches: memory that was freed on a stream is used again on that one alone."""
    return torch.cuda.Stream(device)


@contextmanager
def _stream(device: torch.device) -> Iterator[Run]:
    first, second = torch.cuda.current_stream(device), _second_stream(device)

    def run(work: Callable[[], None]) -> None:
        second.wait_stream(first)  # for the part of the step that was taken last
        with torch.cuda.stream(second):
            work()

    yield run
    first.wait_stream(second)


@contextmanager
def _thread() -> Iterator[Run]:
    given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    errors: list[BaseException] = []
    ended = threading.Event()

    def work_off() -> None:
        try:
            while (work := given.get()) is not None and not ended.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised below, where somebody sees it
            errors.append(error)

    # A daemon: one that waits for a rank that has failed does not keep this one from ending.
    thread = threading.Thread(target=work_off, daemon=True)
    thread.start()
    try:
        yield given.put
    except BaseException:
        ended.set()  # what is left would be sent while this rank tells of its failure
        raise
    finally:
        given.put(None)
    thread.join()
    for error in errors:
        raise error
