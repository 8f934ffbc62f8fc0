"""Block masks made from boundaries are, tensor for tensor, those of ``create_block_mask``."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention.flex import prepare
from puzzle_align.models.attention.mask import row_mask_mod
from tests.unit.row_strategies import layouts

CPU = torch.device("cpu")
TENSORS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]


def evaluated(layout: RowLayout) -> BlockMask:
    """The block mask that PyTorch finds by evaluating all S x S pairs."""
    num_tokens = layout.num_tokens
    mask_mod = row_mask_mod(layout, CPU)
    return create_block_mask(mask_mod, None, None, num_tokens, num_tokens, device="cpu")


def check(layout: RowLayout) -> None:
    built, expected = prepare(layout, CPU), evaluated(layout)
    for name in TENSORS:
        assert torch.equal(getattr(built, name), getattr(expected, name)), name
    assert built.seq_lengths == expected.seq_lengths
    assert built.shape == expected.shape
    assert built.BLOCK_SIZE == expected.BLOCK_SIZE


@settings(max_examples=20)
@given(layouts(max_segments=6))
def test_equals_the_evaluated_mask(layout: RowLayout) -> None:
    check(layout)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.sampled_from([-1, 0, 1]))
def test_equals_the_evaluated_mask_on_block_boundaries(blocks: list[int], shift: int) -> None:
    """Boundaries on multiples of 128, and one token off: where full and partial part."""
    prompt, *responses = (128 * count for count in blocks)
    segment = Segment(0, prompt + shift, tuple(responses))
    check(RowLayout(segment.end, (segment,)))
    check(RowLayout(segment.end + 128, (segment,)))


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 1000])
def test_all_padding_is_one_causal_run(num_tokens: int) -> None:
    check(RowLayout(num_tokens, ()))
