"""Estimators and policy losses without a critic, against verl's own code.

``tests/golden/make_grpo_verl.py`` makes the numbers, in float64.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.algos.advantages import deviation_sums, moment_sums, whiten
from puzzle_align.algos.estimators import Samples, estimator, grpo
from puzzle_align.algos.ppo import (
    POLICY_SUMS,
    LossCounts,
    entropy_bonus,
    kl_loss,
    policy_loss,
    sampling_corrections,
    token_weights,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "grpo_verl.json").read_text())
CASES = GOLDEN["cases"]
MASKED_OUT = 2  # a response that the loss leaves out


def table(case: dict[str, Any], name: str) -> torch.Tensor:
    return torch.tensor(case[name], dtype=torch.float64)


def samples(case: dict[str, Any], **changes: Any) -> Samples:
    prompts = torch.tensor(GOLDEN["prompts"])
    everyone, mask = torch.ones(len(prompts), dtype=torch.bool), table(case, "mask").bool()
    given = {
        "rewards": table(case, "rewards").masked_fill(~mask, math.nan),  # of no token
        "mask": mask,
        "has_score": everyone,
        "ended": everyone,
        "prompts": prompts,
        "gamma": GOLDEN["gamma"],
        "lam": 1.0,
        "scale_rewards": "group",
        "baselines": torch.tensor(GOLDEN["baselines"]),
    }
    return Samples(**{**given, **changes})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", sorted(CASES[0]["estimates"]))
def test_estimators_are_verl_s(case: dict[str, Any], name: str, monkeypatch) -> None:
    monkeypatch.setattr(grpo, "EPSILON", 1e-6)  # verl's; ours is TRL's
    given = samples(case)
    advantages, returns = estimator(name)(given)
    assert not advantages[~given.mask].any()
    if name == "reinforce_plus_plus":  # verl whitens there
        sums = moment_sums(advantages, given.mask)
        deviations = deviation_sums(advantages, given.mask, sums)
        advantages = whiten(advantages, given.mask, sums, deviations, shift_mean=True)
    assert returns is None
    wanted = torch.tensor(case["estimates"][name], dtype=torch.float64)
    torch.testing.assert_close(advantages, wanted, rtol=1e-6, atol=1e-6)


def test_grpo_by_hand() -> None:
    """Rewards 1, 2, 6 and 4, 4, 4; three ways to scale; the last response alone has no score."""
    rewards = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 9.0], dtype=torch.float64)[:, None]
    given = {
        "rewards": rewards,
        "mask": torch.ones(6, 1, dtype=torch.bool),
        "has_score": torch.tensor([True] * 5 + [False]),
    }
    centred = torch.tensor([-2.0, -1.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    batch = rewards[:5].std()
    for how, scale in (("group", 7**0.5 + 1e-4), ("batch", batch + 1e-4), ("none", 1.0)):
        made = samples(CASES[0], **given, scale_rewards=how, batch_std=batch)
        advantages, _ = estimator("grpo")(made)
        torch.testing.assert_close(advantages[:5, 0], centred / scale)
    alone = samples(CASES[0], **given | {"has_score": torch.tensor([True] + [False] * 5)})
    for name in ("grpo", "dr_grpo", "rloo", "opo"):
        assert estimator(name)(alone)[0][0].item() == 0.0  # nobody to compare with


def packed(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tokens of a case one after the other, as in a row, with their responses."""
    mask = table(case, "mask").bool()
    found = {name: table(case, name)[mask] for name in ("logps", "old_logps", "advantages")}
    found["response"] = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
    found["length"] = mask.sum(dim=1)[found["response"]]
    return found


