"""``puzzle-align profile``: measures the models of a config and the links, for the planner.

Every finished unit is kept in a journal beside the output (``costs.journal``), from which an
interrupted run continues.
"""

import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from puzzle_align.commands.profile_measure import Bench
from puzzle_align.commands.profile_units import (
    LinkUnit,
    ModelUnit,
    ProfiledModel,
    Sizes,
    Unit,
    link_units,
    model_units,
    profiled_models,
    row_tokens_of,
    tensor_sizes_of,
)
from puzzle_align.commands.summary import save_file
from puzzle_align.config.check import JobProblems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Engine, Job, smallest_world_size, try_to_resolve
from puzzle_align.files.json_file import to_plain
from puzzle_align.layout.model import ModelOptions
from puzzle_align.planning.costs.journal import Journal, Part
from puzzle_align.planning.costs.links import declared_links, declared_wires, with_declared
from puzzle_align.planning.costs.profile import (
    Hardware,
    Link,
    ModelProfile,
    Profile,
    save_profile,
)
from puzzle_align.runtime.generation import Sampling
from puzzle_align.runtime.groups.collectives import from_rank_zero
from puzzle_align.runtime.groups.world import (
    World,
    init_distributed,
    ranks_near,
    shutdown_distributed,
)
from puzzle_align.runtime.profiler import nccl_version
from puzzle_align.stages.engine import resolve_engine, settle_attention
from puzzle_align.stages.outlook import Outlook, open_outlook
from puzzle_align.telemetry.progress import Progress, open_progress
from puzzle_align.telemetry.text import duration

_PACKAGES = ("puzzle-align", "torch", "megatron-core", "transformer-engine", "triton")
# Sections of a config, beside its models, on which the numbers depend.
_SECTIONS = ("packing", "generation", "dpo", "kto", "reward_loss", "ppo", "optimizer", "critic")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Options of the command line beside the config; empty: the default that ``--help`` names."""

    output: Path
    tensor: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    links: str | None = None
    repeats: int = 7


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A checked job and its request, before the process group is made."""

    job: Job
    models: list[ProfiledModel]
    tensor: tuple[int, ...]
    declared: tuple[Link, ...]

    @property
    def config(self) -> JobConfig:
        """The job's config."""
        return self.job.config

    @property
    def engine(self) -> Engine:
        """The job's engine."""
        return self.job.engine


