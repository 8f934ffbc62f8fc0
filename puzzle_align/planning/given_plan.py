"""A plan file that a command was given, held against the job that it is given for."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import Decided
from puzzle_align.config.placement import generation_parallel
from puzzle_align.config.roles import role_model, role_parallel
from puzzle_align.files.messages import shown
from puzzle_align.layout.job_plan import ContextPlan, JobPlan
from puzzle_align.planning.plan_file import PlanFile, load_plan

_CURE = "plan this job again"


@dataclass(frozen=True)
class GivenPlan:
    """A plan file, and where it was found."""

    path: Path
    file: PlanFile

    @property
    def decided(self) -> Decided:
        """The config's keys that it decides."""
        return Decided(str(self.path), self.file.keys, self.file.stage)

    def check_world_size(self, world_size: int) -> None:
        """Raise a one-line ValueError if that is not the number of ranks that was planned for."""
        planned = self.file.world_size
        if world_size != planned:
            raise ValueError(
                f"{self.path} is for {planned} ranks, and the job would have {world_size}: start "
                f"{planned}, or plan for {world_size}"
            )

    def check_job_plan(self, job: JobConfig, own: JobPlan) -> None:
        """Raise a ValueError, one line with the first difference, if the job's plan is another.

        Args:
            own: what the job's config makes, with the file's keys.
        """
        if own != self.file.job_plan:
            first = next(_differences(self.file.job_plan, own, job))
            raise ValueError(f"{self.path}: {first}: {_CURE}")


def open_plan(path: Path) -> GivenPlan:
    """The plan in a file. ValueError as ``load_plan``."""
    return GivenPlan(path, load_plan(path))


def _differences(planned: JobPlan, own: JobPlan, job: JobConfig) -> Iterator[str]:
    """Those that others may follow from are first: who is there, what is trained, how it runs."""
    if planned.world_size != own.world_size:
        yield f"it is for {planned.world_size} ranks, and this job has {own.world_size}"
        return
    works, own_works = _works(planned), _works(own)
    if works != own_works:
        yield f"its phases are {shown(works)}, and this job's {own_works}"
        return
    for context, own_context in zip(planned.contexts, own.contexts, strict=True):
        yield from _in_context(context, own_context, job)
    for phase, own_phase in zip(planned.phases, own.phases, strict=True):
        yield from _fields(f"its phase {phase.name} has", phase, own_phase, "placement")
    yield from _fields("it has", planned, own, "stage")


def _works(plan: JobPlan) -> str:
    """The phases of a plan with the work in each: ``train (infer reference, train actor)``."""
    return ", ".join(
        f"{phase.name} ({', '.join(f'{c.workload} {c.role}' for c in phase.contexts)})"
        for phase in plan.phases
    )


def _in_context(planned: ContextPlan, own: ContextPlan, job: JobConfig) -> Iterator[str]:
    key = role_parallel(job, own.role)[1]
    if own.workload == "generate":
        key = generation_parallel(job)[1]
    whose, model = f"the {own.role}'s", role_model(job, own.role)[1]
    yield from _fields(f"{whose} model has", planned.model, own.model, model)
    options = planned.options, own.options
    yield from _fields(f"the {own.role} runs with", *options, f"engine, {key}")
    yield from _fields(f"{whose} plan ({own.workload}) has", planned.plan, own.plan, key)
    yield from _fields(f"the {own.role} ({own.workload}) has", planned, own, key)


def _fields(start: str, planned: Any, own: Any, key: str) -> Iterator[str]:
    """The values that differ, ``key`` being where this job says its own."""
    for item in fields(own):
        value, own_value = getattr(planned, item.name), getattr(own, item.name)
        if value != own_value:
            here = f"in this job ({key}) {shown(own_value)}"
            yield f"{start} {item.name}={shown(value)}, and {here}"
