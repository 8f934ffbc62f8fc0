"""Compiled FlexAttention on CUDA, forward and backward, against the dense mask."""

import pytest
import torch
from torch import Tensor

from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import AttentionPlan, attend, prepare_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

ROWS = {
    "block multiple": RowLayout(1024, (Segment(0, 300, (100, 130)), Segment(560, 64, (256, 64)))),
    "odd length": RowLayout(1000, (Segment(0, 129, (1, 200, 77)), Segment(500, 1, (300, 150)))),
}


def output_and_gradients(inputs: list[Tensor], plan: AttentionPlan, used: Tensor) -> list[Tensor]:
    q, k, v = inputs
    output = attend(q, k, v, plan)[:, :, used]
    weight = torch.linspace(-1, 1, output.numel(), device="cuda").view(output.shape)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row", ROWS)
def test_compiled_flex_equals_dense(
    row: str, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    layout, device = ROWS[row], torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(layout.num_tokens, 1, heads, head_dim) for heads in (8, 2, 2)]
    tensors = [torch.randn(s, generator=generator, device=device) for s in shapes]
    inputs = [x.permute(1, 2, 0, 3).to(dtype).requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    used = torch.cat([torch.arange(s.start, s.end) for s in layout.segments]).to(device)
    got = output_and_gradients(inputs, prepare_attention(layout, "flex", device), used)
    expected = output_and_gradients(exact, prepare_attention(layout, "dense", device), used)
    for mine, theirs in zip(got, expected, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < tolerance