def profile_job(config: JobConfig, request: ProfileRequest) -> None:
    """Measure on the ranks that torchrun started, and write the profile.

    Raises:
        ValueError: for anything wrong with config or request, before anything is measured.
    """
    job = _checked(config, request)
    world = init_distributed(job.engine.device, config.engine.distributed_timeout)
    job = replace(job, job=settle_attention(job.job, world))
    outlook = open_outlook(config)
    example = from_rank_zero(outlook.example_size)
    sizes = Sizes(
        tensor=job.tensor,
        tokens=row_tokens_of(config, example.longest, request.tokens),
        example=example,
        row_layout=config.packing.row_layout,
    )
    near = from_rank_zero(lambda: ranks_near(world.size))
    hardware = from_rank_zero(lambda: hardware_of(job.engine.device, near))
    models = model_units(config, job.models, sizes, job.engine.options, job.engine.device)
    links = link_units(world.size // near, near, job.engine.device)
    bench = _bench(job, outlook, request, world)
    journal = _journal(job, request, hardware, sizes, world)
    parts = _measure_all(bench, models, links, journal)
    if journal is not None:
        profile = _assembled(job, hardware, models, parts)
        save_file("--output", request.output, lambda path: save_profile(profile, path))
        journal.close()
        _tell(request.output, profile, parts)
    shutdown_distributed()


def journal_path(output: Path) -> Path:
    """Path of the journal of an unfinished profile."""
    return output.with_name(f"{output.name}.partial-points")


def hardware_of(device: str, ranks_per_node: int) -> Hardware:
    """Describe the hardware and software of this process."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = nccl_version()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory = properties.name, properties.total_memory
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads a rank"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        device=device,
        name=name,
        memory_bytes=memory,
        ranks_per_node=ranks_per_node,
        versions=versions,
    )


def _checked(config: JobConfig, request: ProfileRequest) -> _Job:
    engine = resolve_engine(config.engine)
    # Profiling does not need the job's training data.
    world_size = smallest_world_size(config)
    resolved = try_to_resolve(config, engine, world_size, unread=("data.train",))
    if resolved.job is None:
        raise JobProblems(resolved.problems)
    job = resolved.job
    _check_writable(request.output)
    declared: tuple[Link, ...] = ()
    if request.links is not None:
        declared = declared_links(request.links, declared_wires(request.links))
    if engine.options.fp8 is not None:
        raise ValueError(
            f"engine.fp8: {engine.options.fp8}, but models are profiled without fp8; set it to null"
        )
    models = profiled_models(job.plan)
    return _Job(
        job=job,
        models=models,
        tensor=tensor_sizes_of(job.models, models, request.tensor, engine.device),
        declared=declared,
    )


def _check_writable(output: Path) -> None:
    folder = output.absolute().parent
    if output.is_dir():
        raise ValueError(f"--output {output}: is a folder; name a file in it")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"--output {output}: {folder} is not a writable folder; make it, or name another"
        )


def _bench(job: _Job, outlook: Outlook, request: ProfileRequest, world: World) -> Bench:
    generation = job.config.generation
    sampling = Sampling(
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        min_new_tokens=0,
        max_new_tokens=1,
        stop_token_ids=(),
        seed=job.config.seed,
    )
    return Bench(
        job=job.config,
        models=job.models,
        outlook=outlook,
        sampling=sampling,
        repeats=request.repeats,
        world=world,
    )


def _journal(
    job: _Job, request: ProfileRequest, hardware: Hardware, sizes: Sizes, world: World
) -> Journal | None:
    """Open the journal, on rank 0; its parts were measured under the same circumstances."""
    if world.rank != 0:
        return None
    circumstances = {
        "hardware": to_plain(hardware),
        "ranks": world.size,
        "options": to_plain(job.engine.options),
        "models": [asdict(model) for model in job.models],
        "example": asdict(sizes.example),
        "repeats": request.repeats,
        **{name: asdict(getattr(job.config, name)) for name in _SECTIONS},
    }
    return Journal(journal_path(request.output), circumstances)


def _measure_all(
    bench: Bench,
    models: Sequence[ModelUnit],
    links: Sequence[LinkUnit],
    journal: Journal | None,
) -> dict[str, Part]:
    """Measure the units that the journal lacks; return all parts by unit, on rank 0. Collective."""
    done = from_rank_zero(lambda: set(journal.parts) if journal is not None else set())
    todo_models = [unit for unit in models if unit.name not in done]
    todo_links = [unit for unit in links if unit.name not in done]
    total = len(models) + len(links)
    first = total - len(todo_models) - len(todo_links)
    rank, wants_bar = bench.world.rank, bench.job.telemetry.progress
    progress: Progress = open_progress(rank, wants_bar, total, first)
    if first and rank == 0:
        progress.say(f"{first} of {total} measurements were kept from an earlier run")
    started, finished = time.monotonic(), first

    def keep(unit: Unit, part: Part) -> None:
        nonlocal finished
        finished += 1
        if journal is not None:
            journal.add(unit.name, part)
            if part.left_out:
                progress.say(f"left out: {unit.name}: {part.left_out}")
        progress.step(finished, {}, logged=True)

    # Links first: at this point every rank has made the same number of groups.
    for unit, part in bench.measure_links(todo_links):
        keep(unit, part)
    for unit, part in bench.measure_models(todo_models):
        keep(unit, part)
    progress.close()
    if rank == 0:
        taken = duration(time.monotonic() - started)
        _logger.info("%d measurements in %s", total - first, taken)
    names = {unit.name for unit in (*models, *links)}
    parts = {} if journal is None else journal.parts
    return {name: part for name, part in parts.items() if name in names}


def _assembled(
    job: _Job, hardware: Hardware, units: Sequence[ModelUnit], parts: dict[str, Part]
) -> Profile:
    models = []
    for number, model in enumerate(job.models):
        model_parts = [parts[unit.name] for unit in units if unit.model == number]
        models.append(
            ModelProfile(
                model=model.spec,
                rows=tuple(point for part in model_parts for point in part.rows),
                ends=tuple(point for part in model_parts for point in part.ends),
                optimizer=tuple(point for part in model_parts for point in part.optimizer),
                prefill=tuple(point for part in model_parts for point in part.prefill),
                decode=tuple(point for part in model_parts for point in part.decode),
            )
        )
    measured = [link for part in parts.values() for link in part.links]
    return Profile(
        hardware=hardware,
        options=_without_recompute(job.engine.options),
        models=tuple(models),
        links=with_declared(measured, job.declared),
    )


def _without_recompute(options: ModelOptions) -> ModelOptions:
    return replace(options, recompute="none")


def _tell(output: Path, profile: Profile, parts: dict[str, Part]) -> None:
    measured = sum(not link.declared for link in profile.links)
    left_out = sum(bool(part.left_out) for part in parts.values())
    _logger.info(
        "%s: %d models, %d points of rows, %d links measured and %d declared%s",
        output,
        len(profile.models),
        sum(len(model.rows) for model in profile.models),
        measured,
        len(profile.links) - measured,
        f"; {left_out} measurements left out" if left_out else "",
    )


def _processor() -> str:
    """The CPU's name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return next(names, "").strip() or platform.machine()
