"""Process groups of one model, from its plan.

Several models with different plans live in one process, so groups are passed explicitly and
Megatron's global ``parallel_state`` is never initialised. What ranks a model's groups join, and in
which order they are made, is ``layout.groups``'s business. Only the model's own ranks make them.
"""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.topology import Topology
from puzzle_align.runtime import watch
from puzzle_align.runtime.open_files import allow_open_files, files_needed
from puzzle_align.runtime.process_groups import ProcessGroups
from puzzle_align.runtime.queues import check_started, set_defaults


@dataclass(frozen=True)
class World:
    """This process in the job."""

    rank: int
    size: int
    device: torch.device
    timeout: datetime.timedelta | None = None  # of every group's collectives; None: torch's

    @cached_property
    def groups(self) -> ProcessGroups:
        """The process groups that this process has made, for all models to share."""
        return ProcessGroups(self.rank, self.size, self.timeout, self.device)


@dataclass(frozen=True)
class PipelineLinks:
    """Point-to-point groups of one pipeline, one for each direction of each kind of edge.

    Forward and backward traffic, and the edge from the last pipeline rank round to the first
    (interleaved chunks), never share a communicator: on NCCL transfers of one communicator
    between two ranks run in issue order, and opposite directions would wait for each other. A
    model that is only run forward has no backward ones.
    """

    ranks: tuple[int, ...]  # global ranks in pipeline order
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    wrap_forward: dist.ProcessGroup | None
    wrap_backward: dist.ProcessGroup | None


@dataclass(frozen=True)
class Communicators:
    """All that the ranks of one model talk through."""

    groups: ProcessGroupCollection
    links: PipelineLinks


def init_distributed(device: str, timeout_s: float, unhurried_s: float = 0.0) -> World:
    """Join the job that torchrun started (a single process needs no launcher).

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        timeout_s: seconds after which a rank that is stopped, or keeps others waiting and does
            nothing new, ends the job (``runtime.watch``).
        unhurried_s: for how long a rank may let others wait on top of it, where it says so
            (``runtime.progress.unhurried``).
    """
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    allow_open_files(files_needed(size, ranks_near(size)))
    if device == "cuda":
        check_started()
        set_defaults()
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
    limit = watch.watch(rank, size, timeout_s, place)
    timeout = datetime.timedelta(seconds=limit + unhurried_s)
    if device == "cuda":
        # No device_id: it would make all transfers of a group wait for each other, whoever they
        # join (torch calls it eager initialization); without, every pair of ranks is on its own.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
        assert dist.distributed_c10d._get_default_group().bound_device_id is None
    else:
        dist.init_process_group("gloo", timeout=timeout)
    watch.meet()
    return World(rank, size, place, timeout)


def ranks_near(world_size: int) -> int:
    """Ranks of the job on this machine, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def build_communicators(
    plan: ParallelPlan, world: World, ranks: Sequence[int] | None = None, *, trained: bool
) -> Communicators | None:
    """What a model under ``plan`` on ``ranks`` (default: from 0) talks through; None elsewhere.

    Collective over the model's ranks; those that several models have in common call it in one
    order. It is quick: where models are on different ranks, all are connected before the first of
    them is filled, so that no rank waits in here for another one's weights.

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
        # Sequence-parallel layers take their all-gather buffer from this global, plan or no plan.
        parallel_state._set_global_memory_buffer()
    return Communicators(_for_megatron(made), links)


def _for_megatron(made: dict[str, dist.ProcessGroup]) -> ProcessGroupCollection:
    """Every group Megatron asks for."""
    groups = ProcessGroupCollection()
    for kind in ("tp", "dp", "pp", "mp", "embd"):
        setattr(groups, kind, made.get(kind))  # between a pipeline's ends there is no embd
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
    """Send one number over every edge, in an order in which blocking transfers cannot lock up.

    NCCL makes the communicator of a pair at its first transfer and holds both hosts until both
    are there, which the order of a schedule does not foresee.
    """
    for source, destination in hops:
        number = torch.zeros(1, device=world.device)
        if world.rank == source:
            dist.send(number, destination, group=link)
        elif world.rank == destination:
            dist.recv(number, source, group=link)
