"""Optimizer state in checkpoints, with torch's AdamW in place of Apex's or TE's.

This module works around gaps of Megatron-core, on GPUs and CPUs:
1. an optimizer that has not stepped has no state: none to load into, none to save;
2. ``DistributedOptimizer`` expects a saved tensor ``step`` for every parameter, but saves one;
3. after loading, all parameters share ONE ``step`` tensor, and every parameter advances it;
4. a ``step`` of zero is not saved, and AdamW fails without one;
5. from 0.17 on, a saved parameter group is not found again if a run changes the learning rate;
6. a saved parameter group brings the kernels of the device that saved it, and lacks what others
   read; torch's AdamW counts steps by parameter, Transformer Engine's and Apex's by group;
7. to save, ``DistributedOptimizer`` gathers a bucket, perhaps the whole model's, on the device,
   twice; or on the host by gloo, which is slow between nodes;
8. it strips buckets of their padding, and then takes parameters from their places among padded ones
   (Megatron-LM #504, #5077);
9. to load, every replica reads the state of all parameters, and keeps its shard's;
10. without Transformer Engine and Apex it reads the number of steps from a parameter of the shard,
    and a rank may have none: few adapters on many ranks.

``PieceAdamW`` has only gaps 1, 5 and 7 to 10. It always saves float32, so it and other optimizers
can resume from each other's checkpoints, with moments rounded as needed.
"""

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
    param_group_identifier_keys,
)
from torch import Tensor

from puzzle_align.runtime.optimizer.adamw import PieceAdamW

_GATHERED = 2**26  # numbers that the device holds of a bucket that is gathered


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return an optimizer's chained optimizers, or itself."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def main_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's parameters updated on this rank, each with its main weights.

    A distributed optimizer yields this rank's shards of main weights; with ``PieceAdamW`` in it,
    shards of the model's weights, rounded from main weights that are in its state.

    Args:
        optimizer: an optimizer without chained ones.
    """
    if isinstance(optimizer, DistributedOptimizer):
        mains = optimizer.shard_fp32_from_float16_groups
        if isinstance(optimizer.optimizer, PieceAdamW):
            mains = optimizer.shard_float16_groups  # it updates the model's weights in place
        yield from _pairs(optimizer.model_float16_groups, mains)
        yield from _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        yield from _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        mains = optimizer.fp32_from_fp32_groups
        yield from _pairs(mains, mains)
    else:
        mains = [group["params"] for group in optimizer.optimizer.param_groups]
        yield from _pairs(mains, mains)


@torch.no_grad()
def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Allocate a fresh optimizer's state (gap 1) by a step that changes no weight."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if inner is None or len(inner.state):
            continue
        if isinstance(inner, PieceAdamW):
            inner.allocate()
            continue
        kept = [(group["lr"], group["weight_decay"]) for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        inner.zero_grad()
        for group, (lr, weight_decay) in zip(inner.param_groups, kept, strict=True):
            group["lr"], group["weight_decay"] = lr, weight_decay
            if "step" in group:  # Apex's and TE's Adam counts by group
                group["step"] = 0
        if _counts_by_parameter(part):
            for values in inner.state.values():
                values["step"].zero_()


@torch.no_grad()
def load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load the result of ``dist_checkpointing`` for ``optimizer``, around gaps 2 to 6."""
    parts = parts_of(optimizer)
    states = [state] if len(parts) == 1 else [value for _, value in sorted(state.items())]
    for part, part_state in zip(parts, states, strict=True):
        saved = part_state.get("optimizer", part_state)
        _find_groups(part, saved["param_groups"])
        if isinstance(part.optimizer, PieceAdamW):
            continue
        _find_count(part, saved)
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = types.MethodType(_set_present, part)
    optimizer.load_state_dict(state)
    for part in parts:
        if _counts_by_parameter(part):
            for values in part.optimizer.state.values():
                values["step"] = values["step"].clone()
        elif isinstance(part.optimizer, PieceAdamW):
            # Loading rounded the main weights into this rank's shards, perhaps unlike the optimizer
            # that saved them: gather the model's weights again.
            for chunk in part.model_chunks:
                chunk.start_param_sync()


