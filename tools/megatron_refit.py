"""Megatron-core's own switch of weights (``megatron.core.resharding``) between models on a CPU."""

from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - what routing tables are compared with
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
from megatron.core.resharding.refit import reshard_model_weights

from puzzle_align.models.chunk import ModelChunk


class HostCopies(GlooCopyService):
    """Megatron's transfers by gloo, without the CUDA stream that it makes for its copies."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gloo_pg = dist.group.WORLD
        self.send_ops, self.recv_ops = [], []
        self._copy_stream: Any = None


def refit(source: ModelChunk, destination: ModelChunk, service: HostCopies) -> None:
    """Set the destination's weights to the source's. Collective over the world.

    The first call makes the plan, and later ones use it.
    """
    reshard_model_weights(source, destination, service)


def sizes_by_sender(destination: ModelChunk) -> dict[int, int]:
    """Numbers that this rank receives by the plan of an earlier ``refit``, by sender."""
    plan: Any = vars(destination)["_cached_reshard_plan"]
    parameters = dict(destination.named_parameters())
    sizes: dict[int, int] = {}
    for receive in plan.recv_ops:
        box: torch.Tensor = parameters[receive.param_name].data[receive.my_slice]
        sizes[receive.peer_rank] = sizes.get(receive.peer_rank, 0) + box.numel()
    return sizes
