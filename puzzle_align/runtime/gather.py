"""What the ranks have, brought together: on rank 0, or on all.

Ranks may come to it a whole load or save apart (``patient_group``).
"""

from typing import Any, TypeVar

import torch.distributed as dist

from puzzle_align.runtime.reduce import patient_group

T = TypeVar("T")


def gather_on_rank_zero(value: T) -> list[T] | None:
    """Every rank's ``value`` (small, picklable) in order of ranks, on rank 0; None elsewhere.

    Collective over the world.
    """
    everyone: list[Any] | None = None
    if dist.get_rank() == 0:
        everyone = [None] * dist.get_world_size()
    dist.gather_object(value, everyone, group=patient_group())
    return everyone


def gather_everywhere(value: T) -> list[T]:
    """Every rank's ``value`` (small, picklable) in order of ranks, on all. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value, group=patient_group())
    return everyone
