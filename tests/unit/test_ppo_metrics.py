"""Metrics of sampled responses and of updates, against numbers derived by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from puzzle_align.telemetry.ppo_metrics import (
    SUMS,
    function_metrics,
    length_metrics,
    logged_metrics,
    rollout_metrics,
    rollout_sums,
    sampling_metrics,
    spread_of,
    update_metrics,
)

NAN = math.nan  # beyond a response's end nothing is read

# Three responses of 2, 3 and 1 tokens: stopped, cut off, and nothing but a stop token.
SCORES = torch.tensor([1.0, 3.0, -1.0])
LENGTHS = torch.tensor([2, 3, 1])
MASK = torch.arange(3) < LENGTHS[:, None]
STOPPED = torch.tensor([True, False, True])
KLS = torch.tensor([[0.5, 0.25, NAN], [1.0, -0.5, 0.25], [0.0, NAN, NAN]])
LOGPS = torch.tensor([[-1.0, -2.0, NAN], [-0.5, -0.5, -1.0], [-4.0, NAN, NAN]])
COEFFICIENT = 0.1


def _rewards() -> Tensor:
    rewards = -COEFFICIENT * KLS.double()
    rewards[torch.arange(3), LENGTHS - 1] += SCORES
    return rewards


def _sums(rows: slice = slice(None), **others: Tensor) -> Tensor:
    given = {"scores": SCORES, "rewards": _rewards(), "kls": KLS, "logps": LOGPS}
    given |= {"stopped": STOPPED, "mask": MASK, "prompts": torch.arange(3), **others}
    return rollout_sums(**{name: value[rows] for name, value in given.items()})


def test_metrics_of_three_responses_by_hand():
    assert rollout_metrics(_sums()) == {
        "objective/scores": pytest.approx(1.0),
        "reward_std": pytest.approx(2.0),  # (0 + 4 + 4) / 2
        "objective/kl": pytest.approx(0.5),  # (0.75 + 0.75 + 0) / 3
        "objective/entropy": pytest.approx(3.0),  # (3 + 2 + 4) / 3
        "objective/non_score_reward": pytest.approx(-0.05),
        "objective/rlhf_reward": pytest.approx(0.95),
        "val/num_eos_tokens": 2.0,
        "completions/mean_length": 2.0,
        "completions/num_empty": 1.0,
    }


@pytest.mark.parametrize("cut", range(4))
def test_ranks_may_add_their_sums_and_some_have_no_response(cut):
    whole = _sums()
    assert whole.dtype == torch.float64 and whole.shape == (len(SUMS),)
    torch.testing.assert_close(_sums(slice(cut)) + _sums(slice(cut, None)), whole)


def test_a_single_response_has_no_spread():
    assert rollout_metrics(_sums(slice(1)))["reward_std"] == 0.0


def test_a_response_that_was_cut_off_is_not_empty():
    assert rollout_metrics(_sums(slice(2)))["completions/num_empty"] == 0.0


def test_responses_without_a_score_are_counted_and_left_out_of_scores():
    """The second: what is left are the scores 1 and -1, and KLs of 0.75 and 0."""
    scores = torch.tensor([1.0, NAN, -1.0])
    found = rollout_metrics(_sums(scores=scores))
    assert found["completions/num_unscored"] == 1.0
    assert found["objective/scores"] == 0.0
    assert found["reward_std"] == pytest.approx(math.sqrt(2))
    assert found["objective/non_score_reward"] == pytest.approx(-0.1 * 0.75 / 2)
    assert found["objective/rlhf_reward"] == pytest.approx(-0.1 * 0.75 / 2)
    assert found["objective/kl"] == pytest.approx(0.5)  # of all
    assert math.isnan(rollout_metrics(_sums(scores=scores * NAN))["objective/scores"])


def test_groups_by_hand() -> None:
    """Scores 1, 3 and none, and 5, 5 and none to two prompts; -1 and none to a third."""
    scores = torch.tensor([1.0, 5.0, 3.0, 5.0, -1.0, NAN, NAN, NAN])
    mask = torch.ones(8, 1, dtype=torch.bool)
    zeros = torch.zeros(8, 1)
    given = {"rewards": zeros, "kls": zeros, "logps": zeros, "mask": mask, "stopped": mask[:, 0]}
    found = rollout_sums(scores=scores, prompts=torch.tensor([7, 2, 7, 2, 4, 4, 2, 7]), **given)
    metrics = rollout_metrics(found)
    assert metrics["reward_std"] == pytest.approx(math.sqrt(6.8))  # (61 - 5 * 2.6 ** 2) / 4
    assert metrics["frac_reward_zero_std"] == 0.5
    assert "frac_reward_zero_std" not in rollout_metrics(_sums())


def test_the_explained_variance_is_that_of_scored_tokens_on_all_ranks() -> None:
    """1 - Var(returns - values) / Var(returns), as in verl; nothing if all returns are equal."""
    draw = np.random.default_rng(3)
    values, returns = (torch.from_numpy(draw.normal(size=(3, 4)) + 5.0) for _ in range(2))
    mask = torch.arange(4) < torch.tensor([3, 4, 2])[:, None]
    scores = torch.tensor([1.0, math.nan, 2.0])
    empty = torch.zeros(3, 4, dtype=torch.float64)

    def metrics(returns: torch.Tensor) -> dict[str, float]:
        given = {"scores": scores, "rewards": empty, "kls": empty, "logps": empty, "mask": mask}
        given |= {"stopped": torch.ones(3, dtype=torch.bool), "prompts": torch.arange(3)}
        given |= {"values": values, "returns": returns}
        ranks = [{name: x[rows] for name, x in given.items()} for rows in ([0], [1, 2])]
        return rollout_metrics(torch.stack([rollout_sums(**rank) for rank in ranks]).sum(dim=0))

    used = mask & ~scores.isnan()[:, None]
    left, whole = (returns - values)[used].var(), returns[used].var()
    assert metrics(returns)["val/explained_var"] == pytest.approx((1 - left / whole).item())
    assert "val/explained_var" not in metrics(torch.full((3, 4), 5.1, dtype=torch.float64))
    assert "val/explained_var" not in rollout_metrics(_sums())


def test_lengths_by_hand() -> None:
    lengths, stopped = np.array([4, 2, 9, 9]), np.array([True, True, False, False])
    assert length_metrics(lengths, stopped) == {
        "completions/min_length": 2.0,
        "completions/max_length": 9.0,
        "completions/clipped_ratio": 0.5,
        "completions/mean_terminated_length": 3.0,
        "completions/min_terminated_length": 2.0,
        "completions/max_terminated_length": 4.0,
    }
    none = length_metrics(lengths, np.zeros(4, dtype=bool))
    assert none["completions/mean_terminated_length"] == 0.0
    assert none["completions/clipped_ratio"] == 1.0


def test_metrics_of_reward_functions_by_hand():
    rewards = torch.tensor([[1.0, NAN, 5.0], [NAN, NAN, NAN], [3.0, NAN, NAN]]).double()
    found = function_metrics(["a", "b", "c"], rewards)
    assert list(found) == [f"rewards/{name}/{what}" for name in "abc" for what in ("mean", "std")]
    assert found["rewards/a/mean"] == 2.0
    assert found["rewards/a/std"] == pytest.approx(math.sqrt(2))  # (1 + 1) / 1
    assert math.isnan(found["rewards/b/mean"]) and math.isnan(found["rewards/b/std"])
    assert (found["rewards/c/mean"], found["rewards/c/std"]) == (5.0, 0.0)


def test_what_functions_log_is_a_mean_over_all_calls():
    by_rank = [{"x": [1.0, 2.0]}, {}, {"y": [4.0], "x": [6.0]}]
    assert logged_metrics(by_rank) == {"x": 3.0, "y": 4.0}


def test_sums_hold_no_graph():
    assert not _sums(logps=LOGPS.clone().requires_grad_()).requires_grad


def test_means_over_updates_by_hand():
    updates = [{"loss/policy_avg": 1.0, "val/ratio": 0.5}, {"loss/policy_avg": 2.0, "val/ratio": 2}]
    assert update_metrics(updates) == {
        "loss/policy_avg": 1.5,
        "val/ratio": 1.25,
        "val/ratio_var": 1.125,  # 2 * 0.75 ** 2 / 1
    }
    assert update_metrics([*updates, updates[0]])["val/ratio_var"] == 0.75  # (0.5 + 1) / 2
    assert update_metrics(updates[:1])["val/ratio_var"] == 0.0
    assert update_metrics([{"loss/value_avg": 3.0}]) == {"loss/value_avg": 3.0}
    without_policy = {"loss/value_avg": 3.0}
    assert update_metrics([updates[0], without_policy]) == {
        "loss/policy_avg": 1.0,
        "val/ratio": 0.5,
        "val/ratio_var": 0.0,
        "loss/value_avg": 3.0,
    }


def test_distances_from_the_sampling_policy_by_hand() -> None:
    """Tokens of three ranks: three, one and none; without corrections these have no metrics."""
    differences = [spread_of(torch.tensor(own)) for own in ([0.5, 0.0, 0.25], [1.25], [])]
    corrections = [spread_of(torch.tensor(own)) for own in ([1.5, 0.5], [2.0], [])]
    logp, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    found = {f"{logp}/mean": 0.5, f"{logp}/max": 1.25}
    ratios = {f"{ratio}/min": 0.5, f"{ratio}/mean": 4 / 3, f"{ratio}/max": 2.0}
    assert sampling_metrics(differences, corrections) == found | ratios
    assert sampling_metrics(differences, [spread_of(torch.zeros(0))] * 3) == found
