"""A fresh optimizer's state, where the count of steps is a group's, as in TE's FusedAdam."""

from types import SimpleNamespace
from typing import Any

import torch

from puzzle_align.runtime.optimizer.state import allocate_state


class CountsByGroup(torch.optim.Optimizer):
    """Counts as FusedAdam does; its arithmetic is not what is tested."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def test_allocating_does_not_count_as_a_step() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [parameter]} for parameter in parameters]
    inner = CountsByGroup(groups, {"lr": 0.5, "weight_decay": 0.1})
    optimizer: Any = SimpleNamespace(optimizer=inner)
    allocate_state(optimizer)
    assert len(inner.state) == 2
    assert [(g["step"], g["lr"], g["weight_decay"]) for g in inner.param_groups] == [
        (0, 0.5, 0.1),
        (0, 0.5, 0.1),
    ]
    inner.step()
    allocate_state(optimizer)
    assert [group["step"] for group in inner.param_groups] == [1, 1]
