"""Advantage estimators without a critic, against the definitions of other trainers."""

import math
from dataclasses import replace

import pytest
import torch

from puzzle_align.algos.estimators import Samples, estimator

# Six samples of up to three tokens: three responses to prompt 4, two to prompt 7, one to prompt 9.
PROMPTS = torch.tensor([4, 7, 4, 9, 7, 4])
LENGTHS = torch.tensor([3, 1, 2, 3, 2, 1])
MASK = torch.arange(3) < LENGTHS[:, None]


def samples(rewards: list[float], has_score: list[bool] | None = None) -> Samples:
    """Samples whose last tokens earn these rewards, the others nothing."""
    table = torch.zeros(6, 3, dtype=torch.float64)
    table[torch.arange(6), LENGTHS - 1] = torch.tensor(rewards, dtype=torch.float64)
    return Samples(
        rewards=table,
        mask=MASK,
        has_score=torch.tensor(has_score or [True] * 6),
        ended=torch.ones(6, dtype=torch.bool),
        prompts=PROMPTS,
        gamma=1.0,
        lam=1.0,
    )


def test_rloo_by_hand() -> None:
    advantages, returns = estimator("rloo")(samples([1.0, 5.0, 4.0, 8.0, 2.0, 10.0]))
    # Prompt 4: 1 - 7, 4 - 5.5, 10 - 2.5; prompt 7: 5 - 2, 2 - 5; prompt 9 has nobody beside it.
    expected = torch.tensor([-6.0, 3.0, -1.5, 0.0, -3.0, 7.5], dtype=torch.float64)
    assert returns is None
    torch.testing.assert_close(advantages, expected[:, None] * MASK)


@pytest.mark.parametrize("absent", range(6))
def test_rloo_compares_scored_responses_alone(absent: int) -> None:
    """The others get what they would without the one that has no score."""
    rewards = [1.0, 5.0, 4.0, 8.0, 2.0, 10.0]
    advantages, _ = estimator("rloo")(samples(rewards, [place != absent for place in range(6)]))
    for place in range(6):
        others = [
            rewards[other]
            for other in range(6)
            if PROMPTS[other] == PROMPTS[place] and other not in (place, absent)
        ]
        if place != absent:
            expected = rewards[place] - sum(others) / len(others) if others else 0.0
            assert advantages[place, 0].item() == pytest.approx(expected)


def test_remax_by_hand_and_without_a_greedy_score() -> None:
    """Prompt 7's greedy response has none: its samples have nothing to be compared with."""
    baselines = torch.tensor([3.0, math.nan, 3.0, 0.5, math.nan, 3.0])
    given = replace(samples([1.0, 5.0, 4.0, 8.0, 2.0, 10.0]), baselines=baselines)
    advantages, _ = estimator("remax")(given)
    expected = torch.tensor([-2.0, 0.0, 1.0, 7.5, 0.0, 7.0], dtype=torch.float64)
    assert torch.equal(advantages, expected[:, None] * MASK)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "opo", "remax", "reinforce_plus_plus"])
def test_who_owns_no_sample_has_no_advantage(name: str) -> None:
    whole = replace(samples([1.0] * 6), baselines=torch.zeros(6))
    none = {key: value[:0] for key, value in vars(whole).items() if torch.is_tensor(value)}
    assert estimator(name)(replace(whole, **none))[0].shape == (0, 3)
