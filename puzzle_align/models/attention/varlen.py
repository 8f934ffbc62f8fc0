"""Attention over a row as one variable-length call: without a mask, without compilation.

The queries' sequences are the row's pieces, in place. The keys of a further response are its
prompt's and its own, causal with bottom-right alignment. So a prompt's keys and values are gathered
once for every response, and their gradient is the sum over these copies. It is added copy by copy,
always in the same order: one scatter would add in any order on CUDA, and runs would not repeat.

Padding attends to the padding before it, in short pieces that cost little.

On CUDA the call is torch's variable-length FlashAttention, in bf16 only; its backward adds the
gradients of queries in any order, unless ``torch.use_deterministic_algorithms`` is on and not
``warn_only``. On CPU each sequence is a separate call.

Shapes: S tokens in a row, N sequences, G gathered keys, with prompts repeated for every response, h
query heads, g query groups (h a multiple of g), d channels a head.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from puzzle_align.layout.rows import RowLayout
from puzzle_align.models.attention.segments import PieceKind, row_pieces
from puzzle_align.models.host_copy import copied

_PADDING_LENGTH = 128  # longest sequence of padding: the smallest block that kernels compute


@dataclass(frozen=True, slots=True)
class Copies:
    """Indices of the gathered keys and of their gradients' destinations, int32."""

    sources: Tensor  # [G], places in the row
    in_own_sequence: Tensor  # [S], every row token's copy in its own sequence
    # For the second, third, ... responses of all prompts: the prompts' places in the row, and the
    # places of their copies. Places in a tensor are distinct.
    repeated: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one row."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    query_bounds: Tensor  # int32 [N + 1], where sequences start and end
    key_bounds: Tensor  # int32 [N + 1]
    copies: Copies | None  # None if no prompt has a second response: keys are not gathered


def prepare(layout: RowLayout, device: torch.device) -> Sequences:
    """Make the row's sequences, with a single copy to ``device``."""
    starts, lengths, prompts = _pieces(layout)
    keys = lengths + prompts[:, 1] - prompts[:, 0]
    bounds = [np.concatenate(([0], np.cumsum(number))) for number in (lengths, keys)]
    arrays, is_gathered = list(bounds), keys.sum() > lengths.sum()
    if is_gathered:
        arrays += _copies(starts, lengths, prompts, first_keys=bounds[1][:-1])
    held = copied(np.concatenate(arrays).astype(np.int32), device)
    query_bounds, key_bounds, *copies = held.split([len(array) for array in arrays])
    gathered = None
    if is_gathered:
        sources, in_own_sequence, *repeated = copies
        pairs = zip(repeated[::2], repeated[1::2], strict=True)
        gathered = Copies(sources, in_own_sequence, tuple(pairs))
    return Sequences(
        tuple(lengths.tolist()), tuple(keys.tolist()), query_bounds, key_bounds, gathered
    )


def _pieces(layout: RowLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and length [N] of every sequence; bounds [N, 2] of its prompt if that is elsewhere."""
    lengths, prompts, at, prompt = [], [], 0, (0, 0)
    for piece in row_pieces(layout):
        if piece.kind is PieceKind.FIRST:
            prompt = (at, at + piece.prompt_length)
        longest = _PADDING_LENGTH if piece.kind is PieceKind.PADDING else piece.length
        # A response of no tokens has no sequence.
        starts = range(0, piece.length, max(1, longest))
        parts = [min(longest, piece.length - start) for start in starts]
        lengths += parts
        prompts += [prompt if piece.kind is PieceKind.BRANCH else (0, 0)] * len(parts)
        at += piece.length
    ends = np.cumsum(lengths)
    return ends - lengths, np.array(lengths), np.array(prompts)


def _copies(
    starts: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, first_keys: np.ndarray
) -> list[np.ndarray]:
    """Indices for ``Copies``, flattened; ``first_keys`` [N] are sequences' first gathered keys."""
    sources: list[np.ndarray] = []
    repeated: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
    number = 0  # of further responses of this prompt
    for start, length, (first, last), first_key in zip(
        starts, lengths, prompts, first_keys, strict=True
    ):
        prompt = np.arange(first, last)
        sources += [prompt, np.arange(start, start + length)]
        number = number + 1 if len(prompt) else 0
        if number > len(repeated):
            repeated.append(([], []))
        if number:
            places, copies = repeated[number - 1]
            places.append(prompt)
            copies.append(np.arange(first_key, first_key + len(prompt)))
    prompt_lengths = prompts[:, 1] - prompts[:, 0]
    shifts = np.repeat(first_keys + prompt_lengths - starts, lengths)
    rounds = [np.concatenate(part) for both in repeated for part in both]
    return [np.concatenate(sources), np.arange(lengths.sum()) + shifts, *rounds]


def attend(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float | None = None
) -> Tensor:
    """q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d]."""
    q, k, v = (x.permute(2, 0, 1, 3).squeeze(1) for x in (q, k, v))
    if sequences.copies is not None:
        k, v = (_Gathered.apply(x, sequences.copies) for x in (k, v))
    call = _flash_attention if q.is_cuda else _each_alone
    return call(q, k, v, sequences, scale).unsqueeze(1).permute(1, 2, 0, 3)


class _Gathered(torch.autograd.Function):
    """Gathering of keys or values [S, g, d] -> [G, g, d], with a deterministic backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x.index_select(0, copies.sources)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        copies: Copies = ctx.copies
        total = gradient.index_select(0, copies.in_own_sequence)
        if len(copies.repeated) > 1:  # a single addition rounds once, in any precision
            total = total.to(torch.promote_types(total.dtype, torch.float32))
        for places, repeated in copies.repeated:
            total.index_add_(0, places, gradient.index_select(0, repeated).to(total.dtype))
        return total.to(gradient.dtype), None


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """q [S, h, d], k and v [G or S, g, d] -> [S, h, d]."""
    return flash_call()(
        q,
        k,
        v,
        sequences.query_bounds,
        sequences.key_bounds,
        max(sequences.query_lengths),
        max(sequences.key_lengths),
        scale=scale,
        window_size=(-1, 0),  # causal, with bottom-right alignment
    )


@cache
def flash_call() -> Callable[..., Any]:
    """``varlen_attn`` of the installed torch (2.11 or later), with grouped queries."""
    from torch.nn.attention.varlen import varlen_attn

    # Torch 2.11 accepts grouped queries without this argument.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def _each_alone(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """Compute the same as ``_flash_attention`` by a call for each sequence."""
    outputs = [
        _causal(q_i, k_i, v_i, scale)
        for q_i, k_i, v_i in zip(
            q.split(sequences.query_lengths),
            k.split(sequences.key_lengths),
            v.split(sequences.key_lengths),
            strict=True,
        )
    ]
    return torch.cat(outputs)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """q [L, h, d], k and v [M, g, d], M >= L -> [L, h, d]: the last query attends to all keys."""
    num_before, mask = k.size(0) - q.size(0), None
    if num_before:
        mask = q.new_ones(q.size(0), k.size(0), dtype=torch.bool).tril(num_before)
    output = F.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.size(1) != k.size(1),
    )
    return output.squeeze(0).transpose(0, 1)
