"""Training data from samples: those without a score, statistics of all, distance from sampling."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from puzzle_align.config.sections.rl import PPOConfig
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rl.experience import KEPT, Scored, columns_to_learn, make_experience
from tests.refusals import refusal

# Four samples of 3, 2, 3 and 1 tokens; the third has no score.
LENGTHS = torch.tensor([3, 2, 3, 1])
WITHOUT = 2


def scored(seed: int = 0) -> Scored:
    generator = torch.Generator().manual_seed(seed)
    logps, ref_logps, values = torch.randn(3, 4, 3, dtype=torch.float64, generator=generator)
    return Scored(
        samples=[3, 5, 6, 9],
        mask=torch.arange(3) < LENGTHS[:, None],
        stopped=torch.tensor([True, False, True, True]),
        logps=logps,
        ref_logps=ref_logps,
        values=values,
        final_values=torch.ones(4, dtype=torch.float64),
        scores=torch.tensor([1.0, -1.0, math.nan, 0.5], dtype=torch.float64),
        prompts=torch.tensor([0, 0, 1, 2]),
    )


def rows(scored: Scored, keep: list[int]) -> Scored:
    parts = {
        name: value[keep] for name, value in vars(scored).items() if isinstance(value, torch.Tensor)
    }
    return replace(scored, samples=[scored.samples[row] for row in keep], **parts)


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(),
        PPOConfig(whiten_rewards=True, missing_eos_penalty=1.0, cliprange_reward=0.7),
        PPOConfig(whiten_advantages=False, use_kl_loss=True, kl_estimator="k3"),
    ],
)
def test_a_sample_without_a_score_does_not_train_and_changes_none(config: PPOConfig) -> None:
    """The others learn what they do where it was never sampled."""
    given = scored()
    found = make_experience(config, given, 0.1, lambda sums: sums)
    alone = make_experience(config, rows(given, [0, 1, 3]), 0.1, lambda sums: sums)
    assert [*alone.columns] == [*columns_to_learn(config, has_critic=True)]
    for name, items in alone.columns.items():
        for sample, values in items.items():
            np.testing.assert_allclose(found.columns[name][sample], values, 1e-14, 1e-14)
    assert found.columns["advantages"][6].tolist() == [0.0, 0.0, 0.0]
    assert given.values is not None
    assert found.columns["returns"][6].tolist() == given.values[WITHOUT].tolist()
    assert found.scores[WITHOUT].isnan() and found.scores[[0, 1, 3]].isfinite().all()
    assert found.rewards.isfinite().all()


@pytest.mark.parametrize(("in_loss", "coefficient"), [(False, 0.1), (True, 0.0)])
def test_the_kl_is_in_the_rewards_unless_it_is_in_the_loss(
    in_loss: bool, coefficient: float
) -> None:
    """Estimated with k3; what is reported is k1. Advantages are whitened, their mean too."""
    given = scored()
    given = replace(given, ref_logps=given.logps + given.ref_logps / 4)  # no estimate is capped
    config = PPOConfig(kl_estimator="k3", use_kl_loss=in_loss, whiten_advantages=True)
    found = make_experience(config, given, 0.1, lambda sums: sums)
    k1 = given.logps - given.ref_logps
    wanted = -coefficient * ((-k1).exp() - 1 + k1)
    wanted[torch.arange(4), LENGTHS - 1] += given.scores.nan_to_num()
    torch.testing.assert_close(found.rewards[given.mask], wanted[given.mask])
    torch.testing.assert_close(found.kls[given.mask], k1[given.mask])
    learned = np.concatenate([found.columns["advantages"][sample] for sample in (3, 5, 9)])
    assert (learned.mean(), learned.std(ddof=1)) == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize(("value", "said"), [(math.nan, "nan"), (-1e39, "-1e+39")])
def test_a_number_that_float32_does_not_have_ends_the_job(value: float, said: str) -> None:
    given = scored()
    for what, table in (
        ("actor's log-probability", given.logps),
        ("reference's log-probability", given.ref_logps),
        ("critic's value", given.values),
        ("critic's last value", given.final_values),
    ):
        assert table is not None
        token = table.view(4, -1)[1, -1:]
        old, token[:] = token.clone(), value
        line = refusal(lambda: make_experience(PPOConfig(), given, 0.1, lambda s: s), CannotGoOn)
        token[:] = old
        assert line.startswith(f"the {what} of a token of response 5 of the iteration is {said}, ")


def test_what_whitening_would_hide_ends_the_job() -> None:
    """A reward below what float32 has, and a return: the KL of three tokens, which each has."""
    config = PPOConfig(whiten_rewards=True, whiten_advantages=True)
    given = scored()
    given.scores[0] = -1e39
    line = refusal(lambda: make_experience(config, given, 0.1, lambda s: s), CannotGoOn)
    assert line.startswith("the reward less the KL of a token of response 3 of the iteration is -1")
    given.scores[0], given.logps[0], plain = 1.0, 2e38, PPOConfig(whiten_advantages=True)
    line = refusal(lambda: make_experience(plain, given, 1.0, lambda s: s), CannotGoOn)
    assert line.startswith("the return of a token of response 3 of the iteration is -")


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(whiten_rewards=True),
        PPOConfig(advantage_estimator="grpo", scale_rewards="batch", whiten_advantages=False),
    ],
)
def test_statistics_are_of_all_owners_samples(config: PPOConfig) -> None:
    """Two owners, each with whole groups, learn what one does that has all samples."""
    given, totals = scored(), []

    def keep(sums: torch.Tensor) -> torch.Tensor:
        totals.append(sums)
        return sums

    whole = make_experience(config, given, 0.1, keep)
    parts: list[list[torch.Tensor]] = []
    for own in ([0, 1], [2, 3]):
        asked: list[torch.Tensor] = []

        def of_all(sums: torch.Tensor, asked: list[torch.Tensor] = asked) -> torch.Tensor:
            asked.append(sums)
            return totals[len(asked) - 1]

        found = make_experience(config, rows(given, own), 0.1, of_all)
        for name, items in found.columns.items():
            for sample, values in items.items():
                np.testing.assert_allclose(values, whole.columns[name][sample], 1e-13, 1e-13)
        parts.append(asked)
    assert len(totals) >= 2
    for total, *owned in zip(totals, *parts, strict=True):
        torch.testing.assert_close(sum(owned), total)


@pytest.mark.parametrize(("mode", "count"), [("token_truncate", 9), ("sequence_truncate", 4)])
def test_distances_from_the_sampling_policy_are_of_tokens_or_of_responses(
    mode: Literal["token_truncate", "sequence_truncate"], count: int
) -> None:
    """Five of nine tokens, none of the second response, were likelier by e^(1/4) in sampling."""
    given = scored()
    away = torch.tensor([0.25, 0.0, 0.25], dtype=torch.float64).repeat(4, 1)
    away[1] = 0.0
    given = replace(given, sampled_logps=given.logps + away)
    config = PPOConfig(importance_sampling_mode=mode, importance_sampling_cap=3.0)
    differences, corrections = make_experience(config, given, 0.1, lambda s: s).off_policy()
    assert differences == (9, pytest.approx(5 * 0.25), 0.0, pytest.approx(0.25))
    of_tokens = [math.exp(-0.25)] * 5 + [1.0] * 4
    of_responses = [math.exp(-0.5), 1.0, math.exp(-0.5), math.exp(-0.25)]
    wanted = of_tokens if mode == "token_truncate" else of_responses
    assert corrections == (count, *map(pytest.approx, (sum(wanted), min(wanted), max(wanted))))


def test_a_response_that_was_cut_off_may_be_left_out_of_the_policy_s_loss() -> None:
    """The second sample; it stays in all else."""
    config = PPOConfig(mask_truncated_completions=True)
    columns = make_experience(config, scored(), 0.1, lambda sums: sums).columns
    kept = {sample: values.tolist() for sample, values in columns[KEPT].items()}
    assert kept == {3: [1.0] * 3, 5: [0.0] * 2, 6: [1.0] * 3, 9: [1.0]}
    plain = make_experience(PPOConfig(), scored(), 0.1, lambda sums: sums).columns
    assert columns["advantages"][5].tolist() == plain["advantages"][5].tolist() != [0.0, 0.0]
