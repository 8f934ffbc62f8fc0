"""Join and leave the job, and make models' process groups.

Models share a process group for the same list of ranks. Several models with different plans live in
one process, so groups are passed explicitly and Megatron's global ``parallel_state`` is never
initialised. ``layout.groups`` defines the ranks of a model's groups, and the order of making them.
Only the model's ranks make them.
"""

import datetime
import inspect
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from puzzle_align.layout.groups import Group, RankGroups, link_hops, link_kinds
from puzzle_align.layout.plan import ParallelPlan, Topology
from puzzle_align.runtime.groups.collectives import patient_group, sum_on_host
from puzzle_align.runtime.groups.limits import (
    allow_open_files,
    check_started,
    files_needed,
    set_cuda_defaults,
)
from puzzle_align.runtime.liveness import watch
from puzzle_align.runtime.liveness.activity import waiting

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# Whether a group can number its ranks in another order than ascending: torch 2.11 cannot.
ORDERS_RANKS = "sort_ranks" in inspect.signature(dist.new_group).parameters
# Most thread blocks that a transfer between pipeline ranks takes from computations: hidden states
# are small beside the bytes that a link carries in a layer's time.
_LINK_CTAS = 4


class ProcessGroups:
    """Makes process groups, collectively over their members only, and reuses existing ones."""

    def __init__(self, world: "World") -> None:
        self._rank_groups = RankGroups(world.rank)
        self._everyone = tuple(range(world.size))
        self._timeout, self._device = world.timeout, world.device
        self._made: dict[str, dist.ProcessGroup] = {}

    def of_model(self, topology: Topology, *, trained: bool) -> dict[str, dist.ProcessGroup]:
        """Return this rank's groups of a model by kind. Collective over the model's ranks."""
        wanted = self._rank_groups.add_model(topology, trained=trained)
        return {kind: self._get(group) for kind, group in wanted.items()}

    def _get(self, group: Group) -> dist.ProcessGroup:
        if group.name not in self._made:
            made = self._make(group)
            if not group.is_link and len(group.ranks) > 1:
                # NCCL connects a group's ranks at its first collective, and blocks hosts and
                # devices until all arrive: do it here, in one order, not amid a schedule.
                dist.all_reduce(torch.zeros(1, device=self._device), group=made)
            self._made[group.name] = made
        return self._made[group.name]

    def _make(self, group: Group) -> dist.ProcessGroup:
        if group.ranks == self._everyone and not group.is_link:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        ranks = list(group.ranks)
        # Torch would sort the ranks, so that their places in the group differ from the plan's
        # coordinates.
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        # Links carry only activations and gradients: on CUDA they need no sockets on the host.
        is_nccl_link = group.is_link and self._device.type == "cuda"
        with named(group.name), waiting():
            made = dist.new_group(
                ranks,
                timeout=self._timeout,
                backend="nccl" if is_nccl_link else None,
                pg_options=link_options(self._timeout) if is_nccl_link else None,
                use_local_synchronization=True,
                **order,
            )
        assert isinstance(made, dist.ProcessGroup)
        return made


@dataclass(frozen=True)
class World:
    """This process in the job."""

    rank: int
    size: int
    device: torch.device
    # Time-out of every group's collectives; None: torch's. The group of all ranks is torch's
    # default group, with the time-out of joining the job.
    timeout: datetime.timedelta | None = None

    @cached_property
    def groups(self) -> ProcessGroups:
        """Process groups of this process, which all models share."""
        return ProcessGroups(self)


def init_distributed(device: str, timeout_s: float, unhurried_s: float = 0.0) -> World:
    """Join the job that torchrun started (a single process needs no launcher).

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL).
        timeout_s: seconds after which a rank that is stopped, or keeps others waiting without
            progress, ends the job (``liveness.watch``).
        unhurried_s: additional seconds within ``liveness.activity.unhurried``.
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
        set_cuda_defaults()
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    else:
        place = torch.device("cpu")
    limit = watch.watch(timeout_s, place)
    timeout = datetime.timedelta(seconds=limit + unhurried_s)
    own: dict[str, Any] = {}
    if (store := watch.start_store(timeout.total_seconds())) is not None:
        own = {"store": store, "rank": rank, "world_size": size}
    if device == "cuda":
        # No device_id (eager initialization): all transfers of a group would wait for each other;
        # without it, every pair of ranks is independent.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, **own)
        assert dist.distributed_c10d._get_default_group().bound_device_id is None
    else:
        dist.init_process_group("gloo", timeout=timeout, **own)
    watch.meet()
    return World(rank, size, place, timeout)


def ranks_near(world_size: int) -> int:
    """Number of the job's ranks on this machine, from the launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def shutdown_distributed() -> None:
    """Leave the job. Collective if ranks watch one another, until the last one is done."""
    if watch.current() is not None:
        sum_on_host(torch.zeros(1))
    watch.unwatch()
    dist.destroy_process_group()
    patient_group.cache_clear()


