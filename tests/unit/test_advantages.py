"""Token rewards, advantages and whitening: values by hand, and a plain Python reference."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from puzzle_align.algos.advantages import (
    KLEstimator,
    deviation_sums,
    kl_estimates,
    moment_sums,
    next_kl_coef,
    response_scores,
    token_rewards,
    whiten,
)
from puzzle_align.algos.estimators import Samples
from puzzle_align.algos.estimators.gae import estimate

# All in float64, of numbers of order one: a rounding is 1e-16, a few stay within 1e-14, a chain of
# sums within 1e-12. Whitening's 1e-8 is not rounding but what it adds to the variance.
LOG2 = math.log(2)
NAN = math.nan
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask_of(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]


@st.composite
def ragged(draw: st.DrawFn) -> Batch:
    """Lengths (some 0), ``[3, B, T]`` floats with NaN after the ends, and their mask."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    mask = mask_of(lengths)
    seed = draw(st.integers(0, 2**32 - 1))
    numbers = torch.randn(
        3, *mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return torch.tensor(lengths), numbers.masked_fill(~mask, NAN), mask


# --- KL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "twice", "half"),
    [  # of a token that is twice, and half, as likely under the reference: r = 2 and r = 1/2
        ("k1", -LOG2, LOG2),
        ("k2", LOG2**2 / 2, LOG2**2 / 2),
        ("k3", 1 - LOG2, LOG2 - 0.5),
    ],
)
def test_kl_by_hand(estimator: KLEstimator, twice: float, half: float) -> None:
    logps, ref_logps = tensor(math.log(1 / 4), math.log(1 / 2)), tensor(math.log(1 / 2), -2 * LOG2)
    found = kl_estimates(logps, ref_logps, estimator)
    assert found.tolist() == pytest.approx([twice, half], rel=1e-14)


