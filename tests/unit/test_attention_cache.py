"""Attention through the cache against attention over each whole sequence, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import prepare_attention
from puzzle_align.models.attention.cache import (
    CachedTokens,
    DecodeRow,
    KeyValueCache,
    PromptRow,
    decode_length,
    decode_mask,
)

CPU = torch.device("cpu")
FLOAT64 = 1e-12  # absolute: of averages of numbers of order one, each rounded to 1e-16
HEADS, GROUPS, CHANNELS = 6, 3, 8
SCALE = 0.3  # not the default 1/sqrt(d)
LAYER, NUM_LAYERS = 1, 2


class Sequence:
    """Queries, keys and values of a sequence, and what attention over all of it gives."""

    def __init__(self, length: int, generator: torch.Generator) -> None:
        def random(heads: int) -> Tensor:
            shape = (length, heads, CHANNELS)
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.q, self.k, self.v = random(HEADS), random(GROUPS), random(GROUPS)
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=SCALE, enable_gqa=True
        )
        self.expected = output[0].transpose(0, 1).flatten(1)


def row(parts: list[tuple[Sequence, slice]], num_tokens: int) -> list[Tensor]:
    """query, key and value [S, 1, heads, d] of parts of sequences; NaN in the padding."""
    tensors = []
    for name in ("q", "k", "v"):
        tokens = torch.cat([getattr(sequence, name)[part] for sequence, part in parts])
        padding = tokens.new_full((num_tokens - len(tokens), *tokens.shape[1:]), torch.nan)
        tensors.append(torch.cat([tokens, padding])[:, None])
    return tensors


def prompt(cache: KeyValueCache, sequences: list[Sequence], ends: list[int], first: int) -> None:
    """A prompt row for the slots from ``first`` on, with one token of padding."""
    segments, positions, slots, at = [], [], [], 0
    for slot, end in enumerate(ends, start=first):
        segments.append(Segment(at, end, (0,)))
        positions += range(end)
        slots += [slot] * end
        at += end
    cache.reserve(max(ends))
    plan = prepare_attention(RowLayout(at + 1, tuple(segments)), "segments", CPU)
    cached = CachedTokens(slice(at), torch.tensor(slots), torch.tensor(positions))
    parts = [(s, slice(end)) for s, end in zip(sequences, ends, strict=True)]
    query, key, value = row(parts, at + 1)
    output = PromptRow(cache, cached, plan).attend(LAYER, query, key, value, SCALE)
    expected = torch.cat([s.expected[part] for s, part in parts])
    torch.testing.assert_close(output[:at, 0], expected, rtol=0, atol=FLOAT64)
    assert len(output) == at + 1


def decode(cache: KeyValueCache, sequences: list[Sequence], places: list[int]) -> None:
    """One token of every sequence, with three tokens of padding."""
    positions, length = torch.tensor(places), decode_length(max(places) + 1)
    mask = decode_mask(positions, length, torch.float64)
    cache.reserve(length)
    cached = CachedTokens(slice(len(places)), torch.arange(len(places)), positions)
    parts = [(s, slice(place, place + 1)) for s, place in zip(sequences, places, strict=True)]
    query, key, value = row(parts, len(places) + 3)
    output = DecodeRow(cache, cached, mask).attend(LAYER, query, key, value, SCALE)
    tokens = [s.expected[part] for s, part in parts]
    expected = torch.cat([*tokens, torch.zeros(3, HEADS * CHANNELS, dtype=torch.float64)])
    torch.testing.assert_close(output[:, 0], expected, rtol=0, atol=FLOAT64)


def test_every_token_gets_what_its_whole_sequence_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (Sequence(40, generator) for _ in range(3))
    cache = KeyValueCache(NUM_LAYERS, (4, GROUPS, CHANNELS), 40, torch.float64, CPU)
    prompt(cache, [a, b], [5, 12], first=0)
    for step in range(3):
        decode(cache, [a, b], [5 + step, 12 + step])
    cache.copy(source=1, destination=0, length=15)  # a has ended, b takes its slot
    prompt(cache, [c], [3], first=1)
    for step in range(20):
        decode(cache, [b, c], [15 + step, 3 + step])
    assert not any(tensors[0].any() for tensors in (cache.keys, cache.values))  # the other layer


def test_room_grows_by_half_and_not_past_its_limit() -> None:
    cache = KeyValueCache(1, (2, 1, 4), 50, torch.float32, CPU)
    lengths = []
    for length in (10, 16, 17, 26, 50):
        cache.reserve(length)
        lengths.append(cache.length)
        assert cache.keys[0].shape == (2, 1, cache.length, 4)
    assert lengths == [16, 16, 24, 40, 56]
    with pytest.raises(AssertionError):
        cache.reserve(57)


@pytest.mark.parametrize("lengths", [[3, 9, 1], [8]])
def test_the_mask_ends_where_sequences_do(lengths: list[int]) -> None:
    length = decode_length(max(lengths))
    assert length == (16 if max(lengths) > 8 else 8)
    mask = decode_mask(torch.tensor(lengths) - 1, length, torch.float32)
    assert mask.shape == (len(lengths), 1, 1, length)
    assert torch.isfinite(mask).sum(-1).flatten().tolist() == lengths
    assert mask.nan_to_num(neginf=0.0).eq(0).all()