def means_of(tokens: dict[str, torch.Tensor]) -> Any:
    def means(values: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [values[tokens["response"] == response].mean() for response in tokens["response"]]
        )

    return means


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("number", range(9))
def test_policy_losses_are_verl_s(case: dict[str, Any], number: int) -> None:
    wanted, tokens = case["losses"][number], packed(case)
    mask = table(case, "mask").bool()
    counts = LossCounts(int(mask.sum()), len(mask), GOLDEN["longest"])
    weights = token_weights(wanted["aggregation"], tokens["length"], counts)
    logps = tokens["logps"].clone().requires_grad_()
    loss, sums = policy_loss(
        logps,
        tokens["old_logps"],
        tokens["advantages"],
        **{name: GOLDEN[name] for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")},
        num_tokens=counts.tokens,
        weights=weights,
        mode=wanted["mode"],
        sequence_means=means_of(tokens),
    )
    loss.backward()
    assert logps.grad is not None
    gradient = torch.tensor(wanted["gradient"], dtype=torch.float64)[mask]
    assert loss.item() == pytest.approx(wanted["loss"], abs=1e-8)
    torch.testing.assert_close(logps.grad, gradient, rtol=1e-6, atol=1e-8)
    assert (sums[0] / counts.tokens).item() == pytest.approx(wanted["loss"], abs=1e-8)
    if wanted["mode"] != "vanilla":  # verl counts the dual clip apart
        assert (sums[2] / counts.tokens).item() == pytest.approx(wanted["clipped"], abs=1e-8)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_masked_response_is_as_if_it_were_never_sampled(aggregation: str) -> None:
    """Its tokens have weight 0, and the others what they would have without it."""
    tokens = packed(CASES[0])
    is_kept = tokens["response"] != MASKED_OUT
    counts = LossCounts(int(is_kept.sum()), 5, GOLDEN["longest"])
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}
    results = []
    for chosen in (torch.ones_like(is_kept), is_kept):
        part = {name: values[chosen] for name, values in tokens.items()}
        weights = token_weights(aggregation, part["length"], counts) * is_kept[chosen]
        size = {"num_tokens": counts.tokens, "weights": weights}
        loss, sums = policy_loss(
            part["logps"], part["old_logps"], part["advantages"], **clips, **size
        )
        bonus = entropy_bonus(part["logps"] ** 2, coefficient=0.1, **size)
        kl, kl_sums = kl_loss(
            part["logps"], part["old_logps"], estimator="k3", coefficient=0.2, **size
        )
        results.append(torch.cat([torch.stack([loss, bonus, kl]), sums, kl_sums]))
    torch.testing.assert_close(*results)


def test_weights_are_shares_of_the_means_they_name() -> None:
    lengths = torch.tensor([1, 3, 3, 3])  # tokens of two responses, of 1 and 3 tokens
    losses = torch.tensor([6.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    counts = LossCounts(tokens=4, responses=2, longest=8)
    for mode, mean in (
        ("token-mean", 12 / 4),
        ("seq-mean-token-sum", (6 + 6) / 2),
        ("seq-mean-token-mean", (6 + 2) / 2),
        ("seq-mean-token-sum-norm", (6 + 6) / 2 / 8),
    ):
        assert (token_weights(mode, lengths, counts) * losses).sum().item() == pytest.approx(mean)
        all_masked = LossCounts(tokens=0, responses=0, longest=8)
        assert token_weights(mode, lengths, all_masked).isfinite().all()


CORRECTED = {  # of log-ratios log 2, log 4 and log 1/2; log 2 and padding
    "token_truncate": [[2.0, 3.0, 0.5], [2.0, 1.0, 1.0]],
    "token_mask": [[2.0, 0.0, 0.5], [2.0, 1.0, 1.0]],
    "sequence_truncate": [[3.0, 3.0, 3.0], [2.0, 1.0, 1.0]],
    "sequence_mask": [[0.0, 0.0, 0.0], [2.0, 1.0, 1.0]],
}


@pytest.mark.parametrize("mode", CORRECTED)
def test_corrections_by_hand(mode: str) -> None:
    """The cap is 3. A response's ratio is the product of its tokens', 2 * 4 / 2."""
    log_ratios = torch.tensor([[2.0, 4.0, 0.5], [2.0, torch.nan, torch.nan]]).double().log()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    sampled = torch.full_like(log_ratios, -1.5)
    found = sampling_corrections(sampled + log_ratios, sampled, mask, mode=mode, cap=3.0)
    torch.testing.assert_close(found, torch.tensor(CORRECTED[mode]).double())


def test_a_corrected_loss_is_the_weighted_sum_of_its_tokens() -> None:
    """And the gradient; the metrics of ratios are those without corrections."""
    tokens = packed(CASES[0])
    clips: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}
    counts: dict[str, Any] = {"num_tokens": len(tokens["logps"])}
    corrections = torch.linspace(0, 2, len(tokens["logps"]), dtype=torch.float64)
    logps = tokens["logps"].clone().requires_grad_()
    given = (logps, tokens["old_logps"], tokens["advantages"])
    loss, sums = policy_loss(*given, **clips, **counts, corrections=corrections)
    (gradient,) = torch.autograd.grad(loss, logps)
    single = [
        policy_loss(*(x[t : t + 1] for x in given), **clips, num_tokens=1)[0]
        for t in range(len(logps))
    ]
    wanted = (corrections * torch.stack(single)).mean()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, logps)[0])
    _, plain = policy_loss(*given, **clips, **counts)
    assert sums[1:].tolist() == plain[1:].tolist()


