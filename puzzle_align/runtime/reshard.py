"""Executes routing tables: a model's weights go from one plan's ranks to another's (PUZZLE, 5.2).

Round by round, a rank packs what it sends into one flat bucket and receives into another: beyond
both models' weights it needs no more than these two. What it holds already it copies in place; what
it relays it reads from where it has put it, a round or more before.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from puzzle_align.layout.rules import extents
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import Message
from puzzle_align.resharding.routing import Kept, RoutingTable


def reshard(
    table: RoutingTable,
    schedule: Sequence[Sequence[Message]],
    source: Shards | None,
    destination: Shards | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Bring the destination's weights to what the source's are. Collective over both's ranks.

    Args:
        table: alike on all ranks.
        schedule: the table's rounds (``resharding.rounds``), alike on all ranks.
        source, destination: this rank's part of each; None where it has none.
        dtype: the destination's; what is sent is rounded to it before.
    """
    keep(table.kept, source, destination)
    for messages in schedule:
        move(messages, source, destination, dtype=dtype, device=device)


def keep(kept: Sequence[Kept], source: Shards | None, destination: Shards | None) -> None:
    """Copy what this rank holds already."""
    if source is not None and destination is not None:
        rank = dist.get_rank()
        for own in kept:
            if rank in own.ranks:
                destination.copy_from(source, own.tensor, own.box)


def move(
    messages: Sequence[Message],
    source: Shards | None,
    destination: Shards | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """One round. Collective over the ranks that send or receive in it."""
    rank = dist.get_rank()
    outgoing = [message for message in messages if message.source == rank]
    incoming = [message for message in messages if rank in message.destinations]
    sent = _bucket(outgoing, dtype, device)
    received = _bucket(incoming, dtype, device)
    for message, part in zip(outgoing, sent, strict=True):
        _pack(message, source, destination, part)
    _transfer(list(zip(outgoing, sent, strict=True)), list(zip(incoming, received, strict=True)))
    for message, part in zip(incoming, received, strict=True):
        assert destination is not None
        _unpack(message, part, destination)


def _bucket(messages: Sequence[Message], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Room for the messages, behind each other."""
    sizes = [message.size for message in messages]
    return list(torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes))


def _transfer(
    outgoing: Sequence[tuple[Message, Tensor]], incoming: Sequence[tuple[Message, Tensor]]
) -> None:
    """Send and receive a round's messages, all at once.

    Two ranks' messages are in one order on both: that of the round.
    """
    operations = [
        dist.P2POp(dist.isend, part, destination)
        for message, part in outgoing
        for destination in message.destinations
    ]
    operations += [dist.P2POp(dist.irecv, part, message.source) for message, part in incoming]
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()


def _pack(
    message: Message, source: Shards | None, destination: Shards | None, bucket: Tensor
) -> None:
    for route, part in zip(message.routes, _parts(message, bucket), strict=True):
        holder = destination if route.relayed else source
        assert holder is not None
        holder.read(route.tensor, route.box, part)


def _unpack(message: Message, bucket: Tensor, destination: Shards) -> None:
    for route, part in zip(message.routes, _parts(message, bucket), strict=True):
        destination.write(route.tensor, route.box, part)


def _parts(message: Message, bucket: Tensor) -> list[Tensor]:
    """The message's boxes in its part of a bucket."""
    parts = bucket.split([route.size for route in message.routes])
    return [
        part.view(extents(route.box)) for route, part in zip(message.routes, parts, strict=True)
    ]