@pytest.mark.parametrize(
    ("log_ratio", "kl", "slope"),
    [  # of log r; the slope of r - 1 - log r over the policy's log-probability is 1 - r
        (2.0, math.exp(2) - 3, 1 - math.exp(2)),
        (2.6, math.exp(2.6) - 3.6, 1 - math.exp(2.6)),  # 9.86
        (2.7, 10.0, 0.0),  # would be 11.2
        (30.0, 10.0, 0.0),  # would be 1e13
        (math.inf, 10.0, 0.0),
        (-10.9, 9.9 + math.exp(-10.9), 1 - math.exp(-10.9)),
        (-11.1, 10.0, 0.0),
        (-math.inf, 10.0, 0.0),
    ],
)
def test_k3_is_bounded(log_ratio: float, kl: float, slope: float) -> None:
    policy, reference = (-abs(log_ratio), 0.0) if log_ratio > 0 else (0.0, log_ratio)
    logps = tensor(policy).requires_grad_()
    found = kl_estimates(logps, tensor(reference), "k3")
    assert found.item() == pytest.approx(kl, rel=1e-13)
    assert torch.autograd.grad(found.sum(), logps)[0].item() == pytest.approx(slope, rel=1e-13)


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    logits, ref_logits = torch.randn(
        2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return logits.requires_grad_(), torch.log_softmax(ref_logits, 0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_all_tokens_is_the_kl(estimator: KLEstimator) -> None:
    logits, ref_logps = distributions()
    logps = torch.log_softmax(logits, 0)
    kl = (logps.exp() * (logps - ref_logps)).sum()
    mean = (logps.exp() * kl_estimates(logps, ref_logps, estimator)).sum()
    torch.testing.assert_close(mean, kl, rtol=1e-13, atol=0)


def test_what_the_mean_gradients_are() -> None:
    """Gradients of sampled tokens: nothing, KL(policy || reference), KL(reference || policy)."""
    logits, ref_logps = distributions()
    logps = torch.log_softmax(logits, 0)
    forward = (logps.exp() * (logps - ref_logps)).sum()
    backward = (ref_logps.exp() * (ref_logps - logps)).sum()
    wanted = [torch.zeros_like(logits)]
    wanted += [torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (forward, backward)]
    for estimator, gradient in zip(ESTIMATORS, wanted, strict=True):
        mean = (logps.detach().exp() * kl_estimates(logps, ref_logps, estimator)).sum()
        (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_under_a_mask_reads_and_moves_tokens_only(estimator: KLEstimator) -> None:
    logps = tensor([-1.0, NAN], [-math.inf, -2.0]).requires_grad_()
    ref_logps = tensor([-1.5, -1.0], [-1.0, -1.0])
    mask = torch.tensor([[True, False], [False, True]])
    kls = kl_estimates(logps, ref_logps, estimator, mask)
    (gradient,) = torch.autograd.grad(kls.sum(), logps)
    alone = kl_estimates(tensor(-1.0, -2.0), tensor(-1.5, -1.0), estimator)
    assert torch.equal(kls[mask], alone)
    assert not kls[~mask].any() and not gradient[~mask].any() and gradient[mask].all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_gradients(estimator: KLEstimator) -> None:
    logps, ref_logps = torch.randn(2, 6, dtype=torch.float64)
    assert gradcheck(lambda x: kl_estimates(x, ref_logps, estimator), logps.requires_grad_())


@pytest.mark.parametrize(
    ("kl", "target", "coefficient"),
    [
        (6.0, 6.0, 0.5),  # on target
        (6.6, 6.0, 0.5 * (1 + 0.1 * 256 / 1024)),
        (60.0, 6.0, 0.5 * (1 + 0.2 * 256 / 1024)),  # the error is bounded
        (0.0, 6.0, 0.5 * (1 - 0.2 * 256 / 1024)),
        (-3.0, 6.0, 0.5 * (1 - 0.2 * 256 / 1024)),  # an estimate of k1 can be negative
        (60.0, None, 0.5),  # fixed
    ],
)
def test_kl_coefficient_by_hand(kl: float, target: float | None, coefficient: float) -> None:
    found = next_kl_coef(0.5, kl, 256, target=target, horizon=1024)
    assert found == pytest.approx(coefficient, rel=1e-14)


# --- rewards ----------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    scores, terminated = tensor(7.0, 7.0, -9.0, 1.5), torch.tensor([True, False, False, False])
    found = response_scores(scores, terminated, clip=5.0, missing_eos_penalty=1.0)
    assert found.tolist() == [5.0, 4.0, -6.0, 0.5]
    found = response_scores(scores.float(), terminated, clip=None, missing_eos_penalty=0.0)
    assert found.dtype == torch.float64 and found.tolist() == scores.tolist()


def test_token_rewards_by_hand() -> None:
    kls = tensor([1.0, -2.0, 3.0], [4.0, NAN, NAN], [NAN, NAN, NAN])
    scores, mask = tensor(10.0, 20.0, 30.0), mask_of([3, 1, 0])
    found = token_rewards(scores, kls, mask, kl_coef=0.5)
    assert found.tolist() == [[-0.5, 1.0, 8.5], [18.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    found = token_rewards(scores, kls, mask, kl_coef=0.0)
    assert found.tolist() == [[0.0, 0.0, 10.0], [20.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@given(ragged())
@settings(max_examples=50)
def test_rewards_of_a_response_sum_to_its_score_less_its_kl(batch: Batch) -> None:
    lengths, (kls, _, _), mask = batch
    scores = torch.linspace(-1, 2, len(lengths), dtype=torch.float64)
    rewards = token_rewards(scores, kls, mask, kl_coef=0.3)
    for b, length in enumerate(lengths.tolist()):
        wanted = [-0.3 * kl for kl in kls[b, :length].tolist()]
        if wanted:
            wanted[-1] += scores[b].item()
        assert rewards[b, :length].tolist() == pytest.approx(wanted, abs=1e-14)
        assert not rewards[b, length:].any()


# --- advantages -------------------------------------------------------------------------------

# gamma = lam = 1/2; the first response has three tokens, the second the same two first ones.
REWARDS = tensor([0.0, 0.0, 1.0], [0.0, 1.0, NAN])
VALUES = tensor([1 / 2, 1 / 4, 1 / 2], [1 / 2, 1 / 4, NAN])
FINAL_VALUES = tensor(2.0, 4.0)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    final_values: torch.Tensor,
    ended: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of responses to different prompts, all scored."""
    samples = Samples(
        rewards=rewards,
        mask=mask,
        has_score=torch.ones_like(ended),
        ended=ended,
        prompts=torch.arange(len(ended)),
        gamma=gamma,
        lam=lam,
        values=values,
        final_values=final_values,
    )
    advantages, returns = estimate(samples)
    assert returns is not None
    return advantages, returns


def half_gae(*terminated: bool) -> tuple[list[list[float]], list[list[float]]]:
    advantages, returns = gae(
        REWARDS, VALUES, FINAL_VALUES, torch.tensor(terminated), mask_of([3, 2]), gamma=0.5, lam=0.5
    )
    return advantages.tolist(), returns.tolist()


def test_gae_by_hand() -> None:
    """A truncated response adds 1/2 of its final value to the last delta: 1 and 2."""
    advantages, returns = half_gae(True, True)
    # delta: 1/4 1/2 - 1/2 = -3/8, 1/2 1/2 - 1/4 = 0, 1 - 1/2 = 1/2
    # A: 1/2; 0 + 1/4 1/2 = 1/8; -3/8 + 1/4 1/8 = -11/32
    # delta: -3/8, 1 - 1/4 = 3/4; A: 3/4; -3/8 + 3/16 = -3/16
    assert advantages == [[-11 / 32, 1 / 8, 1 / 2], [-3 / 16, 3 / 4, 0.0]]
    assert returns == [[5 / 32, 3 / 8, 1.0], [5 / 16, 1.0, 0.0]]
    truncated, returns = half_gae(False, False)
    # A: 3/2; 0 + 3/8; -3/8 + 3/32 = -9/32.  A: 11/4; -3/8 + 11/16 = 5/16
    assert truncated == [[-9 / 32, 3 / 8, 3 / 2], [5 / 16, 11 / 4, 0.0]]
    assert returns == [[7 / 32, 5 / 8, 2.0], [13 / 16, 3.0, 0.0]]
    assert half_gae(True, False)[0] == [advantages[0], truncated[1]]


def test_a_final_value_is_not_read_where_terminated() -> None:
    mask, terminated = mask_of([2]), torch.tensor([True])
    rewards = values = tensor([1.0, 2.0])
    found = gae(rewards, values, tensor(NAN), terminated, mask, gamma=1.0, lam=1.0)
    assert torch.stack(found).isfinite().all()


def test_a_batch_without_tokens_has_no_advantages() -> None:
    empty, terminated = torch.zeros(2, 0), torch.tensor([True, False])
    found = gae(empty, empty, tensor(1.0, 2.0), terminated, empty.bool(), gamma=1.0, lam=0.9)
    assert [part.shape for part in found] == [(2, 0), (2, 0)]


def mixed_estimates(
    rewards: list[float], values: list[float], end: float, gamma: float, lam: float
) -> list[float]:
    """Equations 11 to 16 as they are written: the k-step estimates, mixed by powers of lam.

    Those longer than the response are the one to its end, so that it has all their weight.
    """
    num = len(rewards)
    states = [*values, end]
    advantages = []
    for t in range(num):
        estimates = []
        for k in range(1, num - t + 1):
            rewarded = sum(gamma**i * rewards[t + i] for i in range(k))
            estimates.append(-states[t] + rewarded + gamma**k * states[t + k])
        mixed = sum((1 - lam) * lam**i * estimate for i, estimate in enumerate(estimates[:-1]))
        advantages.append(mixed + lam ** (len(estimates) - 1) * estimates[-1])
    return advantages


@given(ragged(), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.sampled_from([0.0, 0.3, 0.95, 1.0]))
@settings(max_examples=200)
def test_gae_is_the_mixture_of_k_step_estimates(batch: Batch, gamma: float, lam: float) -> None:
    lengths, (rewards, values, _), mask = batch
    num = len(lengths)
    terminated = torch.arange(num) % 2 == 0
    final_values = torch.linspace(-2, 1, num, dtype=torch.float64)
    advantages, returns = gae(rewards, values, final_values, terminated, mask, gamma=gamma, lam=lam)
    for b, length in enumerate(lengths.tolist()):
        end = 0.0 if terminated[b] else final_values[b].item()
        reward, value = rewards[b, :length].tolist(), values[b, :length].tolist()
        wanted = mixed_estimates(reward, value, end, gamma, lam)
        assert advantages[b, :length].tolist() == pytest.approx(wanted, abs=1e-12)
        wanted = [a + v for a, v in zip(wanted, value, strict=True)]
        assert returns[b, :length].tolist() == pytest.approx(wanted, abs=1e-12)
        assert not advantages[b, length:].any() and not returns[b, length:].any()


def test_float32_is_worked_out_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 9, generator=generator)
    ends, terminated = torch.randn(3, generator=generator), torch.tensor([True, False, False])
    mask = mask_of([9, 4, 7])
    single = gae(rewards, values, ends, terminated, mask, gamma=0.99, lam=0.95)
    rewards, values, ends = rewards.double(), values.double(), ends.double()
    double = gae(rewards, values, ends, terminated, mask, gamma=0.99, lam=0.95)
    assert torch.equal(torch.stack(single), torch.stack(double))


# --- whitening --------------------------------------------------------------------------------


def whitened(
    values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool, rank: torch.Tensor | None = None
) -> torch.Tensor:
    """Whiten like ranks that hold some of the rows each (``rank``), and add their sums."""
    rows = [slice(None)] if rank is None else [rank == r for r in range(3)]
    sums = torch.stack([moment_sums(values[r], mask[r]) for r in rows]).sum(0)
    parts = [deviation_sums(values[r], mask[r], sums) for r in rows]
    deviations = torch.stack(parts).sum(0)
    together = torch.zeros_like(values)
    for r in rows:
        together[r] = whiten(values[r], mask[r], sums, deviations, shift_mean=shift_mean)
    return together


def test_whitening_by_hand() -> None:
    """1, 3 and 5: mean 3, variance (4 + 0 + 4) / 2 = 4."""
    values, mask = tensor([1.0, NAN, 3.0], [5.0, NAN, NAN]), torch.zeros(2, 3, dtype=torch.bool)
    mask[0, 0] = mask[0, 2] = mask[1, 0] = True
    sums = moment_sums(values, mask)
    assert sums.tolist() == [3.0, 9.0]
    assert deviation_sums(values, mask, sums).tolist() == [0.0, 8.0]
    shifted = whitened(values, mask, shift_mean=True)
    assert shifted[mask].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-8)
    kept = whitened(values, mask, shift_mean=False)
    assert kept[mask].tolist() == pytest.approx([2.0, 3.0, 4.0], abs=1e-8)
    assert not shifted[~mask].any() and not kept[~mask].any()


@pytest.mark.parametrize(
    ("values", "num"), [((0.1, 0.1, 0.1), 3), ((1e8 + 0.1,) * 3, 3), ((7.0, NAN), 1), ((NAN,), 0)]
)
def test_values_without_variance_whiten_to_nothing(values: tuple[float, ...], num: int) -> None:
    mask = torch.arange(len(values)) < num
    found = whitened(tensor(*values), mask, shift_mean=True)
    assert found.tolist() == pytest.approx([0.0] * len(values), abs=1e-8)


@given(ragged(), st.data(), st.booleans())
@settings(max_examples=100)
def test_ranks_that_add_their_sums_whiten_as_one(
    batch: Batch, data: st.DataObject, shift_mean: bool
) -> None:
    """Responses spread unevenly over three ranks, some of which may have none, or no token."""
    _, (values, _, _), mask = batch
    values = 3 * values + 5
    rank = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)))[: len(mask)]
    together = whitened(values, mask, shift_mean=shift_mean, rank=rank)
    assert together[mask].tolist() == pytest.approx(
        exactly_whitened(values[mask].tolist(), shift_mean), abs=1e-12
    )
    assert not together[~mask].any()


@pytest.mark.parametrize("mean", [0.0, 1e8, -1e12])
@pytest.mark.parametrize("num", [2, 1000])
def test_a_mean_far_from_0_costs_no_digits(mean: float, num: int) -> None:
    """1e8 and a spread of 1e-3: squares of 1e16, of which float64 keeps the ones, not 1e-6."""
    generator = torch.Generator().manual_seed(num)
    spread = max(1e-3, 1e-11 * abs(mean))
    values = mean + spread * torch.randn(num, 3, dtype=torch.float64, generator=generator)
    mask = torch.ones_like(values, dtype=torch.bool)
    wanted = exactly_whitened(values.flatten().tolist(), shift_mean=True)
    for rank in (None, torch.arange(num) % 3, (torch.arange(num) > 1) * 2):
        found = whitened(values, mask, shift_mean=True, rank=rank)
        assert found.flatten().tolist() == pytest.approx(wanted, rel=1e-10, abs=1e-10)


def exactly_whitened(values: list[float], shift_mean: bool) -> list[float]:
    """In fractions: nothing is rounded but each result."""
    exact = [Fraction(value) for value in values]
    mean = sum(exact, Fraction()) / max(len(exact), 1)
    variance = sum((x - mean) ** 2 for x in exact) / max(len(exact) - 1, 1)
    scale = 1 / math.sqrt(variance + Fraction(1e-8))
    return [float(x - mean) * scale + (0 if shift_mean else float(mean)) for x in exact]
