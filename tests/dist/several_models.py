"""An actor and a critic, placed in many ways, that train on gradients no placement changes."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.checkpoint.models import Trained
from puzzle_align.runtime.groups.world import World, build_communicators
from tests.dist.random_models import random_context, trainable
from tests.specs import TINY

SPECS = {"actor": TINY, "critic": with_scalar_head(TINY)}
RATES = {"actor": 0.01, "critic": 0.03}


@dataclass(frozen=True)
class Place:
    """Ranks and plan of a model, and its kind of optimizer."""

    ranks: tuple[int, ...]
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    distributed: bool = False
    overlap: bool = False  # of the reduction of gradients: then there are several buckets


def build(places: Mapping[str, Place], world: World, *, seed: int) -> dict[str, Trained]:
    """This rank's part of the models. Collective over the world."""
    found = {
        role: build_communicators(place.plan, world, place.ranks, trained=True)
        for role, place in places.items()
    }
    models = {}
    for role, communicators in found.items():
        if communicators is None:
            continue
        plan = places[role].plan
        context = random_context(
            SPECS[role], plan, world, seed=seed, role=role, communicators=communicators
        )
        config = OptimizerConfig(
            max_grad_norm=0.0,
            use_distributed_optimizer=places[role].distributed,
            overlap_grad_reduce=places[role].overlap,
        )
        models[role] = Trained(context, trainable(context, config))
    return models


def optimizer_step(role: str, model: Trained) -> None:
    """An optimizer step whose gradients are what the weights are: the same under any plan."""
    optimizer = model.optimizer
    assert optimizer is not None
    optimizer.zero_grad()
    for chunk in model.context.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(parameter.detach() + 0.1)
    assert optimizer.step(RATES[role])[0]


def digest(model: Trained) -> str:
    """Hash of all that a model and its optimizer are on this rank."""
    found = hashlib.sha256()

    def note(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.update(f"{name}{value}".encode())

    for chunk in model.context.chunks:
        for name, parameter in chunk.named_parameters():
            note(name, parameter)
    assert model.optimizer is not None
    for part in model.optimizer.megatron.chained_optimizers:
        for group in part.optimizer.param_groups:
            for name, value in sorted(group.items()):
                if name not in ("params", "step"):  # a loaded group has a step that nothing reads
                    note(name, value)
            for parameter in group["params"]:
                note("main", parameter)
                for name, value in sorted(part.optimizer.state[parameter].items()):
                    note(name, value)
    return found.hexdigest()
