"""The config keys that a plan comes to: what ``plan.json`` sets in a job's config."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from puzzle_align.config.stages import STAGES
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Settings
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan

_SIZES = {
    "pipeline_model_parallel_size": "pipeline",
    "data_parallel_size": "data",
    "tensor_model_parallel_size": "tensor",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "pipeline_schedule": "schedule",
    "sequence_parallel": "sequence_parallel",
}


def plan_keys(
    plan: JobPlan, settings: Settings, options: ModelOptions, device: str
) -> dict[str, Any]:
    """Keys by dotted name, in the order in which they are to be set.

    Args:
        options: how models were computed when they were measured, on ``device``.
    """
    keys: dict[str, Any] = {
        "engine.device": device,
        "engine.dtype": options.dtype,
        "engine.attention": options.attention,
        "engine.transformer_impl": options.transformer_impl,
        **{f"engine.{name}": fused for name, fused in asdict(options.fusions).items()},
        "packing.row_tokens": settings.row_tokens,
    }
    for role, context in plan.models.items():
        keys |= _parallel(f"{role}.parallel", context.plan, context.options.recompute)
    keys |= dict(_placement(plan))
    if STAGES[plan.stage].ranks_by_role:
        for role, context in plan.models.items():
            keys[f"{role}.ranks"] = _ranks(context, plan.world_size)
        keys |= _generation(plan, settings)
    return keys


def _parallel(name: str, plan: ParallelPlan, recompute: str) -> dict[str, Any]:
    keys: dict[str, Any] = {name: None}
    keys |= {f"{name}.{key}": getattr(plan, size) for key, size in _SIZES.items()}
    keys[f"{name}.pipeline_layers"] = list(plan.pipeline_layers) or None
    keys[f"{name}.recompute"] = recompute
    return keys


def _placement(plan: JobPlan) -> Iterator[tuple[str, Any]]:
    """How models take turns."""
    names = {phase.name: phase for phase in plan.phases}
    if STAGES[plan.stage].ranks_by_role:
        for name in ("score", "learn"):
            shares = names[name].order == "time_shared"
            yield f"placement.{name}", "time_shared" if shares else "sequential"
        return
    if "reference" in plan.models:
        yield f"{STAGES[plan.stage].loss}.precompute_ref_log_probs", "precompute" in names
        yield "placement.reference", names["train"].order if names["train"].is_fed else "auto"


def _ranks(context: ContextPlan, world_size: int) -> str | None:
    ranks = sorted(context.ranks)
    return None if len(ranks) == world_size else f"{ranks[0]}-{ranks[-1]}"


def _generation(plan: JobPlan, settings: Settings) -> dict[str, Any]:
    sampling, trained = plan.context("actor", "generate"), plan.context("actor", "train")
    keys: dict[str, Any] = {"generation.parallel": None, "generation.ranks": None}
    if (sampling.plan, sampling.ranks) != (trained.plan, trained.ranks):
        keys |= _parallel("generation.parallel", sampling.plan, "none")
        if set(sampling.ranks) != set(trained.ranks):
            keys["generation.ranks"] = f"{min(sampling.ranks)}-{max(sampling.ranks)}"
    elif settings.overlap_switch:  # there is none
        keys["generation.overlap_switch"] = False
    keys["generation.prefill_tokens"] = settings.prefill_tokens
    keys["generation.decode_batch_size"] = settings.decode_batch_size
    return keys
