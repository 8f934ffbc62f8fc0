"""PPO's losses and metrics: values by hand, a plain Python reference, gradients, any split."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from puzzle_align.algos.ppo import (
    KL_SUMS,
    POLICY_SUMS,
    VALUE_SUMS,
    entropy_bonus,
    kl_loss,
    policy_loss,
    value_loss,
)

# All but the last test is in float64, of numbers of order one: a rounding is 1e-16, sums of a few
# stay within 1e-14, sums of many tokens or small differences of larger numbers within 1e-12.
LOG2 = math.log(2)
CLIP: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": None}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def randoms(rows: int, num: int, seed: int) -> torch.Tensor:
    return torch.randn(
        rows, num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


# Ratios 2, 2, 1/2, 1/2, 1: what the clipping at 0.8 and 1.3 does depends on the advantage's sign.
LOG_RATIOS = tensor(LOG2, LOG2, -LOG2, -LOG2, 0.0)
ADVANTAGES = tensor(1.0, -1.0, 1.0, -1.0, 3.0)
LOSSES = [
    -1.3,  # better and already likelier: clipped
    2.0,  # worse and likelier: not
    -0.5,  # better and less likely: not
    0.8,  # worse and already less likely: clipped
    -3.0,
]


def test_policy_loss_by_hand() -> None:
    old_logps = tensor(-1.0, -2.0, -3.0, -4.0, -5.0)
    logps = (old_logps + LOG_RATIOS).requires_grad_()
    loss, sums = policy_loss(logps, old_logps, ADVANTAGES, **CLIP, num_tokens=10)
    assert loss.item() == pytest.approx(sum(LOSSES) / 10, rel=1e-14)
    assert dict(zip(POLICY_SUMS, sums.tolist(), strict=True)) == {
        "loss/policy_avg": pytest.approx(sum(LOSSES), rel=1e-14),
        "policy/approxkl_avg": pytest.approx(4 * LOG2**2 / 2, rel=1e-14),
        "policy/clipfrac_avg": 2.0,
        "val/ratio": pytest.approx(6.0, rel=1e-14),
        "clip_ratio/low_mean": 1.0,
        "clip_ratio/high_mean": 1.0,
    }
    assert not sums.requires_grad
    # -A r / 10 where it is not clipped
    (gradient,) = torch.autograd.grad(loss, logps)
    assert gradient.tolist() == pytest.approx([0.0, 0.2, -0.05, 0.0, -0.3], rel=1e-14)


def test_dual_clip_by_hand() -> None:
    """At c = 1.5 the second token, worse and twice as likely, counts as 1.5 times as likely."""
    logps = (LOG_RATIOS - 1.0).requires_grad_()
    clip = {**CLIP, "clip_ratio_c": 1.5}
    loss, sums = policy_loss(logps, tensor(*[-1.0] * 5), ADVANTAGES, **clip, num_tokens=10)
    losses = [-1.3, 1.5, -0.5, 0.8, -3.0]
    assert loss.item() == pytest.approx(sum(losses) / 10, rel=1e-14)
    assert dict(zip(POLICY_SUMS, sums.tolist(), strict=True))["policy/clipfrac_avg"] == 3.0
    (gradient,) = torch.autograd.grad(loss, logps)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -0.05, 0.0, -0.3], rel=1e-14)


def test_a_dual_clip_of_negative_advantages_alone() -> None:
    """A ratio of 2 with an advantage above 0, or of 0, is none of its business."""
    logps, clip = tensor(LOG2, LOG2), {**CLIP, "clip_ratio_high": 2.0, "clip_ratio_c": 1.5}
    loss, sums = policy_loss(logps, tensor(0.0, 0.0), tensor(1.0, 0.0), **clip, num_tokens=1)
    assert loss.item() == pytest.approx(-2.0, rel=1e-14) and sums[2] == 0.0


@pytest.mark.parametrize("apart", [21.5, 1000.0, math.inf])
def test_log_ratios_are_bounded(apart: float) -> None:
    """Ratios of e^20 and e^-20 without a gradient: at the farthest probabilities all is finite."""
    logps = tensor(-1.0, -apart).requires_grad_()
    old_logps = tensor(-apart, -1.0)
    loss, sums = policy_loss(logps, old_logps, tensor(-1.0, -1.0), **CLIP, num_tokens=1)
    assert loss.item() == pytest.approx(math.exp(20) + 0.8, rel=1e-14)
    found = dict(zip(POLICY_SUMS, sums.tolist(), strict=True))
    assert found["policy/approxkl_avg"] == 400.0
    assert found["val/ratio"] == pytest.approx(math.exp(20), rel=1e-14)
    assert torch.autograd.grad(loss, logps)[0].tolist() == [0.0, 0.0]


def test_the_first_step_follows_the_policy_gradient() -> None:
    """At ratio 1 the gradient is -A, clipping or none; the loss is minus the mean advantage."""
    logps, advantages = randoms(2, 7, seed=0)
    current = logps.clone().requires_grad_()
    none = {**CLIP, "clip_ratio_low": 0.0, "clip_ratio_high": 0.0}
    for clip in (CLIP, none):
        loss, sums = policy_loss(current, logps, advantages, **clip, num_tokens=7)
        assert loss.item() == pytest.approx(-advantages.mean().item(), rel=1e-14)
        assert sums[1:].tolist() == [0.0, 0.0, 7.0, 0.0, 0.0]
    loss, _ = policy_loss(current, logps, advantages, **CLIP, num_tokens=7)
    (gradient,) = torch.autograd.grad(loss, current)
    torch.testing.assert_close(gradient, -advantages / 7, rtol=1e-14, atol=0)


# Old value 1, range 1/2: (value, return, half the greater square, whether clipped, slope).
VALUE_CASES = [
    (1.25, 3.0, 1.75**2 / 2, 0.0, -1.75),  # within the range
    (2.0, 3.0, 1.5**2 / 2, 1.0, 0.0),  # beyond, on the way to the target
    (0.0, 3.0, 9.0 / 2, 0.0, -3.0),  # beyond, on the way from it
    (-1.0, -2.0, 2.5**2 / 2, 1.0, 0.0),
]


@pytest.mark.parametrize(("value", "target", "loss", "clipped", "slope"), VALUE_CASES)
def test_value_loss_by_hand(
    value: float, target: float, loss: float, clipped: float, slope: float
) -> None:
    values = tensor(value).requires_grad_()
    found, sums = value_loss(values, tensor(1.0), tensor(target), clip_range=0.5, num_tokens=4)
    assert found.item() == pytest.approx(loss / 4, rel=1e-14)
    assert sums.tolist() == pytest.approx([loss, clipped], rel=1e-14)
    assert torch.autograd.grad(found, values)[0].item() == pytest.approx(slope / 4, abs=1e-14)


def test_value_loss_without_clipping_by_hand() -> None:
    values, old_values, returns = tensor(2.0, 0.0), tensor(1.0, 1.0), tensor(3.0, 3.0)
    loss, sums = value_loss(values, old_values, returns, clip_range=None, num_tokens=2)
    assert (loss.item(), *sums.tolist()) == (2.5, 5.0, 0.0)


def test_entropy_bonus_by_hand() -> None:
    entropies = tensor(LOG2, 3 * LOG2).requires_grad_()
    loss = entropy_bonus(entropies, coefficient=0.5, num_tokens=8)
    assert loss.item() == pytest.approx(-LOG2 / 4, rel=1e-14)
    assert torch.autograd.grad(loss, entropies)[0].tolist() == [-1 / 16, -1 / 16]


def test_kl_loss_by_hand() -> None:
    """A token half as likely under the reference: k3 = 1/2 - 1 + ln 2, of slope 1 - 1/2."""
    logps = tensor(-LOG2, -1.0).requires_grad_()
    rest: dict[str, Any] = {"estimator": "k3", "coefficient": 0.1, "num_tokens": 4}
    loss, sums = kl_loss(logps, tensor(-2 * LOG2, -1.0), **rest)
    assert sums.tolist() == pytest.approx([LOG2 - 0.5], rel=1e-14)
    assert loss.item() == pytest.approx(0.1 * (LOG2 - 0.5) / 4, rel=1e-14)
    assert torch.autograd.grad(loss, logps)[0].tolist() == pytest.approx([0.1 * 0.5 / 4, 0.0])
    # Times the token's probability ratio, which is at most e^20.
    for old, ratio in ((-2 * LOG2, 2.0), (-1000.0, math.exp(20))):
        loss, _ = kl_loss(logps, tensor(-2 * LOG2, -1.0), old_logps=tensor(old, -1.0), **rest)
        assert loss.item() == pytest.approx(ratio * 0.1 * (LOG2 - 0.5) / 4, rel=1e-14)


def plain_policy(
    logps: list[float], old_logps: list[float], advantages: list[float], c: float = math.inf
) -> tuple[float, ...]:
    total = approx_kl = num_clipped = ratios = num_low = num_high = 0.0
    for new, old, advantage in zip(logps, old_logps, advantages, strict=True):
        ratio = math.exp(new - old)
        near = min(max(ratio, 0.8), 1.3)
        worst = c * advantage if advantage < 0 else -math.inf
        gain = min(ratio * advantage, near * advantage)
        total -= max(gain, worst)
        approx_kl += 0.5 * (new - old) ** 2
        num_clipped += near * advantage < ratio * advantage or gain < worst
        ratios += ratio
        num_low += ratio < 0.8 and advantage < 0
        num_high += ratio > 1.3 and advantage > 0
    return total, approx_kl, num_clipped, ratios, num_low, num_high


def plain_value(
    values: list[float], old_values: list[float], returns: list[float]
) -> tuple[float, float]:
    total = num_clipped = 0.0
    for value, old, target in zip(values, old_values, returns, strict=True):
        near = min(max(value, old - 0.2), old + 0.2)
        total += max((value - target) ** 2, (near - target) ** 2) / 2
        num_clipped += (near - target) ** 2 > (value - target) ** 2
    return total, num_clipped


@given(st.integers(0, 20), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_losses_and_sums_equal_a_plain_reference(num: int, seed: int) -> None:
    """A microbatch without tokens (a padding row) has a loss of 0."""
    new, old, other = randoms(3, num, seed)
    for c in (None, 1.5):
        clip = {**CLIP, "clip_ratio_c": c}
        loss, sums = policy_loss(new, old, other, **clip, num_tokens=30)
        wanted = plain_policy(new.tolist(), old.tolist(), other.tolist(), c or math.inf)
        expected = pytest.approx((wanted[0], *wanted), abs=1e-11)
        assert (loss.item() * 30, *sums.tolist()) == expected
    loss, sums = value_loss(new, old, other, clip_range=0.2, num_tokens=30)
    wanted = plain_value(new.tolist(), old.tolist(), other.tolist())
    assert (loss.item() * 30, *sums.tolist()) == pytest.approx((wanted[0], *wanted), abs=1e-11)


def all_terms(
    x: torch.Tensor, rest: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The four terms' sum at ``x``, and all metrics' sums."""
    clip = {**CLIP, "clip_ratio_c": 1.5}
    policy, policy_sums = policy_loss(x, rest[0], rest[1], **clip, num_tokens=num_tokens)
    value, value_sums = value_loss(x, rest[0], rest[1], clip_range=0.2, num_tokens=num_tokens)
    bonus = entropy_bonus(x**2, coefficient=0.3, num_tokens=num_tokens)
    kl, kl_sums = kl_loss(x, rest[0], estimator="k2", coefficient=0.1, num_tokens=num_tokens)
    sums = torch.cat([policy_sums, value_sums, kl_sums])
    assert len(sums) == len(POLICY_SUMS) + len(VALUE_SUMS) + len(KL_SUMS)
    return policy + value + bonus + kl, sums


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_microbatches_add_up_to_the_whole(sizes: list[int], seed: int) -> None:
    """Losses, gradients and metrics, however unevenly the tokens are split."""
    num = sum(sizes)
    x, *rest = randoms(3, num, seed)
    x, rest, total = x.requires_grad_(), torch.stack(rest), max(num, 1)
    whole, whole_sums = all_terms(x, rest, total)
    (gradient,) = torch.autograd.grad(whole, x)
    parts = [
        all_terms(part, others, total)
        for part, others in zip(x.split(sizes), rest.split(sizes, dim=1), strict=True)
    ]
    together = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(together, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(together, x)[0], gradient, rtol=1e-12, atol=0)
    sums = torch.stack([sums for _, sums in parts]).sum(0)
    torch.testing.assert_close(sums, whole_sums, rtol=1e-12, atol=1e-12)


def test_gradients() -> None:
    x, *rest = randoms(3, 12, seed=5)
    assert gradcheck(lambda x: all_terms(x, torch.stack(rest), 12)[0], x.requires_grad_())


def test_float32_agrees_with_float64() -> None:
    """Log-probabilities of float32 are subtracted exactly: only their own rounding is left."""
    new, old, other = randoms(3, 200, seed=2).float()
    single = policy_loss(new, old, other, **CLIP, num_tokens=200)
    double = policy_loss(new.double(), old.double(), other.double(), **CLIP, num_tokens=200)
    assert single[0].dtype == torch.float64
    assert torch.equal(single[0], double[0]) and torch.equal(single[1], double[1])
