"""KV cache of generation, and attention over it.

A prompt row has whole prompts: they attend within the row, and their keys and values are written to
the cache. A decode row has one new token of every sequence of a batch, which attends to its
sequence in the cache. The batch reads the cache's first slots up to the longest sequence, as views:
no step copies the cache.

Shapes: S tokens in a row, maybe with padding at its end; B sequences in the batch, L tokens of the
longest; h query heads, g query groups, d channels a head, on this tensor rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from puzzle_align.models.attention import AttentionPlan, attend

_LENGTH_MULTIPLE = 8


class KeyValueCache:
    """Keys and values ``[slots, g, length, d]`` of every layer of one chunk."""

    def __init__(
        self,
        num_layers: int,
        shape: tuple[int, int, int],
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make a cache without room for any token yet.

        Args:
            shape: slots, query groups of this tensor rank, channels a head.
            max_length: most tokens of a slot.
        """
        slots, groups, channels = shape
        self.length = 0
        self.max_length = decode_length(max_length)
        self.dtype = dtype
        self.keys = [
            torch.empty(slots, groups, 0, channels, dtype=dtype, device=device)
            for _ in range(num_layers)
        ]
        self.values = [keys.clone() for keys in self.keys]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens a slot, keeping the content.

        The cache grows by at least half, so that there are few copies.
        """
        if length <= self.length:
            return
        grown = min(decode_length(max(length, self.length * 3 // 2)), self.max_length)
        assert grown >= length, "more than max_length tokens in a slot"
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                slots, groups, _, channels = old.shape
                new = tensors[layer] = old.new_empty(slots, groups, grown, channels)
                new[:, :, : self.length] = old
                # Masked values are multiplied by 0, and so must not be NaN.
                new[:, :, self.length :] = 0
        self.length = grown

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of slot ``source`` to slot ``destination``."""
        for tensor in (*self.keys, *self.values):
            tensor[destination, :, :length] = tensor[source, :, :length]


@dataclass(frozen=True)
class CachedTokens:
    """The N tokens of a row to write to the cache, and their places there.

    A prompt of several sequences is written to the slots of all; padding is not written.
    """

    sources: Tensor | slice  # int64 [N], places in the row
    slots: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]

    def write(self, cache: KeyValueCache, layer: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's key and value [S, 1, g, d] to the cache."""
        cache.keys[layer][self.slots, :, self.positions] = key[self.sources, 0]
        cache.values[layer][self.slots, :, self.positions] = value[self.sources, 0]


@dataclass(frozen=True)
class PromptRow:
    """A row of prompts that fill slots of the cache."""

    cache: KeyValueCache
    tokens: CachedTokens
    within: AttentionPlan

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """query [S, 1, h, d], key and value [S, 1, g, d] -> [S, 1, h * d]."""
        self.tokens.write(self.cache, layer, key, value)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return attend(q, k, v, self.within, scale).permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True)
class DecodeRow:
    """A row of one token a sequence, of the sequences in slots 0 to B - 1."""

    cache: KeyValueCache
    tokens: CachedTokens
    mask: Tensor  # additive [B, 1, 1, L] in the model's dtype

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """query [S, 1, h, d], key and value [S, 1, g, d] -> [S, 1, h * d]; padding gets zeros.

        The queries of a group take SDPA's dimension of tokens, since they attend to the same keys:
        keys are read once, without copies for the heads of a group.
        """
        self.tokens.write(self.cache, layer, key, value)
        num_sequences, length = self.mask.size(0), self.mask.size(-1)
        num_tokens, _, num_heads, channels = query.shape
        num_groups = key.size(2)
        q = query[:num_sequences].reshape(num_sequences, num_groups, -1, channels)
        k = self.cache.keys[layer][:num_sequences, :, :length]
        v = self.cache.values[layer][:num_sequences, :, :length]
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=scale)
        output = output.reshape(num_sequences, 1, num_heads * channels)
        if num_tokens == num_sequences:
            return output
        return F.pad(output, (0, 0, 0, 0, 0, num_tokens - num_sequences))


CacheRow = PromptRow | DecodeRow


def decode_mask(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, 1, L]: new tokens attend to all tokens up to their own positions.

    Args:
        positions: int64 [B], of the new tokens in their sequences.
        length: L, at least ``decode_length`` of the longest sequence.
    """
    hidden = torch.arange(length, device=positions.device) > positions[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None, None]


def decode_length(length: int) -> int:
    """Round a slot's tokens up to a multiple of 8: else CUDA kernels would copy mask and keys."""
    return -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