TRL = json.loads((Path(__file__).parents[1] / "golden" / "grpo_trl.json").read_text())


@pytest.mark.parametrize("case", TRL["cases"])
@pytest.mark.parametrize("number", range(len(TRL["cases"][0]["losses"])))
def test_losses_are_trl_s(case: dict[str, Any], number: int) -> None:
    """With the KL in the loss; ``tests/golden/make_grpo_trl.py`` makes the numbers."""
    wanted, mask = case["losses"][number], table(case, "mask").bool()
    advantages = table(case, "advantages")[:, None].expand_as(mask)[mask]
    tokens = {"response": torch.arange(len(mask))[:, None].expand_as(mask)[mask]}
    counts = LossCounts(int(mask.sum()), len(mask), TRL["longest"])
    lengths = mask.sum(dim=1)[tokens["response"]]
    size = {
        "num_tokens": counts.tokens,
        "weights": token_weights(wanted["loss_agg_mode"], lengths, counts),
    }
    low, high = TRL["low"], TRL["high"]
    if wanted["loss_mode"] == "cispo":  # TRL bounds the ratio from above alone
        low, high = 1.0, TRL["cispo_high"] - 1
    logps = table(case, "logps")[mask].requires_grad_()
    policy, sums = policy_loss(
        logps,
        table(case, "old_logps")[mask],
        advantages,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=None,
        corrections=table(case, "corrections")[mask] if wanted["corrects"] else None,
        mode=wanted["loss_mode"],
        sequence_means=means_of(tokens),
        **size,
    )
    ref_logps = table(case, "ref_logps")[mask]
    estimate: dict[str, Any] = {
        "estimator": "k3",
        "old_logps": table(case, "old_logps")[mask] if wanted["corrects_kl"] else None,
        "sequence_means": means_of(tokens) if wanted["loss_mode"] == "gspo" else None,
    }
    kl, kl_sums = kl_loss(logps, ref_logps, coefficient=TRL["beta"], **estimate, **size)
    loss = policy + kl
    (gradient,) = torch.autograd.grad(loss, logps)
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-6)
    torch.testing.assert_close(
        gradient, torch.tensor(wanted["gradient"]).double()[mask], rtol=1e-6, atol=1e-8
    )
    assert kl_sums.item() / counts.tokens == pytest.approx(wanted["kl"], rel=1e-6)
    if wanted["loss_mode"] == "vanilla":
        assert sums[2].item() / counts.tokens == pytest.approx(wanted["clipped"])
    if wanted["loss_mode"] == "cispo":  # there TRL's ``cispo_clip_ratio``
        assert sums[5].item() / counts.tokens == pytest.approx(wanted["clipped"])


def test_a_sequence_s_ratio_is_bounded_and_the_kl_is_of_tokens() -> None:
    """With GSPO, tokens whose log-ratios are 15 and 9: their mean is 12, and the bound 10."""
    old_logps = torch.tensor([-16.0, -10.0], dtype=torch.float64)
    clips: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}
    loss, sums = policy_loss(
        torch.full_like(old_logps, -1.0),
        old_logps,
        torch.full_like(old_logps, -1.0),
        **clips,
        num_tokens=2,
        mode="gspo",
        sequence_means=lambda values: values.mean().expand_as(values),
    )
    assert loss.item() == pytest.approx(math.exp(10))
    found = dict(zip(POLICY_SUMS, sums.tolist(), strict=True))
    assert found["policy/approxkl_avg"] == (15**2 + 9**2) / 2
    assert found["val/ratio"] == pytest.approx(2 * math.exp(10))
