"""Optimizer state that one kind of AdamW has saved, and another goes on with.

A CPU has torch's, which counts steps by parameter; a GPU has Transformer Engine's or Apex's, which
counts them by group. Here the second kind's arithmetic is torch's: the weights stay the same.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

from puzzle_align.config.saved import open_checkpoint
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint, save_checkpoint
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer
from puzzle_align.runtime.optimizer.state import parts_of
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import TINY

STEPS, MORE = 3, 2
STATE = ("exp_avg", "exp_avg_sq")


class CountsByGroup(torch.optim.Optimizer):
    """AdamW that reads, takes and counts what Transformer Engine 2.11's FusedAdam does."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        kept = ("params", "lr", "betas", "eps", "weight_decay", "wd_mult", "lr_mult")
        further = ("is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr", "default_config")
        own = [{name: g[name] for name in (*kept, *further) if name in g} for g in groups]
        leaves = [{**g, "params": [torch.zeros_like(p) for p in g["params"]]} for g in own]
        super().__init__(leaves, {"bias_correction": True})
        for group, given in zip(self.param_groups, own, strict=True):
            group["params"] = given["params"]  # a distributed optimizer's are views

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            assert group["bias_correction"] is True
            group["step"] = group.get("step", 0) + 1
            assert type(group["step"]) is int, "its kernel takes no other number"
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        for name in STATE:
            state.setdefault(name, torch.zeros_like(parameter))
        adamw(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.tensor(float(group["step"] - 1))],
            foreach=False,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments, and refuse other state."""
        names = {name for values in state_dict["state"].values() for name in values}
        assert names <= {*STATE}, names
        super().load_state_dict(state_dict)


def _optimizer(world: World, config: OptimizerConfig, dtype: str, kind: str) -> Optimizer:
    context = random_context(TINY, ParallelPlan(), world, seed=3, dtype=dtype)
    optimizer = trainable(context, config)
    for part in parts_of(optimizer.megatron):
        if kind == "by group":
            part.optimizer = CountsByGroup(part.optimizer.param_groups)
    return optimizer


def _megatron_has(kind: str) -> Any:
    """Let Megatron-core's distributed optimizer know which kind of AdamW there is."""
    is_fused = kind == "by group"
    return mock.patch.multiple(
        distrib_optimizer, HAVE_APEX_OR_TE=is_fused, USING_TE_OPTIMIZER=is_fused
    )


def _step(optimizer: Optimizer, number: int) -> None:
    optimizer.zero_grad()
    for place, parameter in enumerate(optimizer.context.chunks[0].parameters()):
        seed = torch.Generator().manual_seed(100 * place + number)
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=seed))  # type: ignore[attr-defined]
    optimizer.reduce_gradients()
    assert optimizer.step(0.01)[0]


def _weights(optimizer: Optimizer) -> list[torch.Tensor]:
    return [value.detach().clone() for value in optimizer.context.chunks[0].parameters()]


def _go_on(rank: int, world_size: int, folder: Path, distributed: bool, dtype: str) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    config = OptimizerConfig(use_distributed_optimizer=distributed, weight_decay=0.1)
    expected = _optimizer(world, config, dtype, "by parameter")
    for number in range(STEPS + MORE):
        _step(expected, number)
    for before, after in (("by parameter", "by group"), ("by group", "by parameter")):
        with _megatron_has(before):
            first = _optimizer(world, config, dtype, before)
            for number in range(STEPS):
                _step(first, number)
            models = {"actor": Trained(first.context, first)}
            path = save_checkpoint(folder / before, STEPS, {}, models)
        with _megatron_has(after):
            second = _optimizer(world, config, dtype, after)
            models = {"actor": Trained(second.context, second)}
            load_checkpoint(open_checkpoint(path), models)
            for number in range(STEPS, STEPS + MORE):
                _step(second, number)
        assert all(map(torch.equal, _weights(second), _weights(expected))), (before, after)


@pytest.mark.parametrize(
    ("distributed", "dtype"), [(False, "fp32"), (False, "bf16"), (True, "bf16"), (True, "fp32")]
)
def test_another_kind_of_adamw_goes_on_bitwise(
    distributed: bool, dtype: str, tmp_path: Path
) -> None:
    run_ranks(_go_on, 1, tmp_path, distributed, dtype)
