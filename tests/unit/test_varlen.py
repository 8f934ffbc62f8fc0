"""The sequences of a row: every query's keys, and gradients of prompts that are there K times."""

import numpy as np
import pytest
import torch
from hypothesis import given

from puzzle_align.layout.rows import RowLayout, Segment, membership
from puzzle_align.models.attention.mask import dense_mask
from puzzle_align.models.attention.varlen import (
    Copies,
    Sequences,
    _flash_attention,
    _Gathered,
    flash_call,
    prepare,
)
from tests.unit.row_strategies import layouts

CPU = torch.device("cpu")
GROUP = RowLayout(300, (Segment(0, 20, (3, 1, 7, 2, 30)), Segment(90, 64, (5, 5))))
THREE = RowLayout(90, (Segment(0, 64, (3, 1, 7)),))


def keys_of(sequences: Sequences) -> np.ndarray:
    """bool [S, S]: which of the row's keys each query sees."""
    num_tokens = sum(sequences.query_lengths)
    sources = np.arange(num_tokens)
    if sequences.copies is not None:
        sources = sequences.copies.sources.numpy()
    seen = np.zeros((num_tokens, num_tokens), dtype=bool)
    query_bounds, key_bounds = sequences.query_bounds.tolist(), sequences.key_bounds.tolist()
    for number, first in enumerate(query_bounds[:-1]):
        keys = sources[key_bounds[number] : key_bounds[number + 1]]
        num_before = len(keys) - sequences.query_lengths[number]
        for place in range(sequences.query_lengths[number]):
            seen[first + place, keys[: num_before + place + 1]] = True
    return seen


@given(layouts(max_segments=3))
def test_queries_see_what_the_mask_says(layout: RowLayout) -> None:
    sequences = prepare(layout, CPU)
    used = membership(layout)[0] < len(layout.segments)
    seen = keys_of(sequences)
    assert (seen[used] == dense_mask(layout, CPU).numpy()[used]).all()
    # Padding sees itself, and nothing of a segment.
    assert seen.diagonal().all() and not seen[np.ix_(~used, used)].any()
    lengths = np.array(sequences.query_lengths)
    assert lengths.min() > 0 and lengths.sum() == layout.num_tokens
    assert sequences.query_bounds.dtype == sequences.key_bounds.dtype == torch.int32
    assert np.diff(sequences.query_bounds.numpy()).tolist() == lengths.tolist()
    assert np.diff(sequences.key_bounds.numpy()).tolist() == list(sequences.key_lengths)


@given(layouts())
def test_every_copy_gives_its_gradient_once(layout: RowLayout) -> None:
    copies = prepare(layout, CPU).copies
    most = max((len(s.response_lengths) for s in layout.segments if s.prompt_length), default=1)
    assert (copies is None) == (most == 1)
    if copies is None:
        return
    assert len(copies.repeated) == most - 1
    assert copies.sources[copies.in_own_sequence].tolist() == list(range(layout.num_tokens))
    read = [copies.in_own_sequence]
    for places, repeated in copies.repeated:
        assert places.unique().numel() == places.numel(), "their order would tell"
        assert torch.equal(copies.sources[repeated], places)
        read.append(repeated)
    assert sorted(torch.cat(read).tolist()) == list(range(len(copies.sources)))


def test_long_padding_is_cut() -> None:
    sequences = prepare(RowLayout(1000, (Segment(300, 10, (5,)),)), CPU)
    assert sequences.query_lengths == (128, 128, 44, 15, *[128] * 5, 45)
    assert sequences.key_lengths == sequences.query_lengths and sequences.copies is None


def test_a_response_of_no_tokens_has_no_sequence() -> None:
    layout = RowLayout(12, (Segment(0, 5, (3, 0, 4)),))
    sequences = prepare(layout, CPU)
    assert (sequences.query_lengths, sequences.key_lengths) == ((8, 4), (8, 9))
    assert (keys_of(sequences) == dense_mask(layout, CPU).numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [THREE, GROUP])
def test_gradients_of_a_prompt_are_rounded_once(group: RowLayout, dtype: torch.dtype) -> None:
    """However many responses it has: three, and five."""
    copies = prepare(group, CPU).copies
    assert isinstance(copies, Copies)
    generator = torch.Generator().manual_seed(0)
    gathered = torch.randn(len(copies.sources), 2, 8, generator=generator, dtype=torch.float64)
    gathered = gathered.to(dtype)
    x = torch.zeros(group.num_tokens, 2, 8, dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(_Gathered.apply(x, copies), x, gathered)
    exact = torch.zeros(x.shape, dtype=torch.float64)
    exact.index_add_(0, copies.sources, gathered.double())
    assert found.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(found, exact.to(dtype))
    else:
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_torch_takes_the_call() -> None:
    """Arguments and shapes, by torch's own shape rule: the kernel itself is CUDA's."""
    sequences = prepare(GROUP, torch.device("meta"))
    assert sequences.copies is not None
    num_keys = len(sequences.copies.sources)
    q, k, v = (
        torch.empty(length, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for length, heads in ((GROUP.num_tokens, 8), (num_keys, 2), (num_keys, 2))
    )
    output = _flash_attention(q, k, v, sequences, 0.5)
    assert (output.shape, output.dtype) == (q.shape, q.dtype)
    gradients = torch.autograd.grad(output.sum(), (q, k, v))
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert flash_call() is flash_call()
