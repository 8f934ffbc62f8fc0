"""The process groups of one process: each list of ranks has one, whichever models it serves."""

import datetime
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from puzzle_align.layout.groups import Group, OwnGroups
from puzzle_align.layout.topology import Topology
from puzzle_align.runtime.progress import waiting

# Blocks of threads that a transfer between pipeline ranks takes from the device's computations, at
# most: hidden states are small beside what a link carries in a layer's time.
_LINK_CTAS = 4


class ProcessGroups:
    """Makes process groups with their members alone, and hands out what is there already."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: datetime.timedelta | None,
        device: torch.device,
    ) -> None:
        """Nothing is made yet.

        Args:
            timeout: of every group's collectives; None: torch's. All ranks together are torch's
                own group, with the time-out that the job was joined with.
        """
        self._own = OwnGroups(rank)
        self._everyone = tuple(range(world_size))
        self._timeout = timeout
        self._device = device
        # Links carry what models compute, and nothing from the host: no sockets for it, on CUDA.
        self._link_backend = "nccl" if device.type == "cuda" else None
        self._made: dict[str, dist.ProcessGroup] = {}

    def of_model(self, topology: Topology, *, trained: bool) -> dict[str, dist.ProcessGroup]:
        """This rank's groups of one more model, by what they are for (``layout.groups``).

        Collective over the model's ranks.
        """
        wanted = self._own.add_model(topology, trained=trained)
        return {kind: self._get(group) for kind, group in wanted.items()}

    def _get(self, group: Group) -> dist.ProcessGroup:
        if group.name not in self._made:
            made = self._make(group)
            if not group.is_link and len(group.ranks) > 1:
                # NCCL connects a group's ranks at its first collective, and holds hosts and devices
                # until all are there: here, where they come in one order, not amid a schedule.
                dist.all_reduce(torch.zeros(1, device=self._device), group=made)
            self._made[group.name] = made
        return self._made[group.name]

    def _make(self, group: Group) -> dist.ProcessGroup:
        if group.ranks == self._everyone and not group.is_link:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        ranks = list(group.ranks)
        # Torch would sort them, and a rank's number in the group be none of the plan's coordinates.
        # (An older torch knows no such argument, and refuses: better than a model cut wrong.)
        order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        own = group.is_link and self._link_backend == "nccl"
        with named(group.name), waiting():
            made = dist.new_group(
                ranks,
                timeout=self._timeout,
                backend=self._link_backend if group.is_link else None,
                pg_options=link_options(self._timeout) if own else None,
                use_local_synchronization=True,
                **order,
            )
        assert isinstance(made, dist.ProcessGroup)
        return made


def link_options(timeout: datetime.timedelta | None) -> Any:
    """NCCL's options of a group that carries transfers: few blocks, and streams that go first.

    A transfer is short and others wait for it; of computations that are under way none is stopped.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.max_ctas = 1, _LINK_CTAS
    if timeout is not None:
        options._timeout = timeout
    return options


@contextmanager
def named(name: str) -> Iterator[None]:
    """Give the groups made meanwhile this name, and a number if it is taken.

    Members meet under their group's name in the job's store. Torch hashes it from the ranks *and*
    the number of groups that the process has made so far: where members have made different
    numbers of groups before, they never meet.
    """
    own = c10d._process_group_name
    taken = set(c10d._world.pg_names.values())
    free = next(n for n in map(f"{name} #{{}}".format, itertools.count()) if n not in taken)
    c10d._process_group_name = lambda *_args, **_named: free
    try:
        yield
    finally:
        c10d._process_group_name = own
