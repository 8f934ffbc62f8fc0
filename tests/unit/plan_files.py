"""Plan files of shipped configs, as a planner that chose what overrides say would write them."""

from collections.abc import Sequence
from typing import Any, Literal

from puzzle_align.config.load import load_file
from puzzle_align.config.resolution import Engine, Resolution
from puzzle_align.layout.model import ModelOptions
from puzzle_align.planning.plan_file import PlanFile, Predicted
from tests.unit.job_plans import CONFIGS, OPTIONS

SECONDS = {
    "ppo": {"switch": 0.01, "generate": 0.4, "score": 0.1, "learn": 0.3},
    "dpo": {"train": 0.25},
    "reward": {"train": 0.25},
}


def put(data: Any, path: str, value: Any) -> None:
    """Set what a dotted path names in JSON: keys, places in lists, ``*`` for all; ``...`` deletes.

    A place behind a list's last one is made.
    """
    name, _, rest = path.partition(".")
    if name == "*":
        for place in range(len(data)):
            put(data, f"{place}.{rest}", value)
        return
    key: Any = int(name) if isinstance(data, list) else name
    if rest:
        put(data[key], rest, value)
    elif value is ...:
        del data[key]
    elif isinstance(data, list) and key == len(data):
        data.append(value)
    else:
        data[key] = value


def planned(
    name: str,
    world_size: int,
    overrides: Sequence[str] = (),
    options: ModelOptions = OPTIONS,
    device: Literal["cpu", "cuda"] = "cuda",
) -> PlanFile:
    """The plan that a config makes with the overrides."""
    config = load_file(CONFIGS / f"{name}.yaml", overrides)
    resolution = Resolution(config, world_size, Engine(device, options))
    seconds = SECONDS[config.stage]
    return PlanFile(
        job_plan=resolution.plan,
        settings=resolution.settings(),
        device=device,
        predicted=Predicted(
            iteration=sum(seconds.values()),
            phases=dict(seconds),
            memory={f"0-{world_size - 1}": 2**30},
        ),
        notes=("the only one that was tried",),
    )
