"""Sums, broadcasts and gathers of small values over all ranks of the job."""

import datetime
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from puzzle_align.runtime.liveness.activity import unhurried, waiting

T = TypeVar("T")
_PATIENCE = datetime.timedelta(days=1)


def sum_over_world(values: torch.Tensor) -> torch.Tensor:
    """Sum ``values`` (any shape, the same on all ranks) over all ranks, in place."""
    dist.all_reduce(values)
    return values


def sum_on_host(values: torch.Tensor) -> torch.Tensor:
    """Sum ``values`` (on the host, one shape on all ranks) over the ``patient_group``, in place."""
    dist.all_reduce(values, group=patient_group())
    return values


def wait_for_all(device: torch.device) -> None:
    """Wait until all ranks are here, however late (``patient_group``), and their work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    sum_on_host(torch.zeros(1))


@cache
def patient_group() -> dist.ProcessGroup:
    """Host group of all ranks, with a time-out longer than any step. The first call is collective.

    Ranks may arrive a whole training step, load or save apart without a failure;
    ``liveness.watch`` notices failures.
    """
    with waiting():
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def from_rank_zero(make: Callable[[], T]) -> T:
    """Run ``make`` on rank 0; every rank returns its value, or raises its error. No time-out."""
    group = patient_group()  # before ``make``: ranks meet in the first call
    box: list[Any] = [None, None]  # the value, or the error
    if dist.get_rank() == 0:
        with unhurried():
            try:
                box[0] = make()
            except (OSError, ValueError) as error:
                box[1] = error
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def on_other_nodes(make: Callable[[], T]) -> list[T]:
    """Run ``make`` on the first rank of every node but rank 0's; every rank returns their values.

    Use it for files on the nodes' local disks, after rank 0 has handled its node. No time-out.
    An error on one node is a ValueError on every rank, naming the node.
    """
    box: Any = None  # the value, or the error
    if dist.get_rank() and os.environ["LOCAL_RANK"] == "0":
        with unhurried():
            try:
                box = (make(), None)
            except (OSError, ValueError) as error:
                box = (None, f"on node {platform.node()}: {error}")
    answers = [answer for answer in gather_everywhere(box) if answer is not None]
    for _, wrong in answers:
        if wrong is not None:
            raise ValueError(wrong)
    return [value for value, _ in answers]


def gather_on_rank_zero(value: T) -> list[T] | None:
    """Gather every rank's ``value`` (small, picklable) in rank order on rank 0; None elsewhere.

    Collective over the world; ranks may arrive a whole load or save apart.
    """
    everyone: list[Any] | None = None
    if dist.get_rank() == 0:
        everyone = [None] * dist.get_world_size()
    dist.gather_object(value, everyone, group=patient_group())
    return everyone


def gather_everywhere(value: T) -> list[T]:
    """Gather every rank's ``value`` (small, picklable) in rank order on all ranks. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value, group=patient_group())
    return everyone
