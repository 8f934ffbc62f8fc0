"""Small values that every rank of the job must agree on."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def sum_over_world(values: torch.Tensor) -> torch.Tensor:
    """``values`` (any shape, the same on all ranks) summed over all ranks, in place."""
    dist.all_reduce(values)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def from_rank_zero(make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on every rank; what it raises there is raised everywhere."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except (OSError, ValueError) as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def leave() -> None:
    """End this process's part in the job."""
    dist.destroy_process_group()
