"""Ragged items from the ranks that have them to those that want them, each straight to the other.

No rank ever holds more than its own items and those it wants. Items are host arrays: tokens,
log-probabilities, values, advantages of responses; a few bytes a token.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from puzzle_align.runtime.groups.collectives import patient_group


def exchange(
    held: Mapping[int, np.ndarray],
    wanted: Sequence[int],
    *,
    sources: np.ndarray,
    lengths: np.ndarray,
    num_columns: int,
    dtype: type[np.generic] = np.float64,
) -> dict[int, np.ndarray]:
    """The wanted items, by number. Collective over the world.

    Args:
        held: this rank's items by number, ``[lengths[i], num_columns]`` of ``dtype``; at least
            those that others want of it.
        wanted: numbers of the items that this rank asks for; none, or its own, are fine.
        sources: the rank that gives each item, int64 [n], the same on all ranks.
        lengths: of all items, int64 [n], the same on all ranks.
        num_columns: values that an item has at each of its places.
        dtype: of the values.
    """
    world_size = dist.get_world_size()
    asked = _everyones_wishes(wanted, len(lengths), world_size)
    own = dist.get_rank()
    mine = np.flatnonzero(sources == own)
    going = [mine[asked[rank, mine]] for rank in range(world_size)]
    coming = [np.flatnonzero(asked[own] & (sources == rank)) for rank in range(world_size)]
    parts = [held[item] for items in going for item in items.tolist()]
    outgoing = torch.from_numpy(np.concatenate([np.zeros((0, num_columns), dtype), *parts]))
    num_incoming = [int(lengths[items].sum()) for items in coming]
    incoming = torch.empty(sum(num_incoming), num_columns, dtype=outgoing.dtype)
    dist.all_to_all_single(
        incoming,
        outgoing,
        num_incoming,
        [int(lengths[items].sum()) for items in going],
        group=patient_group(),
    )
    order = np.concatenate(coming)
    ends = np.cumsum(lengths[order])
    pieces = np.split(incoming.numpy(), ends[:-1]) if len(order) else []
    return dict(zip(order.tolist(), pieces, strict=True))


def _everyones_wishes(wanted: Sequence[int], num_items: int, world_size: int) -> np.ndarray:
    """bool [world size, n]: which rank asks for which item."""
    own = torch.zeros(num_items, dtype=torch.uint8)
    own[torch.tensor(sorted(wanted), dtype=torch.int64)] = 1
    table = torch.empty(world_size * num_items, dtype=torch.uint8)
    dist.all_gather_into_tensor(table, own, group=patient_group())
    return table.view(world_size, num_items).numpy().astype(bool)