def gather_in_pieces(optimizer: DistributedOptimizer, device: torch.device) -> None:
    """Let an optimizer gather its state, from here on, around gaps 7 and 8.

    It goes to the host of the first replica, which alone writes it, piece by piece by the device.
    """
    optimizer.data_parallel_group_gloo = optimizer.data_parallel_group  # of both backends
    whole = types.MethodType(DistributedOptimizer.get_parameter_state_dp_zero, optimizer)
    gather = dist.gather

    def gather_pieces(
        sent: Tensor, received: list[Tensor] | None, destination: int, group: dist.ProcessGroup
    ) -> None:
        size = max(1, _GATHERED // group.size())
        for start in range(0, len(sent), size):
            piece = sent[start : start + size].to(device)
            pieces = None if received is None else [torch.empty_like(piece) for _ in received]
            gather(piece, pieces, destination, group)
            for all_of_rank, part in zip(received or (), pieces or (), strict=True):
                all_of_rank[start : start + size] = part

    def in_pieces(**named: bool) -> Any:
        dist.gather = gather_pieces
        try:
            with _padding_kept(optimizer):
                return whole(**named)
        finally:
            dist.gather = gather

    optimizer.get_parameter_state_dp_zero = in_pieces


@contextmanager
def _padding_kept(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Count the padding of an optimizer's buckets as theirs (gap 8)."""
    padded = [(buffer, buffer.numel) for buffer in optimizer.buffers]
    padded += [(one, one.grad_data.numel()) for each, _ in padded for one in each.buckets]
    unpadded = [one.numel_unpadded for one, _ in padded]
    for one, size in padded:
        one.numel_unpadded = size
    try:
        yield
    finally:
        for (one, _), size in zip(padded, unpadded, strict=True):
            one.numel_unpadded = size


def read_own_part(optimizer: DistributedOptimizer) -> None:
    """Let an optimizer ask checkpoints, from here on, for its shard's parameters alone (gap 9)."""
    ask = types.MethodType(DistributedOptimizer.sharded_param_state_fully_reshardable, optimizer)

    def ask_for_own(model_state: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        state = ask(model_state, is_loading, metadata)
        return {number: state[number] for number in _held(optimizer)} if is_loading else state

    optimizer.sharded_param_state_fully_reshardable = ask_for_own


def allow_no_shard(optimizer: DistributedOptimizer) -> None:
    """Let an optimizer save and load, from here on, where this rank has no parameter (gap 10)."""
    inner = optimizer.optimizer
    if any(group["params"] for group in inner.param_groups):
        return

    def state_dict() -> dict[str, Any]:
        groups = inner.state_dict()["param_groups"]
        for group in groups:
            del group["params"]
            group["step"] = 0  # the first replica's is saved
        return {"optimizer": {"param_groups": groups}}

    optimizer.state_dict = state_dict


def _held(optimizer: DistributedOptimizer) -> Iterator[int]:
    """Numbers, in the order of saved state, of parameters with a part in this rank's shard."""
    number = 0
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        (of_buckets,) = ranges.values()
        held = {parameter for bucket in of_buckets for parameter in bucket["param_map"]}
        for parameter in buffer.param_index_map:
            if parameter in held:
                yield number
            number += 1


def _find_groups(part: MegatronOptimizer, saved: list[dict[str, Any]]) -> None:
    """Give saved groups this run's kernels, what these read, and what Megatron finds groups by.

    All but ``wd_mult``, by which they are found here.
    """
    current = {group["wd_mult"]: group for group in part.optimizer.param_groups}
    taken = (*param_group_identifier_keys, "fused", "foreach")
    for group in saved:
        kept = {*group, "params", "step"}.difference(taken)
        now = current.get(group["wd_mult"], {})
        group.update({key: value for key, value in now.items() if key not in kept})


def _find_count(part: MegatronOptimizer, saved: dict[str, Any]) -> None:
    """Put the number of steps, saved by parameter or by group, where this run's optimizer counts.

    Of a distributed optimizer Megatron saves it by group, and torch's AdamW gets it from there.
    """
    groups, by_parameter = saved["param_groups"], saved.get("state", {})
    of_groups = [group.pop("step", 0) for group in groups]
    count = int(by_parameter.pop("common_step", max(of_groups, default=0)))
    if _counts_by_parameter(part) and not isinstance(part, DistributedOptimizer):
        by_parameter["common_step"] = torch.tensor(float(count))
        return
    for group in groups:
        group["step"] = count  # an integer: their kernels take no other number


def _counts_by_parameter(part: MegatronOptimizer) -> bool:
    """Whether every parameter has a step, as in torch's AdamW, unlike Apex's and TE's."""
    return isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _set_present(
    self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]
) -> None:
    """Megatron's ``_set_main_param_and_optimizer_states``, skipping missing tensors (gap 2)."""
    group, place = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][place]
    for name, target in {"param": main_param, **self.optimizer.state[main_param]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _pairs(
    parameters: Iterable[Iterable[Tensor]], mains: Iterable[Iterable[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(chain(*parameters), chain(*mains), strict=True)
