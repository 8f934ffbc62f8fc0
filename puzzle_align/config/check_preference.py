"""Checks for the preference stages: losses, lengths, placement of the reference."""

from collections.abc import Iterator
from math import lcm

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.sections.preference import (
    PREFERENCE_LOSSES,
    DPOConfig,
    KTOConfig,
    ReferenceLossConfig,
)
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.rows import SLOT_MULTIPLE


def stage_problems(resolution: Resolution) -> Iterator[str]:
    """Problems of a preference job whose numbers are in range, one line each."""
    job = resolution.config
    yield from _length_problems(job)
    loss = job.reference_loss
    if isinstance(loss, DPOConfig):
        yield from _loss_problems(loss)
    if isinstance(loss, KTOConfig):
        yield from _unpaired_problems(job)
    if loss is not None:
        yield from _reference_problems(loss)
    yield from _placement_problems(resolution)


def plan_problems(job: JobConfig, plan: JobPlan) -> Iterator[str]:
    """Problems of a job under its plan, one line each."""
    loss = job.reference_loss
    if isinstance(loss, KTOConfig) and loss.estimates_kl:
        yield from _mismatched_problems(job, plan)
    if loss is None or not loss.sync_ref_model:
        return
    # The reference mixes in the policy's weights rank by rank: both need the same plan and ranks.
    policy, reference = plan.models["actor"], plan.models["reference"]
    key = f"{loss.section}.sync_ref_model: true"
    if policy.model != reference.model:
        yield f"{key}, but reference.model has other dimensions than actor.model; change one"
    elif policy.placed != reference.placed:
        yield (
            f"{key}, but reference.parallel is another plan than actor.parallel; leave "
            "reference.parallel out"
        )


def _length_problems(job: JobConfig) -> Iterator[str]:
    data, longest = job.data, job.data.max_prompt_length
    if longest is not None and longest >= data.max_length:
        yield (
            f"data.max_prompt_length: {longest} leaves no room for a response; "
            f"choose less than data.max_length (now {data.max_length})"
        )


def _loss_problems(dpo: DPOConfig) -> Iterator[str]:
    names = dpo.loss_names
    if dpo.loss_function is not None and names != ["sigmoid"]:
        yield "dpo.loss_function: replaces dpo.loss_type; leave one of them out"
    if dpo.loss_function is not None and dpo.loss_weights is not None:
        yield "dpo.loss_weights: weights are of dpo.loss_type, not dpo.loss_function; leave it out"
    if not names:
        yield "dpo.loss_type: [] names no loss; give one, or several"
    for name in {name for name in names if names.count(name) > 1}:
        yield f"dpo.loss_type: {name} is named twice; name it once, with its weight"
    if dpo.loss_weights is not None and len(dpo.loss_weights) != len(names):
        yield (
            f"dpo.loss_weights: {len(dpo.loss_weights)} weights for {len(names)} losses of "
            "dpo.loss_type; give one each"
        )
    if dpo.loss_weights and not any(dpo.loss_weights) and not dpo.sft_loss_weight:
        yield "dpo.loss_weights: all weights are 0; set at least one above 0"
    if len({PREFERENCE_LOSSES[name].uses_reference for name in names}) > 1:
        alone = [name for name in names if not PREFERENCE_LOSSES[name].uses_reference]
        yield (
            f"dpo.loss_type: {', '.join(alone)} compares mean log-probabilities without a "
            "reference and cannot be added to losses with one; take it alone (dpo.sft_loss_weight "
            "adds a likelihood to it)"
        )
    if dpo.precompute_ref_log_probs and not dpo.uses_reference:
        why = "dpo.reference_free=true" if dpo.reference_free else f"loss {', '.join(names)}"
        yield f"dpo.precompute_ref_log_probs: true, but {why} uses no reference; set it to false"
    yield from _label_problems(dpo)
    yield from _token_problems(dpo)
    if dpo.f_divergence_type != "reverse_kl":
        able = [name for name, loss in PREFERENCE_LOSSES.items() if loss.takes_divergence]
        for name in names:
            if name not in able:
                yield (
                    f"dpo.f_divergence_type: {dpo.f_divergence_type} is not defined for loss "
                    f"{name}, which is not of the difference of two rewards; take reverse_kl, or "
                    f"losses of {', '.join(able)}"
                )


def _label_problems(dpo: DPOConfig) -> Iterator[str]:
    names = dpo.loss_names
    smoothed = [name for name, loss in PREFERENCE_LOSSES.items() if loss.takes_label_smoothing]
    if dpo.label_smoothing and not set(names) & set(smoothed):
        yield (
            f"dpo.label_smoothing: {dpo.label_smoothing} means nothing to loss {', '.join(names)}; "
            f"set it to 0, or take one of {', '.join(smoothed)}"
        )
    if "exo_pair" in names and dpo.label_smoothing == 0:
        yield (
            "dpo.label_smoothing: 0 makes loss exo_pair infinite; choose more than 0, as the "
            "paper's 1e-3"
        )


def _token_problems(dpo: DPOConfig) -> Iterator[str]:
    names = dpo.loss_names
    shown = ", ".join(names)
    if dpo.ld_alpha is not None and dpo.compares_means:
        yield (
            f"dpo.ld_alpha: {dpo.ld_alpha} is not for loss {shown}, which compares means over a "
            "response's tokens already; set it to null"
        )
    unweighted = [name for name in names if not PREFERENCE_LOSSES[name].takes_weights]
    if dpo.use_weighting and unweighted:
        able = [name for name, loss in PREFERENCE_LOSSES.items() if loss.takes_weights]
        yield (
            f"dpo.use_weighting: true is not defined for loss {', '.join(unweighted)}; set it to "
            f"false, or take losses of {', '.join(able)}"
        )
    if dpo.nll_scope == "sequence" and not dpo.compares_means:
        yield (
            f"dpo.nll_scope: sequence is for losses without a reference, not for {shown}: "
            "it needs a reference-free loss; use batch"
        )
    elif dpo.nll_scope != "response" and "orpo" not in names and not dpo.sft_loss_weight:
        yield (
            f"dpo.nll_scope: {dpo.nll_scope} means nothing to loss {shown} without "
            "dpo.sft_loss_weight; set it to response"
        )


def _unpaired_problems(job: JobConfig) -> Iterator[str]:
    kto = job.kto
    if kto.desirable_weight == kto.undesirable_weight == 0:
        yield ("kto.desirable_weight: 0, and kto.undesirable_weight too; set at least one above 0")
    if kto.estimates_kl and job.global_batch_size < 2:
        yield (
            "global_batch_size: 1 leaves no other response to estimate the KL divergence on; "
            "choose at least 2, or kto.loss_type=apo_zero_unpaired"
        )


def _mismatched_problems(job: JobConfig, plan: JobPlan) -> Iterator[str]:
    """Padded rows that cannot hold a prompt with another prompt's response."""
    if job.data.format == "packed" or job.packing.is_packed:
        return
    # Slots are rounded up so that tensor ranks can share them.
    unit = lcm(SLOT_MULTIPLE, *(context.plan.tensor for context in plan.contexts))
    row_tokens = job.packing.row_tokens
    longest = -(-job.data.max_length // unit) * unit
    if job.data.max_length <= row_tokens < longest:
        yield (
            f"packing.row_tokens: {row_tokens} cannot hold {longest} tokens, as long as prompts "
            f"with other responses may be (data.max_length={job.data.max_length}); raise it, or "
            "lower data.max_length"
        )


def _reference_problems(loss: ReferenceLossConfig) -> Iterator[str]:
    """References that follow the policy or are computed before training, and cannot."""
    if loss.sync_ref_model and not loss.uses_reference:
        yield (
            f"{loss.section}.sync_ref_model: true, but there is no reference to follow the policy; "
            "set it to false"
        )
    elif loss.precompute_ref_log_probs and loss.live_reason is not None:
        key = f"{loss.section}.precompute_ref_log_probs"
        yield f"{key}: true, but {loss.live_reason}; set it to false"


def _placement_problems(resolution: Resolution) -> Iterator[str]:
    placement, obstacle = resolution.config.placement.reference, None
    if placement == "time_shared":
        obstacle = resolution.idle_reference
    elif placement == "concurrent":
        obstacle = resolution.concurrency_obstacle
    if obstacle is not None:
        cure = "change that, or set it to auto"
        yield f"placement.reference: {placement}, but {obstacle}; {cure}"
