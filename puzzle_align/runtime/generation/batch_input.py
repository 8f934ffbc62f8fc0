"""Batches of generation on the device, in the form that every chunk of the pipeline reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from puzzle_align.layout.rows import RowLayout, Segment, position_ids
from puzzle_align.models.attention import (
    AttentionPlan,
    CachedTokens,
    CacheRow,
    DecodeRow,
    KeyValueCache,
    PromptRow,
    decode_mask,
    prepare_attention,
)
from puzzle_align.models.build import Predictions
from puzzle_align.models.host_copy import copied
from puzzle_align.schedules.generation import GenerationBatch


@dataclass(frozen=True)
class BatchInput:
    """One row of S tokens that predicts the next token of every sequence of the batch."""

    tokens: torch.Tensor  # int64 [1, S]
    position_ids: torch.Tensor  # int64 [1, S]
    predictions: Predictions
    cached: CachedTokens
    within: AttentionPlan | None  # for a row of prompts; None: a decode row attends to the cache
    cache_length: int  # tokens of a slot that the cache must hold, and a decode row reads

    @property
    def num_tokens(self) -> int:
        """Number S of tokens."""
        return self.tokens.size(1)

    def cache_row(self, cache: KeyValueCache) -> CacheRow:
        """Make the attention's input for the chunk with this cache, which must have room."""
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
    """Make a prefill batch of its sequences' prompts, padded to a multiple of ``multiple`` tokens.

    A prompt that sequences share is computed once.
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