@contextmanager
def leaving_on_error() -> Iterator[None]:
    """Leave the job if the block fails on a process alone, so that this process can join another.

    With more ranks it does nothing: they end with the one that fails.
    """
    try:
        yield
    except BaseException:
        if dist.is_initialized() and dist.get_world_size() == 1:
            shutdown_distributed()
        raise


def link_options(timeout: datetime.timedelta | None) -> Any:
    """Make NCCL's options for a group of transfers: few blocks, and high-priority streams.

    A transfer is short and other ranks wait for it; running computations are not interrupted.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, _LINK_CTAS
    if timeout is not None:
        options._timeout = timeout
    return options


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give the groups made in the block this name, and a number.

    Members meet under their group's name in the job's store. Torch hashes it from the ranks *and*
    the number of groups that the process has made so far: members that have made different
    numbers of groups would never meet.
    """
    torch_name = c10d._process_group_name
    taken = set(c10d._world.pg_names.values())
    free = next(n for n in map(f"{name} #{{}}".format, itertools.count()) if n not in taken)
    c10d._process_group_name = lambda *_args, **_named: free
    try:
        yield
    finally:
        c10d._process_group_name = torch_name


@dataclass(frozen=True)
class PipelineLinks:
    """Point-to-point groups of one pipeline, by kind (``layout.groups.link_kinds``).

    Forward and backward traffic, and the edge from the last pipeline rank round to the first
    (interleaved chunks), never share a communicator: on NCCL transfers of one communicator
    between two ranks run in issue order, and opposite directions would wait for each other. A
    forward-only model has no backward links.
    """

    ranks: tuple[int, ...]  # global ranks in pipeline order
    groups: Mapping[str, dist.ProcessGroup]


@dataclass(frozen=True)
class Communicators:
    """Process groups and links of one model's ranks."""

    groups: "ProcessGroupCollection"
    links: PipelineLinks


def build_communicators(
    plan: ParallelPlan, world: World, ranks: Sequence[int] | None = None, *, trained: bool
) -> Communicators | None:
    """Build groups and links of a model under ``plan``; None on ranks without a part of it.

    Collective over the model's ranks; ranks that several models share must call it in the same
    order. Connect all models before loading any weights, so that no rank waits here for another's
    loading.

    Args:
        ranks: in the order of the plan's coordinates; None: from 0.
        trained: the model gets gradients; if false, no backward links are opened.
    """
    topology = Topology(plan, ranks)
    if world.rank not in topology.ranks:
        return None
    made = world.groups.of_model(topology, trained=trained)
    pipeline = next(tuple(p) for p in topology.pipeline_groups() if world.rank in p)
    links = {kind: made[kind] for kind in link_kinds(plan, trained=trained)}
    for kind, link in links.items():
        _open(link, link_hops(kind, pipeline), world)
    from megatron.core import parallel_state  # not above: it takes seconds, and World is plain

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        # Sequence-parallel layers take their all-gather buffer from this global.
        parallel_state._set_global_memory_buffer()
    return Communicators(_for_megatron(made), PipelineLinks(pipeline, links))


def _for_megatron(made: dict[str, dist.ProcessGroup]) -> "ProcessGroupCollection":
    """Make Megatron's collection of groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection

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

    NCCL makes a pair's communicator at its first transfer, and blocks both hosts until both
    arrive: amid a schedule that could deadlock.
    """
    for source, destination in hops:
        number = torch.zeros(1, device=world.device)
        if world.rank == source:
            dist.send(number, destination, group=link)
        elif world.rank == destination:
            dist.recv(number, source, group=link)
