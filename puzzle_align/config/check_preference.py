"""Checks of what training on preference pairs alone has: losses, lengths, the reference's place."""

from collections.abc import Iterator

from puzzle_align.config.job import JobConfig
from puzzle_align.config.placement import concurrency_obstacle, time_sharing_obstacle
from puzzle_align.config.sections.preference import PREFERENCE_LOSSES, DPOConfig
from puzzle_align.config.stages import STAGES


def stage_problems(job: JobConfig, _world_size: int) -> Iterator[str]:
    """What is wrong with a job whose numbers are in their ranges, one line each."""
    yield from _length_problems(job)
    if STAGES[job.stage].loss == "dpo":
        yield from _loss_problems(job.dpo)
    yield from _placement_problems(job)


def _length_problems(job: JobConfig) -> Iterator[str]:
    data, longest = job.data, job.data.max_prompt_length
    if longest is not None and longest >= data.max_length:
        yield (
            f"data.max_prompt_length: {longest} leaves no room for a response; "
            f"choose less than data.max_length (now {data.max_length})"
        )


def _loss_problems(dpo: DPOConfig) -> Iterator[str]:
    if dpo.precompute_ref_log_probs and not dpo.uses_reference:
        why = "dpo.reference_free=true" if dpo.reference_free else f"loss {dpo.loss_type}"
        yield f"dpo.precompute_ref_log_probs: true, but {why} uses no reference; set it to false"
    smoothed = [name for name, loss in PREFERENCE_LOSSES.items() if loss.takes_label_smoothing]
    if dpo.label_smoothing and dpo.loss_type not in smoothed:
        yield (
            f"dpo.label_smoothing: {dpo.label_smoothing} means nothing to loss {dpo.loss_type}; "
            f"set it to 0, or take one of {', '.join(smoothed)}"
        )


def _placement_problems(job: JobConfig) -> Iterator[str]:
    obstacles = {"time_shared": time_sharing_obstacle, "concurrent": concurrency_obstacle}
    placement = job.placement.reference
    obstacle = obstacles[placement](job) if placement in obstacles else None
    if obstacle is not None:
        cure = "change that, or set it to auto"
        yield f"placement.reference: {placement}, but {obstacle}; {cure}"
