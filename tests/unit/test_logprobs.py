"""The chunked, vocabulary-sharded log-probabilities against plain log_softmax in float64."""

import pytest
import torch
from torch.autograd import gradcheck

from puzzle_align.algos.logprobs import linear_logprob_parts, sum_by_slot

NUM, HIDDEN, VOCAB, PADDED = 13, 6, 21, 24


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(NUM, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (NUM,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def sharded_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    num_shards: int,
    chunk_size: int,
) -> torch.Tensor:
    """What tensor ranks do together, in one process."""
    shards = weight.chunk(num_shards)
    parts = [
        linear_logprob_parts(
            hidden,
            shard,
            targets,
            vocab_start=number * len(shard),
            vocab_size=VOCAB,
            chunk_size=chunk_size,
        )
        for number, shard in enumerate(shards)
    ]
    lse = torch.logsumexp(torch.stack([lse for lse, _ in parts]), dim=0)
    return torch.stack([target for _, target in parts]).sum(dim=0) - lse


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])  # of 8, the last has no valid row
@pytest.mark.parametrize("chunk_size", [1, 5, 13, 100])
def test_equals_log_softmax(num_shards: int, chunk_size: int) -> None:
    hidden, weight, targets = inputs()
    grad = torch.linspace(-1.0, 2.0, NUM, dtype=torch.float64)
    plain = torch.log_softmax(hidden @ weight[:VOCAB].T, dim=1).gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad(plain, (hidden, weight), grad)
    logprobs = sharded_logprobs(hidden, weight, targets, num_shards, chunk_size)
    grads = torch.autograd.grad(logprobs, (hidden, weight), grad)
    torch.testing.assert_close(logprobs, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    assert not grads[1][VOCAB:].any()


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_gradcheck(num_shards: int) -> None:
    hidden, weight, targets = inputs()

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return sharded_logprobs(hidden, weight, targets, num_shards, chunk_size=4)

    assert gradcheck(logprobs, (hidden, weight))


def test_parts_of_a_shard() -> None:
    """Logits are hidden times (1, 2, 3, 4) with rows 2 and 3 here, 3 being padding: lse 3h."""
    hidden = torch.tensor([[1.0], [2.0]])
    weight = torch.tensor([[3.0], [4.0]])
    targets = torch.tensor([2, 1])
    lse, target = linear_logprob_parts(
        hidden, weight, targets, vocab_start=2, vocab_size=3, chunk_size=8
    )
    assert lse.tolist() == [3.0, 6.0]
    assert target.tolist() == [3.0, 0.0]
    lse, target = linear_logprob_parts(
        hidden, weight, targets, vocab_start=4, vocab_size=3, chunk_size=8
    )
    assert lse.tolist() == [float("-inf")] * 2 and target.tolist() == [0.0, 0.0]


def test_no_predictions() -> None:
    hidden, weight, targets = inputs()
    hidden = hidden.detach()[:0].requires_grad_()
    lse, target = linear_logprob_parts(
        hidden, weight, targets[:0], vocab_start=0, vocab_size=VOCAB, chunk_size=4
    )
    grads = torch.autograd.grad((target - lse).sum(), (hidden, weight))
    assert grads[0].shape == (0, HIDDEN) and torch.equal(grads[1], torch.zeros_like(weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_asked_for(frozen: str) -> None:
    hidden, weight, targets = inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    sharded_logprobs(hidden, weight, targets, 1, 4).sum().backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_bf16_accumulates_in_float32() -> None:
    """One large and many small contributions to one weight: bf16 sums would drop the small ones.

    With a zero weight every logit is 0 and softmax is 1/2, so prediction i of target 0 gives
    weight row 0 the gradient hidden[i] / 2. 64 at first and then 256 halves of 1/4 make 64 + 32.
    """
    hidden = torch.cat([torch.tensor([[128.0]]), torch.full((256, 1), 0.25)]).bfloat16()
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(257, dtype=torch.int64)
    lse, target = linear_logprob_parts(
        hidden, weight, targets, vocab_start=0, vocab_size=2, chunk_size=1
    )
    assert lse.dtype == target.dtype == torch.float32
    (target - lse).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [96.0, -96.0]


def test_sum_by_slot() -> None:
    """Slot 1 has nothing; the sums of float32 values are exact where float32 would round."""
    values = torch.tensor([1e8, 1.0, 2.0, 3.0], requires_grad=True)
    sums = sum_by_slot(values, torch.tensor([0, 0, 2, 2]), 3)
    assert sums.dtype == torch.float64 and sums.tolist() == [100000001.0, 0.0, 5.0]
    sums.backward(torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64))
    assert values.grad is not None and values.grad.tolist() == [1.0, 1.0, 100.0, 100.0]
    assert sum_by_slot(values[:0], torch.zeros(0, dtype=torch.int64), 2).tolist() == [0.0, 0.0]
