"""``puzzle-align profile``: measure a config's models and the links, for the planner."""

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import torch
from torch.cuda import nccl

from puzzle_align.commands.profile_measure import Bench, UnitPoints
from puzzle_align.commands.profile_units import (
    LinkUnit,
    ModelUnit,
    ProfiledModel,
    Sizes,
    link_units,
    model_units,
    profiled_models,
    row_tokens_of,
    tensor_sizes_of,
)
from puzzle_align.commands.summary import check_writable, save_file
from puzzle_align.config.check import JobProblems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.resolve import Job, try_to_resolve
from puzzle_align.planning.costs.declared import DEVICES, declared_profile
from puzzle_align.planning.costs.declared import Sizes as DeclaredSizes
from puzzle_align.planning.costs.links import declared_links, declared_wires, with_declared
from puzzle_align.planning.costs.profile import Hardware, Link, ModelProfile, Profile, save_profile
from puzzle_align.runtime.groups.collectives import from_rank_zero
from puzzle_align.runtime.groups.world import init_distributed, ranks_near, shutdown_distributed
from puzzle_align.stages.engine import resolve_engine, settle_attention
from puzzle_align.stages.outlook import open_outlook
from puzzle_align.telemetry.progress import Progress, open_progress
from puzzle_align.telemetry.text import duration

_PACKAGES = ("puzzle-align", "torch", "megatron-core", "transformer-engine", "triton")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Options of the command line beside the config; empty: the defaults of ``--help``."""

    output: Path
    tensor: tuple[int, ...]
    tokens: tuple[int, ...]
    links: str | None
    repeats: int


def declare_profile(config: JobConfig, request: ProfileRequest, name: str) -> None:
    """Write the profile of a device from its data sheet; nothing is measured, no model is built.

    Args:
        name: of the device, and of its links where the request names no others.

    Raises:
        ValueError: the name, the config or the request is wrong.
    """
    if name not in DEVICES:
        raise ValueError(f"--declare {name}: unknown device; give one of {', '.join(DEVICES)}")
    implementation = config.engine.transformer_impl
    if implementation == "auto":
        implementation = "te"  # what a job on this device would find
    engine = replace(config.engine, device="cuda", transformer_impl=implementation)
    job = _checked(replace(config, engine=engine), request, elsewhere=True)
    options = replace(job.engine.options, recompute="none")
    if options.dtype != "bf16":
        raise ValueError(
            f"engine.dtype: {options.dtype}, but the figures of --declare are of bf16; set it to "
            "bf16, or measure"
        )
    models = profiled_models(job.plan, job.settings.merged)
    longest = open_outlook(job.config).example_size().longest
    wires = request.links or name
    profile = declared_profile(
        [model.spec for model in models],
        DEVICES[name],
        declared_links(wires, declared_wires(wires)),
        sizes=DeclaredSizes(
            tensors=tensor_sizes_of(job.models, models, request.tensor, "cuda"),
            rows=row_tokens_of(job.config, longest, request.tokens),
            recomputes=tuple(dict.fromkeys(mode for model in models for mode in model.recompute)),
        ),
        options=options,
        optimizers={
            model.spec: dict.fromkeys(
                (own.state_dtype, own.cpu_offload) for own in map(job.optimizer, model.trained)
            )
            for model in models
        },
    )
    save_file("--output", request.output, lambda path: save_profile(profile, path))
    _log_summary(request.output, profile, {})


def profile_job(config: JobConfig, request: ProfileRequest) -> None:
    """Measure on the ranks that torchrun started, and write the profile.

    Raises:
        ValueError: the config or the request is wrong; raised before anything is measured.
    """
    job = _checked(config, request)
    device, options = job.engine.device, job.engine.options
    models = profiled_models(job.plan, job.settings.merged)
    tensor = tensor_sizes_of(job.models, models, request.tensor, device)
    declared: tuple[Link, ...] = ()
    if request.links is not None:
        declared = declared_links(request.links, declared_wires(request.links))
    world = init_distributed(device, config.engine.distributed_timeout)
    options = settle_attention(job, world).engine.options
    config = job.config
    outlook = open_outlook(config)
    example = from_rank_zero(outlook.example_size)
    sizes = Sizes(
        tensor=tensor,
        tokens=row_tokens_of(config, example.longest, request.tokens),
        example=example,
        row_layout=config.packing.row_layout,
    )
    near = from_rank_zero(lambda: ranks_near(world.size))
    hardware = from_rank_zero(lambda: hardware_of(device, near))
    bench = Bench(job=job, outlook=outlook, repeats=request.repeats, world=world)
    units = model_units(config, models, sizes, options, device)
    parts = _measure_all(bench, units, link_units(world.size // near, near, device))
    if world.rank == 0:
        links = [link for part in parts.values() for link in part.links]
        profile = Profile(
            hardware=hardware,
            options=replace(options, recompute="none"),
            models=tuple(_model_profile(model, units, parts) for model in models),
            links=with_declared(links, declared),
        )
        save_file("--output", request.output, lambda path: save_profile(profile, path))
        _log_summary(request.output, profile, parts)
    shutdown_distributed()


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
        versions["nccl"] = ".".join(map(str, nccl.version()))
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


def _checked(config: JobConfig, request: ProfileRequest, *, elsewhere: bool = False) -> Job:
    """The job on the fewest possible ranks; profiling does not need its training data."""
    engine = resolve_engine(config.engine, elsewhere=elsewhere)
    world_size = Resolution(config).smallest_world_size()
    resolved = try_to_resolve(config, engine, world_size, unread=("data.train",))
    if resolved.job is None:
        raise JobProblems(resolved.problems)
    if os.path.isdir(request.output):  # Path.is_dir raises in a closed folder
        raise ValueError(f"--output {request.output}: is a folder; name a file in it")
    check_writable("--output", request.output)
    if engine.options.fp8 is not None:
        raise ValueError(
            f"engine.fp8: {engine.options.fp8}, but models are profiled without fp8; set it to null"
        )
    return resolved.job


def _measure_all(
    bench: Bench, models: Sequence[ModelUnit], links: Sequence[LinkUnit]
) -> dict[str, UnitPoints]:
    """Measure all units; their parts by name, the same on every rank. Collective."""
    total, rank, started = len(models) + len(links), bench.world.rank, time.monotonic()
    progress: Progress = open_progress(rank, bench.job.config.telemetry.progress, total, 0)
    parts: dict[str, UnitPoints] = {}
    # Links first, while every rank has made the same number of groups.
    for unit, part in chain(bench.measure_links(links), bench.measure_models(models)):
        parts[unit.name] = part
        if part.left_out:
            progress.say(f"left out: {unit.name}: {part.left_out}")
        progress.step(len(parts), {}, logged=True)
    progress.close()
    if rank == 0:
        _logger.info("%d measurements in %s", total, duration(time.monotonic() - started))
    return parts


def _model_profile(
    model: ProfiledModel, units: Sequence[ModelUnit], parts: Mapping[str, UnitPoints]
) -> ModelProfile:
    model_parts = [parts[unit.name] for unit in units if unit.model == model]
    points = {
        name: tuple(point for part in model_parts for point in getattr(part, name))
        for name in ("rows", "ends", "optimizer", "prefill", "decode", "merge")
    }
    return ModelProfile(model=model.spec, **points)


def _log_summary(output: Path, profile: Profile, parts: Mapping[str, UnitPoints]) -> None:
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
    """Name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return next(names, "").strip() or platform.machine()
