"""Plan files of shipped configs, as a planner that chose these keys would write them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from puzzle_align.config.load import Decided, load_file
from puzzle_align.config.placement import job_plan
from puzzle_align.layout.model import ModelOptions
from puzzle_align.planning.given_plan import GivenPlan
from puzzle_align.planning.plan_file import PlanFile, Predicted
from tests.unit.job_plans import CONFIGS, OPTIONS

SECONDS = {
    "ppo": {"switch": 0.01, "generate": 0.4, "score": 0.1, "learn": 0.3},
    "dpo": {"train": 0.25},
    "reward": {"train": 0.25},
}


def planned(
    name: str,
    world_size: int,
    keys: Mapping[str, Any],
    overrides: Sequence[str] = (),
    options: ModelOptions = OPTIONS,
) -> PlanFile:
    """Of a config with keys that the plan decides, and overrides that it does not."""
    job = load_file(CONFIGS / f"{name}.yaml", overrides, Decided("keys", keys))
    seconds = SECONDS[job.stage]
    return PlanFile(
        keys=dict(keys),
        job_plan=job_plan(job, options, world_size),
        predicted=Predicted(
            iteration=sum(seconds.values()),
            phases=dict(seconds),
            memory={f"0-{world_size - 1}": 2**30},
        ),
        notes=("the only one that was tried",),
    )


def given(file: PlanFile) -> GivenPlan:
    """As if it had been read."""
    return GivenPlan(Path("plan.json"), file)
