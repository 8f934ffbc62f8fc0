"""FlexAttention over a row, its block mask built from the segments' boundaries.

A row's mask is a sum of rectangles and causal triangles that do not overlap (`_tiles`). The number
of visible pairs in every block follows from the numbers of each tile's tokens in each block, so the
mask is never evaluated token by token.

Shapes: S tokens in a row, n blocks of 128 tokens in it, t tiles, h query heads, g query groups,
d channels a head.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from puzzle_align.layout.rows import RowLayout, padding_spans
from puzzle_align.models.attention.mask import row_mask_mod
from puzzle_align.models.host_copy import copied

BLOCK_SIZE = 128


def prepare(layout: RowLayout, device: torch.device) -> BlockMask:
    """Make the row's BlockMask on ``device``, equal to that of ``create_block_mask``.

    Both directions are made on the host: ``BlockMask.from_kv_blocks`` would sort to get the second.
    """
    visible = _visible_pairs(layout)
    full = visible == BLOCK_SIZE**2
    partial = (visible > 0) & ~full
    kv_num_blocks, kv_indices = _ordered(partial, device)
    full_kv_num_blocks, full_kv_indices = _ordered(full, device)
    q_num_blocks, q_indices = _ordered(partial.T, device)
    full_q_num_blocks, full_q_indices = _ordered(full.T, device)
    return BlockMask(
        seq_lengths=(layout.num_tokens, layout.num_tokens),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=row_mask_mod(layout, device),
    )


def _visible_pairs(layout: RowLayout) -> np.ndarray:
    """Number of (query, key) pairs in every block that the mask allows, [n, n]."""
    num_blocks = -(-layout.num_tokens // BLOCK_SIZE)
    triangles, rectangles = _tiles(layout)
    spans = _tokens_in_blocks(triangles, num_blocks)
    queries = _tokens_in_blocks(rectangles[:, 0], num_blocks)
    keys = _tokens_in_blocks(rectangles[:, 1], num_blocks)
    # Off the diagonal a triangle's part of a block is a rectangle; on it, a triangle again.
    visible = np.tril(spans.T @ spans, -1) + queries.T @ keys
    visible[np.diag_indices(num_blocks)] += (spans * (spans + 1) / 2).sum(axis=0)
    return visible


def _tiles(layout: RowLayout) -> tuple[np.ndarray, np.ndarray]:
    """Triangles ``(start, end)`` [t, 2], rectangles ``((query...), (key...))`` spans [t, 2, 2]."""
    triangles, rectangles = padding_spans(layout), []
    for segment in layout.segments:
        prompt = (segment.start, segment.prompt_end)
        triangles.append(prompt)
        for response in segment.response_spans():
            triangles.append(response)
            rectangles.append((response, prompt))
    return np.array(triangles).reshape(-1, 2), np.array(rectangles, dtype=int).reshape(-1, 2, 2)


def _tokens_in_blocks(spans: np.ndarray, num_blocks: int) -> np.ndarray:
    """Tokens of every span [t, 2] in every block, [t, n]; float64, for BLAS, and exact."""
    starts = np.arange(num_blocks) * BLOCK_SIZE
    first = np.maximum(spans[:, :1], starts)
    last = np.minimum(spans[:, 1:], starts + BLOCK_SIZE)
    return np.maximum(last - first, 0).astype(np.float64)


def _ordered(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, n] and places [1, 1, n, n] of the true blocks in every line of bool [n, n].

    The places of false blocks follow, since FlexAttention wants every line to be a permutation.
    """
    counts = blocks.sum(axis=1, dtype=np.int32)
    places = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return copied(counts[None, None], device), copied(places[None, None], device)


@cache
def _compiled() -> Callable[..., Tensor]:
    # Static shapes: rows come in a few sizes, each with and without gradients, for policy and
    # reference. With fullgraph, running out of recompilations is an error and not a silent fall to
    # the eager path, which holds all S x S scores.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    scale: float | None = None,
    kernel_options: Any = None,
) -> Tensor:
    """q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d]; compiled on CUDA, else eager."""
    attention = _compiled() if q.is_cuda else flex_attention
    return attention(
        q,
        k,
        v,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
        kernel_options=kernel_options,
    )
