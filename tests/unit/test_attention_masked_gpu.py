"""Grouped queries under masks on CUDA: off the path of all scores, with the same numbers."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import AttentionPlan, attend, prepare_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
# Prompts and responses of odd lengths: windows of the shared mask begin anywhere.
ROW = RowLayout(500, (Segment(0, 129, (1, 100, 77)), Segment(310, 3, (64, 90))))
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def output_and_gradients(inputs: list[Tensor], plan: AttentionPlan, used: Tensor) -> list[Tensor]:
    q, k, v = inputs
    output = attend(q, k, v, plan)[:, :, used]
    weight = torch.linspace(-1, 1, output.numel(), device="cuda").view(output.shape)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


@pytest.mark.parametrize("heads, groups", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("backend", ["segments", "dense"])
def test_fused_kernels_equal_float64(backend: AttentionBackend, heads: int, groups: int) -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(ROW.num_tokens, 1, number, 64) for number in (heads, groups, groups)]
    tensors = [torch.randn(s, generator=generator, device=device).bfloat16() for s in shapes]
    inputs = [x.permute(1, 2, 0, 3).requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    used = torch.cat([torch.arange(s.start, s.end) for s in ROW.segments]).to(device)
    with sdpa_kernel(FUSED):  # without the slow path: what needs it is an error
        got = output_and_gradients(inputs, prepare_attention(ROW, backend, device), used)
    with sdpa_kernel(SDPBackend.MATH):
        expected = output_and_gradients(exact, prepare_attention(ROW, "dense", device), used)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.double() - theirs).norm() / theirs.norm() < 2e-2
