"""Backends agree with each other and with every sequence attended alone, in float64 to 1e-10."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from puzzle_align.layout.attention import BACKENDS, AttentionBackend
from puzzle_align.layout.rows import RowLayout, Segment, membership
from puzzle_align.models.attention import attend, prepare_attention
from puzzle_align.models.attention.mask import aligned, dense_mask
from tests.bounds import fp32_bound
from tests.unit.row_strategies import layouts

CPU = torch.device("cpu")
HEAD_DIM = 8
TRAINED_ON_CPU = tuple(name for name, backend in BACKENDS.items() if backend.trains_on_cpu)
FLOAT64 = 1e-10  # absolute: of sums of up to a hundred tokens' numbers, each rounded to 1e-16
QKV = tuple[Tensor, Tensor, Tensor]
SCALE = 0.3  # not the default 1/sqrt(d)
ROWS = {
    "one response": RowLayout(40, (Segment(0, 7, (9,)), Segment(16, 1, (20,)))),
    "pairs": RowLayout(60, (Segment(0, 7, (9, 5)), Segment(21, 4, (1, 30)))),
    "groups": RowLayout(64, (Segment(0, 11, (3, 8, 2)), Segment(24, 5, (9, 1, 20)))),
    "padded slots": RowLayout(96, tuple(Segment(32 * i, 9, (1 + 11 * i,)) for i in range(3))),
    "single tokens": RowLayout(7, (Segment(0, 1, (1, 1)), Segment(4, 1, (1,)))),
    "padding alone": RowLayout(33, ()),
    "full to the last token": RowLayout(8, (Segment(0, 4, (2, 2)),)),
}


def random_qkv(num_tokens: int, heads: int, groups: int) -> QKV:
    """q, k, v float64 [1, heads, S, d], as views of what Megatron holds ([S, 1, heads, d])."""
    generator = torch.Generator().manual_seed(0)

    def draw(num_heads: int) -> Tensor:
        shape = (num_tokens, 1, num_heads, HEAD_DIM)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.permute(1, 2, 0, 3).requires_grad_()

    return draw(heads), draw(groups), draw(groups)


def attend_alone(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
    """Every prompt with every response as a sequence of its own; zeros on padding."""
    output = torch.zeros_like(q)
    for segment in layout.segments:
        prompt = torch.arange(segment.start, segment.prompt_end)
        for start, end in segment.response_spans():
            index = torch.cat((prompt, torch.arange(start, end)))
            q_i, k_i, v_i = (x[:, :, index] for x in (q, k, v))
            repeats = q.size(1) // k.size(1)
            k_i, v_i = (x.repeat_interleave(repeats, dim=1) for x in (k_i, v_i))
            alone = F.scaled_dot_product_attention(q_i, k_i, v_i, is_causal=True, scale=SCALE)
            output = output.index_copy(2, index, alone)
    return output


def used_tokens(layout: RowLayout) -> Tensor:
    """bool [S], False on padding."""
    return torch.from_numpy(membership(layout)[0] < len(layout.segments))


def output_and_gradients(output: Tensor, inputs: QKV, layout: RowLayout) -> list[Tensor]:
    """The output on real tokens, and the gradients of a loss that reads real tokens only."""
    used = used_tokens(layout)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    assert output.isfinite().all()
    real = output[:, :, used]
    gradients = torch.autograd.grad((real * cotangent[:, :, used]).sum(), inputs)
    return [real, *gradients]


def check_against_sequences_alone(
    layout: RowLayout, backend: AttentionBackend, heads: int, groups: int
) -> None:
    q, k, v = random_qkv(layout.num_tokens, heads, groups)
    if not layout.segments:
        assert attend(q, k, v, prepare_attention(layout, backend, CPU)).isfinite().all()
        return
    expected = output_and_gradients(attend_alone(q, k, v, layout), (q, k, v), layout)
    got = attend(q, k, v, prepare_attention(layout, backend, CPU), SCALE)
    for mine, theirs in zip(output_and_gradients(got, (q, k, v), layout), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("backend", TRAINED_ON_CPU)
@pytest.mark.parametrize("row", ROWS)
def test_rows_equal_sequences(row: str, backend: AttentionBackend, heads: int, groups: int) -> None:
    check_against_sequences_alone(ROWS[row], backend, heads, groups)


@settings(max_examples=20)
@given(layouts(), st.sampled_from(TRAINED_ON_CPU))
def test_random_rows_equal_sequences_alone(layout: RowLayout, backend: AttentionBackend) -> None:
    check_against_sequences_alone(layout, backend, heads=2, groups=1)


def check_flex_forward(layout: RowLayout, heads: int, groups: int) -> None:
    q, k, v = (x.detach() for x in random_qkv(layout.num_tokens, heads, groups))
    plans = (prepare_attention(layout, backend, CPU) for backend in ("flex", "dense"))
    flex, dense = (attend(q, k, v, plan, SCALE) for plan in plans)
    torch.testing.assert_close(flex, dense, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("row", ROWS)
def test_flex_forward_equals_dense(row: str, groups: int) -> None:
    check_flex_forward(ROWS[row], heads=4, groups=groups)


@settings(max_examples=15)
@given(layouts())
def test_flex_forward_equals_dense_on_random_rows(layout: RowLayout) -> None:
    check_flex_forward(layout, heads=2, groups=1)


@given(layouts(max_segments=3))
def test_mask_is_the_rule(layout: RowLayout) -> None:
    expected = np.zeros((layout.num_tokens, layout.num_tokens), dtype=bool)
    for s in layout.segments:
        for query_start, query_end in [(s.start, s.prompt_end), *s.response_spans()]:
            expected[query_start:query_end, s.start : s.prompt_end] = True
            expected[query_start:query_end, query_start:query_end] = True
    used = used_tokens(layout).numpy()
    mask = dense_mask(layout, CPU).numpy()
    assert (mask[used] == np.tril(expected)[used]).all()
    assert not mask[np.ix_(~used, used)].any(), "padding sees a real token"
    assert mask.diagonal().all(), "a query without keys has no finite output"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mask_is_of_its_queries_dtype(dtype: torch.dtype, monkeypatch) -> None:
    """CUDA needs it; torch's CPU kernels do without, or read a mask of another type wrong."""
    layout, seen = ROWS["groups"], []
    plan = prepare_attention(layout, "segments", CPU)
    attention = F.scaled_dot_product_attention

    def watched(q: Tensor, *args: Any, attn_mask: Tensor | None, **kwargs: Any) -> Tensor:
        seen.append(None if attn_mask is None else (attn_mask.dtype, attn_mask.data_ptr()))
        return attention(q, *args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, k, v = (x.detach().to(dtype) for x in random_qkv(layout.num_tokens, 4, 2))
    for _ in range(2):
        attend(q, k, v, plan)
    masks = [own for own in seen if own is not None]
    assert masks and {own[0] for own in masks} == {dtype}
    # One for all layers: nothing is converted, and kept for a backward, in each.
    assert masks[: len(masks) // 2] == masks[len(masks) // 2 :]


@pytest.mark.parametrize("backend", TRAINED_ON_CPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_in_training_dtypes(dtype: torch.dtype, backend: AttentionBackend) -> None:
    layout = ROWS["groups"]
    exact = random_qkv(layout.num_tokens, 4, 2)
    expected = output_and_gradients(attend_alone(*exact, layout), exact, layout)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in exact)
    output = attend(q, k, v, prepare_attention(layout, backend, CPU), SCALE)
    for mine, theirs in zip(output_and_gradients(output, (q, k, v), layout), expected, strict=True):
        # In bf16 the rounding of q, k, v and of each result, up to 2**-8 of its size, is all there
        # is, whatever the kernel: 2.5e-2 was seen under each.
        fp32 = fp32_bound(layout.num_tokens) * theirs.abs().max().item()
        bound = fp32 if dtype == torch.float32 else 6e-2
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_forward_in_training_dtypes(dtype: torch.dtype) -> None:
    layout = ROWS["groups"]
    q, k, v = (x.detach() for x in random_qkv(layout.num_tokens, 4, 2))
    expected = attend(q, k, v, prepare_attention(layout, "dense", CPU), SCALE)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    output = attend(q, k, v, prepare_attention(layout, "flex", CPU), SCALE)
    fp32 = fp32_bound(layout.num_tokens) * expected.abs().max().item()
    bound = fp32 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=bound)


def test_segments_give_padding_zeros_and_no_gradient() -> None:
    layout = ROWS["padded slots"]
    q, k, v = random_qkv(layout.num_tokens, 2, 2)
    output = attend(q, k, v, prepare_attention(layout, "segments", CPU))
    gradients = torch.autograd.grad(output.sum(), [q, k, v])
    padding = ~used_tokens(layout)
    for values in (output, *gradients):
        assert not values[:, :, padding].any()


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("backend", TRAINED_ON_CPU)
def test_padding_alone_gives_gradients_of_zeros(backend: AttentionBackend, num_tokens: int) -> None:
    """Data-parallel reduction waits for every weight, also when a rank's row holds no pair."""
    q, k, v = random_qkv(num_tokens, 2, 2)
    output = attend(q, k, v, prepare_attention(RowLayout(num_tokens, ()), backend, CPU))
    no_predictions = output[:, :, torch.zeros(0, dtype=torch.int64)].sum()
    for gradient in torch.autograd.grad(no_predictions, [q, k, v]):
        assert not gradient.any()


def test_a_plan_of_another_row_is_refused() -> None:
    plan = prepare_attention(ROWS["pairs"], "segments", CPU)
    with pytest.raises(AssertionError, match=r"8 tokens in the row, not 60"):
        attend(*random_qkv(8, 2, 2), plan)


@pytest.mark.parametrize("num_keys", [1, 8, 13])
def test_a_window_s_copy_is_the_window_with_aligned_rows(num_keys: int) -> None:
    mask = torch.arange(5 * 20.0).view(5, 20)
    window = mask[:3, 3 : 3 + num_keys]
    copy = aligned(window)
    assert torch.equal(copy, window)
    assert copy.stride(1) == 1 and copy.stride(0) % 8 == 0
    assert copy.storage_offset() == 0 and copy.data_ptr() != window.data_ptr()
