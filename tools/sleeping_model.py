"""Emulated compute: a model whose every forward and backward sleeps for its cost.

Sleeping ranks do not compete for cores, so a few of them can stand for a whole pipeline. All else
is real: action lists, executor, process groups, transfers (of tiny activations), autograd.
"""

import contextlib
import time
from typing import Any, cast

import torch
from torch import Tensor

from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.attention import RowState
from puzzle_align.models.build import Predictions
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.communicators import build_communicators
from puzzle_align.runtime.groups.world import World
from puzzle_align.schedules.costs import ModelCosts


class SleepingChunk(torch.nn.Module):
    """One pipeline rank's part of the model, with the face of a model chunk and of its wrapper."""

    def __init__(self, rank: int, num_ranks: int, hidden_size: int, costs: ModelCosts) -> None:
        """Costs are in seconds."""
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == num_ranks - 1
        self.row_state = RowState()
        self.statistics = False
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self._forward_s = costs.forward[rank]
        self._backward_s = costs.backward[rank] if costs.backward else 0.0
        self._hidden: Tensor | None = None

    def set_input_tensor(self, hidden: Tensor) -> None:
        """What the rank before made, [S, 1, H]."""
        self._hidden = hidden

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As a gradient-reducing wrapper's; there is nothing to reduce."""
        return contextlib.nullcontext()

    def forward(self, tokens: Tensor, position_ids: Tensor, predictions: Predictions) -> Tensor:
        """Hidden states [S, 1, H], from the last rank log-probabilities [N]; all are zero."""
        hidden = self.weight.expand(tokens.size(1), 1, -1) if self.is_first else self._hidden
        output = _Sleep.apply(hidden, self._forward_s, self._backward_s)
        return output[predictions.predict_from, 0].mean(-1) if self.is_last else output


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SleepingContext(Context):
    """A context of sleeping chunks, trainable or not."""

    @property
    def wrappers(self) -> list[Any]:
        """The chunks."""
        return self.modules


def sleeping_context(role: str, spec: ModelSpec, costs: ModelCosts, world: World) -> Context:
    """A model that sleeps, on all ranks as one pipeline. Collective over the world.

    Args:
        spec: only its hidden size is used.
        costs: of every rank, in seconds.
    """
    plan = ParallelPlan(pipeline=world.size)
    communicators = build_communicators(plan, world, trained=True)
    assert communicators is not None
    chunk = cast(Any, SleepingChunk(world.rank, world.size, spec.hidden_size, costs))
    return SleepingContext(
        role=role,
        spec=spec,
        plan=plan,
        groups=communicators.groups,
        links=communicators.links,
        chunks=[chunk],
        modules=[chunk],
        dtype=DTYPES["fp32"],
        device=world.device,
    )
