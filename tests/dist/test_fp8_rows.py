"""Which rows a chunk computes in FP8, and when it has the weights' FP8 copies made anew.

Without Transformer Engine, Megatron computes what is asked to be in FP8 as it is: the flags that
its layers would read are seen all the same.
"""

from typing import Any

import torch

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import AttentionPlan, prepare_attention
from puzzle_align.models.attention.cache import CachedTokens, DecodeRow, KeyValueCache, decode_mask
from puzzle_align.runtime.groups.world import World
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import LLAMA

CPU = torch.device("cpu")


def test_copies_are_made_once_for_weights_as_they_are():
    run_ranks(_check_copies, 1, timeout=120.0)


def _check_copies(rank: int, world_size: int) -> None:
    world = World(rank, world_size, CPU)
    context = random_context(LLAMA, ParallelPlan(), world, seed=1, fp8="hybrid")
    (chunk,) = context.chunks
    optimizer = trainable(context, OptimizerConfig(lr=1e-3))
    layer: Any = chunk.decoder.layers[0].mlp.linear_fc1
    layer.is_first_microbatch = False  # as Transformer Engine's layers leave it
    seen: list[tuple[bool, str | None]] = []
    layer.register_forward_pre_hook(
        lambda module, _: seen.append((module.is_first_microbatch, module.config.fp8))
    )

    def run(num_tokens: int, generates: bool = False) -> tuple[bool, str | None]:
        chunk.row_state.current = _decode_row() if generates else _row(num_tokens)
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
        output = chunk(tokens, torch.arange(num_tokens)[None])
        if not generates:
            output.sum().backward()
        layer.is_first_microbatch = False
        assert chunk.config.fp8 == "hybrid"
        return seen.pop()

    # Rows of generation, and of odd lengths, neither make copies nor take the first one's place.
    assert run(3, generates=True) == (False, None)
    assert run(24) == (False, None)
    assert run(32) == (True, "hybrid")
    assert run(32) == (False, "hybrid")
    optimizer.reduce_gradients()
    assert optimizer.step(1e-3)[0]
    assert run(3, generates=True) == (False, None)
    assert run(32) == (True, "hybrid")
    assert run(32) == (False, "hybrid")
    chunk.load_state_dict(chunk.state_dict())
    assert run(32) == (True, "hybrid")


def _row(num_tokens: int) -> AttentionPlan:
    return prepare_attention(RowLayout(num_tokens, (Segment(0, 10, (8,)),)), "segments", CPU)


def _decode_row() -> DecodeRow:
    """A token for each of three empty sequences."""
    groups, channels = LLAMA.num_key_value_heads, LLAMA.head_dim
    cache = KeyValueCache(LLAMA.num_hidden_layers, (3, groups, channels), 8, torch.float32, CPU)
    cache.reserve(8)
    places = torch.arange(3)
    mask = decode_mask(torch.zeros_like(places), 8, torch.float32)
    return DecodeRow(cache, CachedTokens(slice(3), places, torch.zeros_like(places)), mask)
