"""Megatron-core's own resharding, on gloo: what `bench_reshard.py` compares routing tables with."""

from collections.abc import Callable

import torch.distributed as dist  # noqa: TID251 - its copies go over a group of torch's
from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService

from puzzle_align.models.chunk import ModelChunk


class CpuCopies(GlooCopyService):
    """Its copies over gloo, of CPU tensors. Collective over the world when it is made.

    Of its own ``__init__`` all but the CUDA stream, which cannot be made without CUDA and which
    nothing is ever put on.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.gloo_pg = dist.new_group(backend="gloo")
        self.send_ops, self.recv_ops = [], []
        self._copy_stream = None


def megatron_mover(
    source: ModelChunk, destination: ModelChunk, service: CpuCopies
) -> Callable[[], None]:
    """The switch, planned and ready to be made again and again. Collective over the world.

    These are the two halves of its ``swap_model_weights``, which plans when it is first called.

    Raises:
        RuntimeError: one line, on all ranks: why it has no plan for these models.
    """
    plan, reason = None, ""
    try:
        plan = build_centralized_reshard_plan(source, destination)
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if dist.get_rank() == 0:  # it alone plans: the others wait for what it found
            dist.broadcast_object_list([None] * dist.get_world_size(), src=0)
    except AttributeError:
        assert dist.get_rank(), "rank 0 itself failed"  # others: rank 0 gave them no plan
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for reason in filter(None, reasons):
        raise RuntimeError(reason)
    assert plan is not None

    def move() -> None:
        execute_reshard_plan(plan, source, destination, service)

    return move
