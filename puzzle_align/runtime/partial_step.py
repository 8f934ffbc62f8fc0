"""A step of Megatron's optimizer in parts: some of the parameters, then others (PUZZLE, 5.2).

AdamW treats every number by itself, so the parts give to the bit what one step gives. Invariant:
every parameter is updated once a step, and the optimizer counts one step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
)
from torch import Tensor

from puzzle_align.runtime.adamw import PieceAdamW
from puzzle_align.runtime.optimizer_state import parts_of

Update = Callable[[Sequence[Tensor] | None], None]  # see PartialStep.update


class PartialStep:
    """One step, whose gradients are ready: reduced, scaled and clipped."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._parts = [_Part(part) for part in parts_of(optimizer) if part.optimizer is not None]

    @torch.no_grad()
    def update(self, parameters: Sequence[Tensor] | None) -> None:
        """Update those of the model's parameters that are not updated yet; None: all such.

        With the distributed optimizer it is this rank's shards of main weights that are.
        """
        wanted = None if parameters is None else {id(parameter) for parameter in parameters}
        for part in self._parts:
            part.update(wanted)

    @torch.no_grad()
    def finish(self) -> None:
        """Update all others, and have the replicas gather each other's shards. Collective."""
        self.update(None)
        for part in self._parts:
            part.gather()


class _Part:
    """One of the optimizers that are chained, and what it has left to update."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer
        self._inner = optimizer.optimizer
        self._left: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for parameter, main in main_weights(optimizer):
            self._left.setdefault(id(parameter), []).append((parameter, main))
        # Apex's and TE's Adam count steps by group, and would count every part.
        self._steps = [group.get("step") for group in self._inner.param_groups]

    def update(self, wanted: set[int] | None) -> None:
        """Update the parameters of these ids; None: all that are left."""
        ids = list(self._left) if wanted is None else [one for one in self._left if one in wanted]
        taken = [pair for one in ids for pair in self._left.pop(one)]
        if not taken:
            return
        chosen = {id(main) for _, main in taken}
        whole = [group["params"] for group in self._inner.param_groups]
        try:
            for group, everything, step in zip(
                self._inner.param_groups, whole, self._steps, strict=True
            ):
                group["params"] = [main for main in everything if id(main) in chosen]
                if group["params"]:
                    group.pop("step", None)
                    group |= {} if step is None else {"step": _copy(step)}
            self._inner.step()
        finally:
            for group, everything in zip(self._inner.param_groups, whole, strict=True):
                group["params"] = everything
        if not isinstance(self._optimizer, DistributedOptimizer):
            for parameter, main in taken:
                if parameter is not main:
                    parameter.copy_(main)

    def gather(self) -> None:
        """With the distributed optimizer, bring the model's weights to what the shards are."""
        if isinstance(self._optimizer, DistributedOptimizer):
            self._optimizer._copy_main_params_to_model_params()
            chunks: Any = self._optimizer.model_chunks
            for chunk in chunks:
                chunk.start_param_sync()


def _copy(step: Any) -> Any:
    return step.clone() if torch.is_tensor(step) else step


def main_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter of the model that is updated here, with its main weights.

    With a distributed optimizer these are this rank's shard of them; with ``PieceAdamW`` in it, the
    shard of the model's weights, which are the nearest to main weights that lie elsewhere.

    Args:
        optimizer: one that chains no others.
    """
    if isinstance(optimizer, DistributedOptimizer):
        mains = optimizer.shard_fp32_from_float16_groups
        if isinstance(optimizer.optimizer, PieceAdamW):
            mains = optimizer.shard_float16_groups  # it updates the model's weights in place
        yield from _pairs(optimizer.model_float16_groups, mains)
        yield from _pairs(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        yield from _pairs(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        own = optimizer.fp32_from_fp32_groups
        yield from _pairs(own, own)
    else:
        own = [group["params"] for group in optimizer.optimizer.param_groups]
        yield from _pairs(own, own)


def _pairs(
    parameters: Iterable[Iterable[Tensor]], mains: Iterable[Iterable[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(chain(*parameters), chain(*mains), strict=True)
