"""Generation batches on the device, as input of every chunk of the pipeline.

Inputs and outputs of a slot group's decode batches are at fixed addresses. A batch's last tokens
and positions are copied there once; every step reads them, writes its outcome and advances them.
The host builds and reads nothing until the batch's last step is done.

Shapes: R rows of the group's tensors, its capacity rounded up; B sequences of a batch, S tokens of
its row, B <= S <= R.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from puzzle_align.layout.rows import RowLayout, Segment, position_ids
from puzzle_align.models.attention import AttentionPlan, prepare_attention
from puzzle_align.models.attention.cache import (
    CachedTokens,
    CacheRow,
    DecodeRow,
    KeyValueCache,
    PromptRow,
    decode_mask,
)
from puzzle_align.models.host_copy import copied
from puzzle_align.models.inputs import Predictions
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.sampling import Draws
from puzzle_align.schedules.generation import GenerationBatch


@dataclass(frozen=True)
class BatchInput:
    """Row of S tokens that predicts the next token of every sequence of a batch."""

    tokens: torch.Tensor  # int64 [1, S]
    position_ids: torch.Tensor  # int64 [1, S]
    predictions: Predictions
    cached: CachedTokens
    within: AttentionPlan | None  # for a row of prompts; None: a decode row attends to the cache
    cache_length: int  # tokens that each cache slot must hold; a decode row reads all of them

    @property
    def num_tokens(self) -> int:
        """Number of tokens, S."""
        return self.tokens.size(1)

    def cache_row(self, cache: KeyValueCache) -> CacheRow:
        """Make the attention input of the chunk with this cache, which must have room."""
        if self.within is not None:
            return PromptRow(cache, self.cached, self.within)
        mask = decode_mask(self.cached.positions, self.cache_length, cache.dtype)
        return DecodeRow(cache, self.cached, mask)


def number_prompts(prompts: Sequence[np.ndarray]) -> list[int]:
    """Number the prompts from 0; equal neighbours share a number."""
    numbers: list[int] = []
    for place, prompt in enumerate(prompts):
        same = place > 0 and np.array_equal(prompt, prompts[place - 1])
        numbers.append(numbers[-1] + (not same) if numbers else 0)
    return numbers


def prefill_input(
    batch: GenerationBatch, prompts: Sequence[np.ndarray], multiple: int, device: torch.device
) -> BatchInput:
    """Make a prefill batch's row from its sequences' prompts, padded to a multiple of ``multiple``.

    Equal neighbouring prompts are computed once.
    """
    prompt_of = np.array(number_prompts(prompts))
    firsts = np.unique(prompt_of, return_index=True)[1]
    lengths = np.array([len(prompts[first]) for first in firsts])
    ends = lengths.cumsum()
    num_tokens = int(ends[-1])
    size = -(-num_tokens // multiple) * multiple
    spans = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
    layout = RowLayout(size, tuple(Segment(start, end - start, (0,)) for start, end in spans))
    positions = position_ids(layout)
    tokens = np.zeros(size, dtype=np.int64)
    tokens[:num_tokens] = np.concatenate([prompts[first] for first in firsts])
    sources = np.concatenate([np.arange(*spans[prompt]) for prompt in prompt_of])
    slots = np.repeat(np.arange(len(prompts)) + batch.first_slot, lengths[prompt_of])
    return BatchInput(
        tokens=copied(tokens, device)[None],
        position_ids=copied(positions, device)[None],
        predictions=Predictions(copied(ends[prompt_of] - 1, device), None),
        cached=CachedTokens(
            copied(sources, device), copied(slots, device), copied(positions[sources], device)
        ),
        within=prepare_attention(layout, "segments", device),
        cache_length=int(lengths.max()),
    )


class DecodeState:
    """Tensors of one slot group on this rank.

    ``outcome``, int64 [2, R], holds a step's tokens and the bits of their log-probabilities;
    ``outcomes`` [num_steps, 2, R] holds every step's outcome, which the last pipeline rank
    broadcasts and the host fetches. A prefill batch has one step.
    """

    def __init__(self, context: Context, capacity: int, multiple: int, num_steps: int) -> None:
        """Allocate for ``capacity`` slots, with rows of a multiple of ``multiple`` tokens."""
        device = context.device
        rows = -(-capacity // multiple) * multiple
        self._tokens, self._positions = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._slots = torch.arange(rows, device=device)
        self._numbers = torch.zeros(rows, dtype=torch.float64, device=device)
        self._too_short = torch.zeros(rows, dtype=torch.bool, device=device)
        self.outcome = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.outcomes = torch.zeros(num_steps, 2, rows, dtype=torch.int64, device=device)
        shape = context.activation_shape(rows)

        def hidden() -> torch.Tensor:
            return torch.zeros(shape, dtype=context.dtype, device=device)

        self._received = [None if chunk.is_first else hidden() for chunk in context.chunks]
        self._sent = [None if chunk.is_last else hidden() for chunk in context.chunks]

    def begin(self, last_tokens: Sequence[int], cached: Sequence[int], num_tokens: int) -> None:
        """Begin a batch: set its sequences' last tokens, each after ``cached`` tokens.

        The row's padding to ``num_tokens`` is token 0 at position 0 in every step.
        """
        row = np.zeros((2, num_tokens), dtype=np.int64)
        row[:, : len(cached)] = last_tokens, cached
        tokens, positions = copied(row, self._tokens.device)
        self._tokens[:num_tokens].copy_(tokens)
        self._positions[:num_tokens].copy_(positions)

    def advance(self, num_sequences: int, step: int) -> None:
        """Advance to the step after ``step``, whose outcome is complete."""
        self._tokens[:num_sequences].copy_(self.outcomes[step, 0, :num_sequences])
        self._positions[:num_sequences].add_(1)

    def row(self, num_sequences: int, num_tokens: int, length: int) -> BatchInput:
        """Make the row of a step, S = ``num_tokens``, which reads ``length`` tokens of each slot.

        Tokens beyond ``num_sequences`` are padding, and not cached.
        """
        slots, positions = self._slots[:num_sequences], self._positions[:num_tokens]
        return BatchInput(
            tokens=self._tokens[:num_tokens][None],
            position_ids=positions[None],
            predictions=Predictions(slots, None),
            cached=CachedTokens(slice(num_sequences), slots, positions[:num_sequences]),
            within=None,
            cache_length=length,
        )

    def received(self, chunk: int, shape: Sequence[int]) -> torch.Tensor:
        """Return the buffer for a chunk's received hidden states."""
        return _first(self._received[chunk], shape)

    def sent(self, chunk: int, shape: Sequence[int]) -> torch.Tensor:
        """Return the buffer for a chunk's sent hidden states."""
        return _first(self._sent[chunk], shape)

    def draws(self, draws: Draws, num_sequences: int) -> Draws:
        """Copy a step's draws into fixed tensors, padded up to ``num_sequences``."""
        numbers = too_short = None
        if draws.numbers is not None:
            numbers = self._numbers[:num_sequences]
            numbers[: len(draws.numbers)].copy_(draws.numbers)
        if draws.too_short is not None:
            too_short = self._too_short[:num_sequences]
            too_short[: len(draws.too_short)].copy_(draws.too_short)
        return Draws(numbers, too_short)


def _first(buffer: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    assert buffer is not None, "the chunk has no neighbour on this side"
    return buffer[: shape[0]]
