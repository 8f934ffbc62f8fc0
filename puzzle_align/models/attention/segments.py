"""Attention segment by segment: work and memory grow with the segments, not the row's square.

A prompt with its first response is a plain causal sequence. Every further response is a rectangle:
its queries attend to the keys of the prompt and of itself, causal with bottom-right alignment.
Padding is not computed (but see `prepare`): its output is zero.

Shapes: S tokens in a row, h query heads, g query groups (h a multiple of g), d channels a head;
L tokens in a piece, P in a prompt, y in a response.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzle_align.layout.rows import RowLayout, padding_spans
from puzzle_align.models.attention.mask import aligned, attend_masked


class PieceKind(Enum):
    """The kinds of pieces of a row."""

    FIRST = auto()  # a prompt and its first response
    BRANCH = auto()  # a further response, alone
    PADDING = auto()


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens for one call of attention."""

    kind: PieceKind
    length: int
    prompt_length: int  # of its segment; 0 for padding


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a row, in order, and the mask that its branches share."""

    pieces: tuple[Piece, ...]
    device: torch.device
    # By dtype, made on first use (see `_branch_mask`). SDPA needs the queries' dtype: another is an
    # error on CUDA, and may give wrong results on CPU.
    branch_masks: dict[torch.dtype, Tensor] = field(default_factory=dict)
    # On CUDA: aligned copies of windows by dtype and branch, shared by all layers.
    windows: dict[tuple[torch.dtype, Piece], Tensor] = field(default_factory=dict)

    def mask(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Additive mask [y, P + y] of a branch, a window of the shared mask; on the CPU a view."""
        if (dtype, piece) not in self.windows:
            window = self._window(piece, dtype)
            if not window.is_cuda:
                return window
            self.windows[dtype, piece] = aligned(window)
        return self.windows[dtype, piece]

    def _window(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        if dtype not in self.branch_masks:
            self.branch_masks[dtype] = _branch_mask(self.pieces, self.device, dtype)
        mask = self.branch_masks[dtype]
        rows, columns = mask.shape
        first_own_key = columns - rows
        return mask[
            : piece.length, first_own_key - piece.prompt_length : first_own_key + piece.length
        ]


def row_pieces(layout: RowLayout) -> tuple[Piece, ...]:
    """Cut a row into its segments' pieces ``prompt+y1, y2, ..., yK`` and padding, in order."""
    cuts: list[tuple[int, Piece]] = []
    for segment in layout.segments:
        (_, first_end), *branches = segment.response_spans()
        prompt_length = segment.prompt_length
        cuts.append(
            (segment.start, Piece(PieceKind.FIRST, first_end - segment.start, prompt_length))
        )
        for start, end in branches:
            cuts.append((start, Piece(PieceKind.BRANCH, end - start, prompt_length)))
    for start, end in padding_spans(layout):
        cuts.append((start, Piece(PieceKind.PADDING, end - start, 0)))
    return tuple(piece for _, piece in sorted(cuts, key=lambda cut: cut[0]))


def prepare(layout: RowLayout, device: torch.device) -> Pieces:
    """Make the row's pieces; masks are made when they are first used.

    In a row of padding alone the first token is computed, so that q, k and v, and the weights
    before them, get a gradient of zeros: data-parallel reduction waits for it.
    """
    if not layout.segments:
        rest = Piece(PieceKind.PADDING, layout.num_tokens - 1, 0)
        return Pieces((Piece(PieceKind.FIRST, 1, 1), rest), device)
    return Pieces(row_pieces(layout), device)


def _branch_mask(pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive mask [y, P + y] of the longest branch after the longest prompt.

    Column P is the first key of the branch itself, so that every branch's mask is a window
    around it. It is float because SDPA would convert a bool mask, and save it, in every layer.
    """
    branches = [piece for piece in pieces if piece.kind is PieceKind.BRANCH]
    rows = max(piece.length for piece in branches)
    prompt_length = max(piece.prompt_length for piece in branches)
    future = torch.ones(rows, prompt_length + rows, dtype=torch.bool, device=device)
    future = future.triu(prompt_length + 1)
    return torch.zeros(future.shape, dtype=dtype, device=device).masked_fill_(future, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float | None = None) -> Tensor:
    """q [1, h, S, d], k and v [1, g, S, d] -> [1, h, S, d]; zeros at padding beside segments.

    The row is split and concatenated once: in the backward, a slice per segment would allocate a
    row of zeros each.
    """
    lengths = [piece.length for piece in pieces.pieces]
    # Tokens first, as Megatron holds them: the pieces and their gradients are then contiguous.
    q_pieces, k_pieces, v_pieces = (x.permute(2, 0, 1, 3).split(lengths) for x in (q, k, v))
    outputs, prompt_k, prompt_v = [], k_pieces[0], v_pieces[0]
    for piece, q_piece, k_piece, v_piece in zip(
        pieces.pieces, q_pieces, k_pieces, v_pieces, strict=True
    ):
        if piece.kind is PieceKind.PADDING:
            outputs.append(torch.zeros_like(q_piece))
        elif piece.kind is PieceKind.FIRST:
            prompt_k, prompt_v = k_piece[: piece.prompt_length], v_piece[: piece.prompt_length]
            outputs.append(_sdpa(q_piece, k_piece, v_piece, None, scale))
        else:
            keys, values = torch.cat((prompt_k, k_piece)), torch.cat((prompt_v, v_piece))
            outputs.append(_sdpa(q_piece, keys, values, pieces.mask(piece, q.dtype), scale))
    return torch.cat(outputs).permute(1, 2, 0, 3)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """[L, 1, h, d] for q [L, 1, h, d] and k, v [P + L or L, 1, g, d]; causal without a mask."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if mask is None:
        grouped = q.size(1) != k.size(1)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, is_causal=True, scale=scale, enable_gqa=grouped
        )
    else:
        output = attend_masked(q, k, v, mask, scale)
    return output.permute(2, 0, 1, 3)
