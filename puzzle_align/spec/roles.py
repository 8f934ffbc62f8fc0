"""The roles of a job: which there are, and the model and parallel plan of each."""

import math

from puzzle_align.spec.job import DPOConfig, JobConfig, ModelConfig, ParallelConfig
from puzzle_align.spec.model import ModelSpec, from_hf_config, read_hf_config
from puzzle_align.spec.plan import ParallelPlan

REFERENCE_FREE_LOSSES = ("simpo", "orpo")
# What two models have in common that time-share a pipeline.
_SHARED_SIZES = (
    "pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
)


def uses_reference(dpo: DPOConfig) -> bool:
    """Whether the loss needs a reference model."""
    return not dpo.reference_free and dpo.loss_type not in REFERENCE_FREE_LOSSES


def role_names(job: JobConfig) -> tuple[str, ...]:
    """The roles that take part."""
    return ("actor", "reference") if uses_reference(job.dpo) else ("actor",)


def role_model(job: JobConfig, role: str) -> tuple[ModelConfig, str]:
    """A role's model (the actor's where it has none) and the dotted key it stands under."""
    own: ModelConfig = getattr(job, role).model
    if own.path is None and own.config is None:
        return job.actor.model, "actor.model"
    return own, f"{role}.model"


def role_parallel(job: JobConfig, role: str) -> tuple[ParallelConfig, str]:
    """A role's plan (the actor's where it has none) and the dotted key it stands under."""
    own: ParallelConfig | None = getattr(job, role).parallel
    if own is None:
        return job.actor.parallel or ParallelConfig(), "actor.parallel"
    return own, f"{role}.parallel"


def resolve_plan(parallel: ParallelConfig, world_size: int, key: str) -> ParallelPlan:
    """The plan on all ``world_size`` ranks; D fills what P and T leave.

    Args:
        key: dotted name of ``parallel``, for errors.

    Raises:
        ValueError: if the sizes do not multiply to the world size.
    """
    pipeline, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    data = parallel.data_parallel_size or max(1, world_size // (pipeline * tensor))
    if pipeline * data * tensor != world_size:
        asked = parallel.data_parallel_size or "null"
        least = pipeline * tensor * (parallel.data_parallel_size or 1)
        wanted = f"{least}" if parallel.data_parallel_size else f"a multiple of {least}"
        raise ValueError(
            f"{key}: P={pipeline} x D={asked} x T={tensor} does not make {world_size} ranks: start "
            f"{wanted} ranks, or change the sizes"
        )
    return ParallelPlan(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
    )


def smallest_world_size(job: JobConfig) -> int:
    """The fewest ranks on which the plans of all roles can lie, as far as there are any."""
    sizes = []
    for role in role_names(job):
        plan, _ = role_parallel(job, role)
        shards = plan.pipeline_model_parallel_size * plan.tensor_model_parallel_size
        sizes.append(max(1, shards * (plan.data_parallel_size or 1)))
    return math.lcm(*sizes)


def resolve_placement(job: JobConfig) -> str:
    """``placement.reference`` with ``auto`` decided: time_shared where it can be."""
    if job.placement.reference != "auto":
        return job.placement.reference
    return "time_shared" if time_sharing_obstacle(job) is None else "sequential"


def time_sharing_obstacle(job: JobConfig) -> str | None:
    """What keeps the reference out of the policy's pipeline bubbles; None if nothing does.

    The data axis needs no look: both plans cover the same ranks.
    """
    if not uses_reference(job.dpo):
        return "the loss uses no reference"
    if job.dpo.precompute_ref_log_probs:
        return "dpo.precompute_ref_log_probs=true runs the reference before training"
    policy, policy_key = role_parallel(job, "actor")
    reference, reference_key = role_parallel(job, "reference")
    if policy.pipeline_model_parallel_size == 1:
        return f"{policy_key}.pipeline_model_parallel_size=1 leaves no bubbles"
    if policy.virtual_pipeline_model_parallel_size > 1:
        return f"{policy_key}.virtual_pipeline_model_parallel_size is above 1"
    for name in _SHARED_SIZES:
        own, wanted = getattr(reference, name), getattr(policy, name)
        if own != wanted:
            return f"{reference_key}.{name}={own} is not the actor's ({wanted})"
    return None


def resolve_spec(model: ModelConfig, key: str) -> ModelSpec:
    """A model's dimensions: of its directory where it has a path, else of the inline config.

    Args:
        key: dotted name of ``model``, for errors.

    Raises:
        ValueError: there is neither, or it is not readable, or not supported.
    """
    if model.path is None:
        if model.config is None:
            raise ValueError(
                f"{key}: no model; set {key}.path to a Hugging Face directory, or give {key}.config"
            )
        return from_hf_config(model.config, f"{key}.config")
    try:
        config = read_hf_config(model.path)
    except ValueError as error:
        raise ValueError(f"{key}.path: {error}") from error
    return from_hf_config(config, f"{model.path}/config.json")
