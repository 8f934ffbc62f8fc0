"""Transfers between neighbouring pipeline ranks.

A model has a communicator of its own for every edge and direction (``PipelineLinks``), so whatever
order the ranks post several models' transfers in, none can take another's place.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from puzzle_align.runtime.groups.communicators import PipelineLinks
from puzzle_align.schedules.actions import Action
from puzzle_align.schedules.lowering import edge_of


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or receive under way; ``tensor`` must live until it is over."""

    action: Action
    work: dist.Work
    tensor: torch.Tensor


def start(action: Action, tensor: torch.Tensor, links: PipelineLinks, rank: int) -> Transfer:
    """Post the send of ``tensor``, or the receive into it, of pipeline rank ``rank``."""
    edge = edge_of(action, rank, len(links.ranks))
    if edge.forward:
        group = links.wrap_forward if edge.wraps else links.forward
    else:
        group = links.wrap_backward if edge.wraps else links.backward
    assert group is not None, "an edge the plan does not have"
    if action.kind.is_send:
        work = dist.isend(tensor, links.ranks[edge.destination], group=group)
    else:
        work = dist.irecv(tensor, links.ranks[edge.source], group=group)
    assert work is not None, "this rank is not of the group"
    return Transfer(action, work, tensor)
