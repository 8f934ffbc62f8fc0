"""The head on CUDA: float32 logits, and weight gradients that the product adds to their buffer."""

import pytest
import torch

from puzzle_align.algos.logprobs import linear_logprob_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
NUM, HIDDEN, VOCAB, PADDED = 300, 256, 1000, 1024


def results(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, and the gradients of an uneven sum of them."""
    lse, target, _, _ = linear_logprob_parts(
        hidden, weight, targets, vocab_start=0, vocab_size=VOCAB, chunk_size=chunk_size
    )
    log_probs = target - lse
    uneven = torch.linspace(-1.0, 2.0, NUM, dtype=log_probs.dtype, device="cuda")
    grads = torch.autograd.grad((uneven * log_probs).sum(), (hidden, weight))
    return log_probs.detach(), grads[0], grads[1]


@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("chunk_size", [128, 512])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_equals_float64(
    dtype: torch.dtype, tolerance: float, chunk_size: int, has_buffer: bool
) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(NUM, HIDDEN, generator=generator, device="cuda").to(dtype)
    weight = (0.1 * torch.randn(PADDED, HIDDEN, generator=generator, device="cuda")).to(dtype)
    targets = torch.randint(VOCAB, (NUM,), generator=generator, device="cuda")
    expected = results(
        hidden.double().requires_grad_(), weight.double().requires_grad_(), targets, NUM
    )
    leaf = torch.nn.Parameter(weight)
    if has_buffer:
        leaf.main_grad = torch.full((PADDED, HIDDEN), 0.5, device="cuda")  # type: ignore[attr-defined]
    log_probs, grad_hidden, grad_weight = results(
        hidden.requires_grad_(), leaf, targets, chunk_size
    )
    if has_buffer:
        assert not grad_weight.any()
        grad_weight = leaf.main_grad - 0.5
        assert not grad_weight[VOCAB:].any()
    # Float32 logits of bf16 inputs are as exact as those of float32 inputs.
    torch.testing.assert_close(log_probs.double(), expected[0], rtol=1e-5, atol=1e-4)
    for found, wanted in zip((grad_hidden, grad_weight), expected[1:], strict=True):
        assert (found.double() - wanted).norm() / wanted.norm() < tolerance


def test_a_row_adds_without_a_second_float32_gradient() -> None:
    """A backward allocates the product's factors, not another [V, H] in float32."""
    rows, hidden_size = 32768, 1024
    weight = torch.nn.Parameter(torch.zeros(rows, hidden_size, dtype=torch.bfloat16, device="cuda"))
    weight.main_grad = torch.zeros(rows, hidden_size, device="cuda")  # type: ignore[attr-defined]
    hidden = torch.ones(64, hidden_size, dtype=torch.bfloat16, device="cuda")
    targets = torch.zeros(64, dtype=torch.int64, device="cuda")
    lse, target, _, _ = linear_logprob_parts(
        hidden, weight, targets, vocab_start=0, vocab_size=rows, chunk_size=64
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (target - lse).sum().backward()
    logits = 64 * rows * (4 + 4 + 2)
    handed_on = 2 * weight.numel()
    assert torch.cuda.max_memory_allocated() - before < logits + handed_on + 2**26
