"""Every backend on CUDA, forward and backward, against the dense mask in float64."""

from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.models.attention import AttentionPlan, attend, prepare_attention, why_unavailable
from puzzle_align.models.attention.flash import use_flash_attention, why_no_flash
from puzzle_align.runtime.profiler.attention import AttentionCase, measure_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

DTYPES = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 2e-2)}  # and the error allowed
ROWS = {
    "block multiple": RowLayout(1024, (Segment(0, 300, (100, 130)), Segment(560, 64, (256, 64)))),
    "odd length": RowLayout(1000, (Segment(0, 129, (1, 200, 77)), Segment(500, 1, (300, 150)))),
    "nothing to gather": RowLayout(640, (Segment(0, 100, (77,)), Segment(200, 33, (300,)))),
    "many responses": RowLayout(2048, (Segment(7, 500, (60,) * 16), Segment(1600, 0, (9, 300)))),
}


def output_and_gradients(inputs: list[Tensor], plan: AttentionPlan, used: Tensor) -> list[Tensor]:
    q, k, v = inputs
    output = attend(q, k, v, plan)
    assert output.isfinite().all()
    real = output[:, :, used]
    weight = torch.linspace(-1, 1, real.numel(), device="cuda").view(real.shape)
    return [real, *torch.autograd.grad((real * weight).sum(), inputs)]


def inputs_of(num_tokens: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v as views of what Megatron holds; values are a part of the fused projection."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (num_tokens, 1, heads, head_dim)
        x = torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()
        return x.permute(1, 2, 0, 3)

    q, k, fused = draw(8), draw(2), draw(6)
    return [q, k, fused[:, 4:]]


def skip_unless_available(backend: AttentionBackend, dtype: str) -> None:
    reason = why_unavailable(backend, "cuda", dtype)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("backend", get_args(AttentionBackend))
def test_equals_dense(backend: AttentionBackend, row: str, head_dim: int, dtype: str) -> None:
    skip_unless_available(backend, dtype)
    layout, device = ROWS[row], torch.device("cuda")
    number, tolerance = DTYPES[dtype]
    inputs = inputs_of(layout.num_tokens, head_dim, number)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    used = torch.cat([torch.arange(s.start, s.end) for s in layout.segments]).to(device)
    got = output_and_gradients(inputs, prepare_attention(layout, backend, device), used)
    expected = output_and_gradients(exact, prepare_attention(layout, "dense", device), used)
    for mine, theirs in zip(got, expected, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < tolerance


@pytest.mark.parametrize("name", ["fa3", "fa4"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row", ROWS)
def test_varlen_through_a_newer_flash_attention(row: str, head_dim: int, name: str) -> None:
    device = torch.device("cuda")
    reason = why_no_flash(name, torch.cuda.get_device_capability(device))
    if reason is not None:
        pytest.skip(reason)
    assert use_flash_attention(name, device) == name
    try:
        test_equals_dense("varlen", row, head_dim, "bf16")
    finally:
        use_flash_attention("fa2", device)


def test_all_that_are_available_are_measured() -> None:
    available: list[AttentionBackend] = [
        name for name in get_args(AttentionBackend) if not why_unavailable(name, "cuda", "bf16")
    ]
    case = AttentionCase(
        layout=ROWS["odd length"], num_heads=8, num_groups=2, head_dim=128, dtype=torch.bfloat16
    )
    times = measure_attention(case, available, torch.device("cuda"))
    assert {name: time.left_out for name, time in times.items()} == dict.fromkeys(available)


@pytest.mark.parametrize("backend", ["varlen", "flex_flash"])
def test_padding_alone_gives_every_input_a_gradient_of_zeros(backend: AttentionBackend) -> None:
    skip_unless_available(backend, "bf16")
    inputs = inputs_of(300, 64, torch.bfloat16)
    plan = prepare_attention(RowLayout(300, ()), backend, torch.device("cuda"))
    q, k, v = inputs
    no_predictions = attend(q, k, v, plan)[:, :, :0].sum()
    for gradient in torch.autograd.grad(no_predictions, inputs):
        assert not gradient.any()


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_gradients_repeat_where_torch_is_to_be_deterministic(backend: AttentionBackend) -> None:
    """Gradients of a prompt repeat too, whose many responses add up to it.

    Where torch only warns, FlashAttention stays as it is: queries' gradients differ between runs.
    """
    skip_unless_available(backend, "bf16")
    layout, device = ROWS["many responses"], torch.device("cuda")
    plan = prepare_attention(layout, backend, device)
    used = torch.arange(layout.num_tokens, device=device)
    inputs = inputs_of(layout.num_tokens, 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [output_and_gradients(inputs, plan, used) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# Prompts and responses of odd lengths: windows of the shared mask begin anywhere.
ROW = RowLayout(500, (Segment(0, 129, (1, 100, 77)), Segment(310, 3, (64, 90))))
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


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
