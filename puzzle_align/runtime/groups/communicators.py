"""Process groups of one model, from its plan.

Several models with different plans live in one process, so groups are passed explicitly and
Megatron's global ``parallel_state`` is never initialised. ``layout.groups`` says which ranks a
model's groups join, and in which order they are made. Only the model's ranks make them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from puzzle_align.layout.groups import (
    BACKWARD,
    FORWARD,
    WRAP_BACKWARD,
    WRAP_FORWARD,
    link_hops,
    link_kinds,
)
from puzzle_align.layout.plan import ParallelPlan, Topology
from puzzle_align.runtime.groups.world import World


@dataclass(frozen=True)
class PipelineLinks:
    """Point-to-point groups of one pipeline, one for each direction of each kind of edge.

    Forward and backward traffic, and the edge from the last pipeline rank round to the first
    (interleaved chunks), never share a communicator: on NCCL transfers of one communicator
    between two ranks run in issue order, and opposite directions would wait for each other. A
    forward-only model has no backward links.
    """

    ranks: tuple[int, ...]  # global ranks in pipeline order
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    wrap_forward: dist.ProcessGroup | None
    wrap_backward: dist.ProcessGroup | None


@dataclass(frozen=True)
class Communicators:
    """Process groups and links of one model's ranks."""

    groups: ProcessGroupCollection
    links: PipelineLinks


def build_communicators(
    plan: ParallelPlan, world: World, ranks: Sequence[int] | None = None, *, trained: bool
) -> Communicators | None:
    """Build groups and links of a model under ``plan`` on ``ranks`` (default: from 0).

    None on other ranks.

    Collective over the model's ranks; ranks that several models share must call it in the same
    order. It is quick: models on different ranks are all connected before the first weights are
    loaded, so that no rank waits in here for another one's weights.

    Args:
        ranks: in any order; the plan's coordinates follow it.
        trained: the model gets gradients; without, no backward links are opened.
    """
    topology = Topology(plan, ranks)
    if world.rank not in topology.ranks:
        return None
    made = world.groups.of_model(topology, trained=trained)
    pipeline = next(tuple(p) for p in topology.pipeline_groups() if world.rank in p)
    links = PipelineLinks(
        ranks=pipeline,
        forward=made.get(FORWARD),
        backward=made.get(BACKWARD),
        wrap_forward=made.get(WRAP_FORWARD),
        wrap_backward=made.get(WRAP_BACKWARD),
    )
    for kind in link_kinds(plan, trained=trained):
        _open(made[kind], link_hops(kind, pipeline), world)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # Sequence-parallel layers take their all-gather buffer from this global.
        parallel_state._set_global_memory_buffer()
    return Communicators(_for_megatron(made), links)


def _for_megatron(made: dict[str, dist.ProcessGroup]) -> ProcessGroupCollection:
    """Make the collection of groups that Megatron needs."""
    groups = ProcessGroupCollection()
    for kind in ("tp", "dp", "pp", "mp", "embd"):
        setattr(groups, kind, made.get(kind))  # middle pipeline ranks have no embd group
    groups.pos_embd = groups.cp = groups.ep = groups.expt_tp = made["single"]
    groups.dp_cp = groups.intra_dp_cp = groups.expt_dp = groups.intra_expt_dp = groups.dp
    groups.tp_cp = groups.tp_ep = groups.tp
    groups.tp_ep_pp = groups.mp
    groups.intra_dist_opt = made["everyone"]
    groups.inter_dist_opt = None
    groups.hcp = None
    groups.tp_dp_cp = None
    return groups


def _open(link: dist.ProcessGroup, hops: list[tuple[int, int]], world: World) -> None:
    """Send one number over every edge, in an order in which blocking transfers cannot deadlock.

    NCCL makes the communicator of a pair at its first transfer and blocks both hosts until both
    arrive, which the order of a schedule does not allow for.
    """
    for source, destination in hops:
        number = torch.zeros(1, device=world.device)
        if world.rank == source:
            dist.send(number, destination, group=link)
        elif world.rank == destination:
            dist.recv(number, source, group=link)
