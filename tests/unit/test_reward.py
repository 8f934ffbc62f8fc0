"""The reward loss: values by hand, a float64 reference, gradients; and a reward model's metrics."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from puzzle_align.algos.preference import bradley_terry_loss
from puzzle_align.telemetry.preference_metrics import REWARD_COLUMNS, rows, summarize_rewards
from tests.bounds import fp32_bound

LOG3 = math.log(3)
# s(ln 3) = 3/4 and s(-ln 3) = 1/4, so -ln s is ln(4/3) and ln 4.
RIGHT, WRONG = math.log(4 / 3), math.log(4)


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "coefficient", "loss"),
    [
        (2.0, 2.0, 0.0, 0.0, math.log(2)),
        (1.0 + LOG3, 1.0, 0.0, 0.0, RIGHT),
        (1.0, 1.0 + LOG3, 0.0, 0.0, WRONG),
        # the margin is taken off the difference: 2 ln 3 - ln 3, and ln 3 - 2 ln 3
        (2 * LOG3, 0.0, LOG3, 0.0, RIGHT),
        (LOG3, 0.0, 2 * LOG3, 0.0, WRONG),
        (0.0, 0.0, -LOG3, 0.0, RIGHT),
        # (3 + 1)^2 / 100 more; nothing where the rewards are opposite
        (3.0, 1.0, 2.0, 0.01, math.log(2) + 0.16),
        (LOG3 / 2, -LOG3 / 2, 0.0, 5.0, RIGHT),
    ],
)
def test_values_by_hand(chosen, rejected, margin, coefficient, loss) -> None:
    values = (torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected, margin))
    found = bradley_terry_loss(*values, center_rewards_coefficient=coefficient)
    assert found.shape == (1,)
    assert found.item() == pytest.approx(loss, abs=1e-12)


def test_float32_agrees_with_a_plain_float64_reference() -> None:
    chosen, rejected, margins = 3 * torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    wanted = []
    for c, r, m in zip(chosen.tolist(), rejected.tolist(), margins.tolist(), strict=True):
        wanted.append(math.log1p(math.exp(-(c - r - m))) + 0.01 * (c + r) ** 2)
    found = bradley_terry_loss(chosen, rejected, margins, center_rewards_coefficient=0.01)
    assert found.dtype == torch.float32
    # Chosen less rejected less margin is rounded in float32, at the size of the largest of them.
    bound = fp32_bound(3) * (1 + chosen.abs() + rejected.abs() + margins.abs()).double()
    assert ((found.double() - torch.tensor(wanted, dtype=torch.float64)).abs() <= bound).all()


def test_the_loss_of_a_hopeless_pair_is_finite() -> None:
    far = bradley_terry_loss(*torch.tensor([[-500.0], [500.0], [0.0]]))
    assert far.item() == pytest.approx(1000.0)


def test_gradients() -> None:
    values = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(
        lambda v: bradley_terry_loss(v[0], v[1], v[2], center_rewards_coefficient=0.3), values
    )


def test_metrics_of_four_pairs_by_hand() -> None:
    chosen, rejected = torch.tensor([[2.0, 0.5, -1.0, 0.5], [1.0, 0.5, -0.75, 0.25]])
    losses = torch.tensor([0.5, 0.25, 1.05, 0.6], requires_grad=True)
    values = rows(losses, chosen, rejected)
    assert values.shape == (4, len(REWARD_COLUMNS)) and values.dtype == torch.float64
    assert not values.requires_grad
    assert summarize_rewards(values) == {
        "loss": pytest.approx(0.6),
        "accuracy": pytest.approx(2.5 / 4),  # right, a tie, wrong, right
        "margin": pytest.approx(0.25),
        "min_reward": -1.0,
        "mean_reward": pytest.approx(3.0 / 8),
        "max_reward": 2.0,
    }
