"""Process groups of one model, from its plan.

Several models with different plans live in one process, so groups are passed explicitly and
Megatron's global ``parallel_state`` is never initialised. Making groups is collective over the
world: every rank calls ``build_groups`` for every model, in the same order, members or not.
"""

import datetime
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.topology import Topology
from puzzle_align.runtime.watch import watch


@dataclass(frozen=True)
class World:
    """This process in the job."""

    rank: int
    size: int
    device: torch.device
    timeout: datetime.timedelta | None = None  # of every group's collectives; None: torch's


@dataclass(frozen=True)
class PipelineLinks:
    """Point-to-point groups of one pipeline, one for each direction of each kind of edge.

    Forward and backward traffic, and the edge from the last pipeline rank round to the first
    (interleaved chunks), never share a communicator: on NCCL transfers of one communicator
    between two ranks run in issue order, and opposite directions would wait for each other.
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


def init_distributed(device: str, timeout_s: float) -> World:
    """Join the job that torchrun started (a single process needs no launcher).

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        timeout_s: seconds after which a collective fails and with it the job.
    """
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")
    timeout = datetime.timedelta(seconds=timeout_s)
    if device == "cuda":
        forbid_tf32()
        # As many hardware queues as there can be: streams that share one run in issue order, and a
        # receive that is posted early and waits for its turn would hold up the computations behind
        # it. (Megatron recommends 1, to overlap tensor-parallel transfers.)
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
        # No device_id: it would make all transfers of a group wait for each other, whoever they
        # join (torch calls it eager initialization); without, every pair of ranks is on its own.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    else:
        place = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    watch(dist.get_rank(), dist.get_world_size())
    return World(dist.get_rank(), dist.get_world_size(), place, timeout)


def forbid_tf32() -> None:
    """Keep fp32 fp32: Transformer Engine multiplies it in TF32 whatever torch's settings say.

    cuBLAS reads the variable when it starts: call this before anything runs on the GPU.
    """
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


def build_communicators(
    plan: ParallelPlan, world: World, ranks: Sequence[int] | None = None
) -> Communicators | None:
    """What a model under ``plan`` on ``ranks`` (default: from 0) talks through; None elsewhere.

    Collective over the world, and quick: where models are on different ranks, all are connected
    before the first of them is filled, so that no rank waits in here for another one's weights.
    """
    groups = build_groups(plan, ranks, world.timeout)
    links = build_links(plan, world.device, ranks, world.timeout)
    return Communicators(groups, links) if links.ranks else None


def build_groups(
    plan: ParallelPlan,
    ranks: Sequence[int] | None = None,
    timeout: datetime.timedelta | None = None,
) -> ProcessGroupCollection:
    """Every group Megatron asks for, for a model under ``plan`` on ``ranks`` (default: from 0).

    Collective over the world. Groups a rank is no member of are None there.
    """
    topology = Topology(plan, ranks)
    groups = ProcessGroupCollection()
    groups.tp = _own_group(topology.tensor_groups(), timeout)
    groups.dp = _own_group(topology.data_groups(), timeout)
    groups.pp = _own_group(topology.pipeline_groups(), timeout)
    groups.mp = _own_group(topology.model_groups(), timeout)
    groups.embd = _own_group(topology.embedding_groups(), timeout)
    alone = _own_group([[rank] for rank in topology.ranks], timeout)
    everyone = _own_group([list(topology.ranks)], timeout)
    groups.pos_embd = groups.cp = groups.ep = groups.expt_tp = alone
    groups.dp_cp = groups.intra_dp_cp = groups.expt_dp = groups.intra_expt_dp = groups.dp
    groups.tp_cp = groups.tp_ep = groups.tp
    groups.tp_ep_pp = groups.mp
    groups.intra_dist_opt = everyone
    groups.inter_dist_opt = None
    groups.hcp = None
    groups.tp_dp_cp = None
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # Sequence-parallel layers take their all-gather buffer from this global, plan or no plan.
        parallel_state._set_global_memory_buffer()
    return groups


def build_links(
    plan: ParallelPlan,
    device: torch.device,
    ranks: Sequence[int] | None = None,
    timeout: datetime.timedelta | None = None,
) -> PipelineLinks:
    """The pipeline's point-to-point groups (None where the plan has no such edge), opened.

    Collective over the world.
    """
    topology = Topology(plan, ranks)
    pipelines = topology.pipeline_groups()
    piped, wrapped = plan.pipeline > 1, plan.pipeline > 1 and plan.virtual_pipeline > 1
    own = next((tuple(p) for p in pipelines if dist.get_rank() in p), ())
    links = PipelineLinks(
        ranks=own,
        forward=_own_group(pipelines, timeout) if piped else None,
        backward=_own_group(pipelines, timeout) if piped else None,
        wrap_forward=_own_group(pipelines, timeout) if wrapped else None,
        wrap_backward=_own_group(pipelines, timeout) if wrapped else None,
    )
    if own:
        _open(links, device)
    return links


def _open(links: PipelineLinks, device: torch.device) -> None:
    """Send one number over every edge, in an order in which blocking transfers cannot lock up.

    NCCL makes the communicator of a pair at its first transfer and holds both hosts until both
    are there, which the order of a schedule does not foresee.
    """
    first, last = links.ranks[0], links.ranks[-1]
    hops = list(itertools.pairwise(links.ranks))
    for group, edges in (
        (links.forward, hops),
        (links.backward, [(below, above) for above, below in reversed(hops)]),
        (links.wrap_forward, [(last, first)]),
        (links.wrap_backward, [(first, last)]),
    ):
        for source, destination in edges if group is not None else []:
            number = torch.zeros(1, device=device)
            if dist.get_rank() == source:
                dist.send(number, destination, group=group)
            elif dist.get_rank() == destination:
                dist.recv(number, source, group=group)


def _own_group(
    rank_lists: list[list[int]], timeout: datetime.timedelta | None
) -> dist.ProcessGroup | None:
    mine = None
    for ranks in rank_lists:
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine
