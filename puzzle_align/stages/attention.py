"""Choice of the attention backend, where the config leaves it to the machine."""

import logging

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Engine, Job
from puzzle_align.layout.attention import BACKENDS, AttentionBackend
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.models.attention import why_unavailable
from puzzle_align.models.attention.flash import use_flash_attention
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.planning.profiled_rows import ExampleSize, packed_row
from puzzle_align.runtime.groups.collectives import from_rank_zero, gather_everywhere
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.profiler import AttentionCase, fastest_attention
from puzzle_align.stages.outlook import microbatch_of, open_outlook

_logger = logging.getLogger(__name__)


def settle_attention(job: Job, world: World, kept: AttentionBackend | None = None) -> Job:
    """Settle a job's attention: under ``auto`` on CUDA, the fastest on this machine. Collective.

    Backends are measured on a row like the job's, with the heads of the first trained model. From
    now on, attention that uses flash kernels uses those that ``engine.flash_attention`` names.

    Args:
        kept: attention of the run that is resumed: used again, unmeasured, where it works.

    Raises:
        ValueError: one line, if no backend works, or the one in the config does not.
    """
    engine, asked = job.engine, job.config.engine.attention
    if engine.device != "cuda" or not (asked == "auto" or BACKENDS[asked].chooses_flash):
        return job
    flash = use_flash_attention(job.config.engine.flash_attention, world.device)
    chosen = engine.options.attention
    if asked == "auto":
        chosen = still_available(kept, engine, world) or _fastest(job, world)
    if not BACKENDS[chosen].computes_through_flash:  # else it was measured so
        use_flash_attention("fa2", world.device)
    if BACKENDS[chosen].chooses_flash and world.rank == 0:
        _logger.info("attention: %s's kernels are those of %s", chosen, flash)
    return job.with_attention(chosen)


def still_available(
    kept: AttentionBackend | None, engine: Engine, world: World
) -> AttentionBackend | None:
    """Return a resumed run's attention if it works on every rank; rank 0 logs it. Collective.

    Timings differ from start to start, and backends in rounding: with a new measurement a resumed
    run might give other numbers.
    """
    if kept is None:
        return None
    reasons = gather_everywhere(why_unavailable(kept, engine.device, engine.options.dtype))
    reason = next(filter(None, reasons), None)
    if world.rank == 0 and reason is None:
        _logger.info(
            "attention: using %s again, which the checkpoint's run used; set engine.attention for "
            "another",
            kept,
        )
    elif world.rank == 0:
        _logger.warning(
            "attention: the job was saved with %s, which does not work here (%s): measured anew",
            kept,
            reason,
        )
    return kept if reason is None else None


def _fastest(job: Job, world: World) -> AttentionBackend:
    example = from_rank_zero(lambda: open_outlook(job.config).example_size())
    engine = job.engine
    dtype = engine.options.dtype
    backends: list[AttentionBackend] = [
        name
        for name, backend in BACKENDS.items()
        if backend.is_candidate and why_unavailable(name, engine.device, dtype) is None
    ]
    fastest = fastest_attention(attention_case(job.config, job.plan, example), backends, world)
    torch.cuda.empty_cache()
    return fastest


def attention_case(config: JobConfig, plan: JobPlan, example: ExampleSize) -> AttentionCase:
    """Case to measure: a full row of examples, a tensor rank's share of the first trained model."""
    trained = next(context for context in plan.contexts if context.workload == "train")
    spec, tensor, layout = trained.model, trained.plan.tensor, config.packing.row_layout
    row = packed_row(config.packing.row_tokens, example, layout)
    return AttentionCase(
        layout=microbatch_of(row, layout, spec.vocab_size).layout,
        num_heads=spec.num_attention_heads // tensor,
        num_groups=spec.num_key_value_heads // tensor,
        head_dim=spec.head_dim,
        dtype=DTYPES[trained.options.dtype],
    )
