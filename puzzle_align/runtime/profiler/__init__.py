"""Measurements of a model's shard and of links on the job's ranks; callers choose the cases."""

from puzzle_align.runtime.profiler.attention import AttentionCase, fastest_attention
from puzzle_align.runtime.profiler.generation import (
    GenerationCase,
    decode_context,
    last_length,
    measure_decode,
    measure_prefill,
)
from puzzle_align.runtime.profiler.links import LinkMeter, nccl_version
from puzzle_align.runtime.profiler.rows import RowCase, kept_layer_bytes, measure_row
from puzzle_align.runtime.profiler.shards import ShardSpec, measure_step, open_shard
from puzzle_align.runtime.profiler.timing import Samples

__all__ = [
    "AttentionCase",
    "GenerationCase",
    "LinkMeter",
    "RowCase",
    "Samples",
    "ShardSpec",
    "decode_context",
    "fastest_attention",
    "kept_layer_bytes",
    "last_length",
    "measure_decode",
    "measure_prefill",
    "measure_row",
    "measure_step",
    "nccl_version",
    "open_shard",
]
