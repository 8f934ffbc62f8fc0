"""The chunked, vocabulary-sharded log-probabilities and entropies against plain float64 softmax."""

import math
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from puzzle_align.algos.logprobs import (
    LogprobParts,
    join_entropies,
    join_statistics,
    linear_logprob_parts,
    sum_by_slot,
)

NUM, HIDDEN, VOCAB, PADDED = 13, 6, 21, 24
FLOAT64 = 1e-12  # of short sums of numbers of order one, each rounded to 1e-16


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(NUM, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (NUM,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def sharded_parts(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, num_shards: int, **settings
) -> list[LogprobParts]:
    given = {"vocab_size": VOCAB, **settings}
    return [
        linear_logprob_parts(hidden, shard, targets, vocab_start=number * len(shard), **given)
        for number, shard in enumerate(weight.chunk(num_shards))
    ]


def join(parts: list[LogprobParts]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join tensor ranks' parts in one process: log-probabilities and entropies [N]."""
    lse = torch.stack([part.lse for part in parts], dim=1)
    target = torch.stack([part.target_logit for part in parts]).sum(dim=0)
    entropies = [part.entropy for part in parts if part.entropy is not None]
    joined = join_entropies(lse, torch.stack(entropies, dim=1)) if entropies else None
    return target - torch.logsumexp(lse, dim=1), joined


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    softmax = torch.distributions.Categorical(logits=hidden @ weight[:VOCAB].T / temperature)
    return softmax.log_prob(targets), softmax.entropy()


def gradients(
    logprobs: torch.Tensor, entropies: torch.Tensor | None, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of an uneven sum of both, or of the log-probabilities alone."""
    grad = torch.linspace(-1.0, 2.0, NUM, dtype=torch.float64)
    total = (grad * logprobs).sum()
    return torch.autograd.grad(
        total if entropies is None else total + (grad.flip(0) * entropies).sum(), inputs
    )


@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])  # of 8, the last has no valid row
@pytest.mark.parametrize("chunk_size", [1, 5, 13, 100])
def test_equals_plain_softmax(num_shards, chunk_size, temperature, entropies) -> None:
    hidden, weight, targets = inputs()
    expected, entropy = plain(hidden, weight, targets, temperature)
    settings = {"chunk_size": chunk_size, "temperature": temperature, "entropies": entropies}
    logprobs, joined = join(sharded_parts(hidden, weight, targets, num_shards, **settings))
    assert (joined is not None) == entropies
    torch.testing.assert_close(logprobs, expected, rtol=FLOAT64, atol=FLOAT64)
    if joined is not None:
        torch.testing.assert_close(joined, entropy, rtol=FLOAT64, atol=FLOAT64)
    grads = gradients(logprobs, joined, hidden, weight)
    expected_grads = gradients(expected, entropy if entropies else None, hidden, weight)
    torch.testing.assert_close(grads, expected_grads, rtol=FLOAT64, atol=FLOAT64)
    assert not grads[1][VOCAB:].any()


def test_entropies_without_log_probabilities() -> None:
    """Nothing of a gradient that was not given enters."""
    hidden, weight, targets = inputs()
    _, entropy = join(sharded_parts(hidden, weight, targets, 2, chunk_size=5, entropies=True))
    assert entropy is not None
    _, expected = plain(hidden, weight, targets, 1.0)
    grads = torch.autograd.grad(entropy.sum(), (hidden, weight))
    expected_grads = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close(grads, expected_grads, rtol=FLOAT64, atol=FLOAT64)


def test_float32_entropies_of_sharp_softmaxes() -> None:
    """One logit of 100 over zeros: exp(-100) of a chance for others, and logits' size cancels."""
    hidden = torch.tensor([[100.0], [-100.0], [0.0]])
    weight, targets = torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(3, dtype=torch.int64)
    settings = {"vocab_size": 4, "chunk_size": 8, "entropies": True}
    _, entropies = join(sharded_parts(hidden, weight, targets, 2, **settings))
    assert entropies is not None and entropies.dtype == torch.float32
    assert 0 <= entropies[0] <= 1e-20
    torch.testing.assert_close(entropies[1:], torch.tensor([math.log(3), math.log(4)]))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_gradcheck(num_shards: int) -> None:
    hidden, weight, targets = inputs()

    def both(hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        settings = {"chunk_size": 4, "temperature": 0.7, "entropies": True}
        joined = join(sharded_parts(hidden, weight, targets, num_shards, **settings))
        return [part for part in joined if part is not None]

    assert gradcheck(both, (hidden, weight))


def test_parts_of_a_shard() -> None:
    """Logits are hidden times (1, 2, 3, 4) with rows 2 and 3 here, 3 being padding: lse 3h."""
    hidden = torch.tensor([[1.0], [2.0]])
    weight = torch.tensor([[3.0], [4.0]])
    targets = torch.tensor([2, 1])

    def parts(start: int) -> list[list[float] | None]:
        found = linear_logprob_parts(
            hidden, weight, targets, vocab_start=start, vocab_size=3, chunk_size=8, entropies=True
        )
        return [None if part is None else part.tolist() for part in found]

    assert parts(2) == [[3.0, 6.0], [3.0, 0.0], [0.0, 0.0], None]
    assert parts(4) == [[float("-inf")] * 2, [0.0, 0.0], [0.0, 0.0], None]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])  # of 8, the last has no valid row
def test_statistics_equal_those_of_the_plain_softmax(num_shards, temperature) -> None:
    hidden, weight, targets = inputs()
    plain_logits = (hidden @ weight[:VOCAB].T / temperature).detach()
    targets[:5] = plain_logits[:5].argmax(dim=1)
    settings = {"chunk_size": 5, "temperature": temperature}
    parts = sharded_parts(hidden, weight, targets, num_shards, statistics=True, **settings)
    lse = torch.stack([part.lse for part in parts], dim=1)
    made = torch.stack([part.statistics for part in parts if part.statistics is not None], dim=1)
    assert made.shape[1] == num_shards and not made.requires_grad
    entropy, mean_logit, is_top1, log_sum_squares = join_statistics(lse, made, targets, VOCAB)
    probs = plain_logits.softmax(dim=1)
    torch.testing.assert_close(entropy, -(probs * probs.log()).sum(1), rtol=FLOAT64, atol=FLOAT64)
    torch.testing.assert_close(mean_logit, plain_logits.mean(1), rtol=FLOAT64, atol=FLOAT64)
    assert is_top1.bool().tolist() == (plain_logits.argmax(1) == targets).tolist()
    assert is_top1[:5].all() and not is_top1.all()
    expected = probs.square().sum(1).log()
    torch.testing.assert_close(log_sum_squares, expected, rtol=FLOAT64, atol=FLOAT64)
    # They change nothing of the rest.
    bare = sharded_parts(hidden, weight, targets, num_shards, **settings)
    assert all(map(torch.equal, lse.unbind(dim=1), (part.lse for part in bare)))
    own, other = (gradients(join(p)[0], None, hidden, weight) for p in (parts, bare))
    assert all(map(torch.equal, own, other))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_of_equal_maxima_the_first_is_the_top(num_shards: int) -> None:
    """Logits 1, 5, 0, 5, 5, 2, whole or two a shard, as bf16's rounding makes equal ones."""
    hidden, weight = torch.ones(3, 1), torch.tensor([[1.0], [5], [0], [5], [5], [2]])
    targets = torch.tensor([1, 3, 4])
    settings = {"vocab_size": 6, "chunk_size": 2, "statistics": True}
    parts = sharded_parts(hidden, weight, targets, num_shards, **settings)
    lse = torch.stack([part.lse for part in parts], dim=1)
    made = torch.stack([part.statistics for part in parts if part.statistics is not None], dim=1)
    assert join_statistics(lse, made, targets, 6)[2].tolist() == [1.0, 0.0, 0.0]


def test_no_predictions() -> None:
    hidden, weight, targets = inputs()
    hidden = hidden.detach()[:0].requires_grad_()
    lse, target, _, _ = linear_logprob_parts(
        hidden, weight, targets[:0], vocab_start=0, vocab_size=VOCAB, chunk_size=4
    )
    grads = torch.autograd.grad((target - lse).sum(), (hidden, weight))
    assert grads[0].shape == (0, HIDDEN) and torch.equal(grads[1], torch.zeros_like(weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_asked_for(frozen: str) -> None:
    hidden, weight, targets = inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    join(sharded_parts(hidden, weight, targets, 1, chunk_size=4))[0].sum().backward()
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
    lse, target, _, _ = linear_logprob_parts(
        hidden, weight, targets, vocab_start=0, vocab_size=2, chunk_size=1
    )
    assert lse.dtype == target.dtype == torch.float32
    (target - lse).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [96.0, -96.0]


@pytest.mark.parametrize("chunk_size", [5, 13])
def test_main_grad_takes_the_gradients_of_all_rows(chunk_size: int) -> None:
    """Megatron's data parallelism has a float32 buffer, and zeros for the hook's sake."""
    hidden, weight, targets = inputs(torch.float32)
    exact, exact_weight, _ = inputs()
    log_probs, _ = plain(exact, exact_weight, targets, 0.7)
    expected = 2 * gradients(log_probs, None, exact_weight)[0]
    leaf = torch.nn.Parameter(weight.detach())
    leaf.main_grad = torch.zeros_like(leaf)  # type: ignore[attr-defined]
    sizes: dict[str, Any] = {"vocab_start": 0, "vocab_size": VOCAB, "chunk_size": chunk_size}
    for _ in range(2):
        leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        log_probs, _ = join([linear_logprob_parts(hidden, leaf, targets, temperature=0.7, **sizes)])
        (handed_on,) = gradients(log_probs, None, leaf)
        assert handed_on.shape == leaf.shape and not handed_on.any()
        assert leaf.grad_added_to_main_grad
    torch.testing.assert_close(leaf.main_grad.double(), expected, rtol=1e-5, atol=1e-5)
    assert not leaf.main_grad[VOCAB:].any()


def test_main_grad_of_one_chunk_is_bitwise_the_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    parts: dict[str, Any] = {"vocab_start": 0, "vocab_size": VOCAB, "chunk_size": NUM}
    (plain_grad,) = gradients(
        join([linear_logprob_parts(hidden, weight, targets, **parts)])[0], None, weight
    )
    leaf = torch.nn.Parameter(weight.detach())
    leaf.main_grad = torch.zeros_like(leaf)  # type: ignore[attr-defined]
    gradients(join([linear_logprob_parts(hidden, leaf, targets, **parts)])[0], None, leaf)
    assert torch.equal(leaf.main_grad, plain_grad)


def test_main_grad_of_bf16_weights_is_not_rounded_to_bf16() -> None:
    """256 + 1 needs nine bits, which bf16 has not: two rows' gradients of one weight."""
    weight = torch.nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(2, 1)  # type: ignore[attr-defined]
    for value in (512.0, 2.0):
        hidden = torch.tensor([[value]], dtype=torch.bfloat16)
        lse, target, _, _ = linear_logprob_parts(
            hidden, weight, torch.tensor([0]), vocab_start=0, vocab_size=2, chunk_size=1
        )
        (target - lse).sum().backward()
    assert weight.main_grad.flatten().tolist() == [257.0, -257.0]
    assert weight.grad is not None and not weight.grad.any()


def test_sum_by_slot() -> None:
    """Slot 1 has nothing; the sums of float32 values are exact where float32 would round."""
    values = torch.tensor([1e8, 1.0, 2.0, 3.0], requires_grad=True)
    sums = sum_by_slot(values, torch.tensor([0, 0, 2, 2]), 3)
    assert sums.dtype == torch.float64 and sums.tolist() == [100000001.0, 0.0, 5.0]
    sums.backward(torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64))
    assert values.grad is not None and values.grad.tolist() == [1.0, 1.0, 100.0, 100.0]
    assert sum_by_slot(values[:0], torch.zeros(0, dtype=torch.int64), 2).tolist() == [0.0, 0.0]
