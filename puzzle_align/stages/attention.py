"""Which attention a job computes with, where its config leaves that to the machine."""

import logging
from dataclasses import replace
from importlib import import_module
from typing import Any, get_args

import torch

from puzzle_align.config.job import JobConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.models.attention import use_flash_attention, why_unavailable
from puzzle_align.planning.profiled_rows import ExampleSize, packed_row
from puzzle_align.runtime.groups import World
from puzzle_align.runtime.profiler import AttentionCase, fastest_attention
from puzzle_align.runtime.reduce import from_rank_zero
from puzzle_align.stages.profiled import microbatch_of
from puzzle_align.stages.setup import Engine

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_logger = logging.getLogger(__name__)

# The first is what the numbers of the others are held against: it is torch's attention, piece by
# piece. Experimental kernels come last.
_ON_CUDA: tuple[AttentionBackend, ...] = ("segments", "flex", "varlen", "flex_flash")
assert {*_ON_CUDA, "dense"} == {*get_args(AttentionBackend)}


def settle_attention(config: JobConfig, engine: Engine, plan: JobPlan, world: World) -> Engine:
    """The engine with the attention that is the fastest here, if ``auto`` and on CUDA. Collective.

    It is measured on a row like the job's, with the heads of the first model that is trained. What
    ``engine.flash_attention`` asks for computes from now on, where it is used.

    Raises:
        ValueError: one line, if nothing works, or what is asked for does not.
    """
    asked = config.engine.attention
    if engine.device != "cuda" or asked not in ("auto", "varlen"):
        return engine
    flash = use_flash_attention(config.engine.flash_attention, world.device)
    if world.rank == 0:
        _logger.info("attention: varlen's kernels are those of %s", flash)
    if asked != "auto":
        return engine
    stage: Any = import_module(f"{STAGES[config.stage].package}.profiled")
    example: ExampleSize = from_rank_zero(lambda: stage.example_size(config))
    options = engine.options
    backends: list[AttentionBackend] = [
        name for name in _ON_CUDA if why_unavailable(name, engine.device, options.dtype) is None
    ]
    fastest = fastest_attention(attention_case(config, plan, example), backends, world)
    torch.cuda.empty_cache()
    if fastest not in ("varlen", "segments"):  # else it was measured so
        use_flash_attention("fa2", world.device)
    return replace(engine, options=replace(options, attention=fastest))


def attention_case(config: JobConfig, plan: JobPlan, example: ExampleSize) -> AttentionCase:
    """A full row of examples, and a tensor rank's share of the first trained model's layer."""
    trained = next(context for context in plan.contexts if context.workload == "train")
    spec, tensor, layout = trained.model, trained.plan.tensor, config.packing.row_layout
    row = packed_row(config.packing.row_tokens, example, layout)
    return AttentionCase(
        layout=microbatch_of(row, layout, spec.vocab_size).layout,
        num_heads=spec.num_attention_heads // tensor,
        num_groups=spec.num_key_value_heads // tensor,
        head_dim=spec.head_dim,
        dtype=_DTYPES[trained.options.dtype],
    )
