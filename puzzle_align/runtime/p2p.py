"""Transfers between neighbouring pipeline ranks.

A model has a separate communicator for every kind of edge and direction (``PipelineLinks``), so
transfers of several models cannot be mixed up, whichever order the ranks post them in.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from puzzle_align.layout.groups import link_kind
from puzzle_align.runtime.groups.world import PipelineLinks
from puzzle_align.schedules.actions import Action, edge_of


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or receive in flight; ``tensor`` must live until its end."""

    action: Action
    work: dist.Work
    tensor: torch.Tensor


def start(action: Action, tensor: torch.Tensor, links: PipelineLinks, rank: int) -> Transfer:
    """Post pipeline rank ``rank``'s send of ``tensor``, or receive into it."""
    edge = edge_of(action, rank, len(links.ranks))
    group = links.groups[link_kind(edge)]
    if action.kind.is_send:
        work = dist.isend(tensor, links.ranks[edge.destination], group=group)
    else:
        work = dist.irecv(tensor, links.ranks[edge.source], group=group)
    assert work is not None, "this rank is not of the group"
    return Transfer(action, work, tensor)
