"""Preference losses: values worked out by hand, TRL's own values, gradients."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from puzzle_align.algos.preference import LOSSES, PairLogps, preference_loss, sorted_partners
from puzzle_align.config.schema import section_keys
from puzzle_align.config.sections.preference import DIVERGENCES, PREFERENCE_LOSSES, DPOConfig

# Most of TRL's values are in float64, of numbers of order one to ten: a rounding is 1e-16 of them,
# the few of a loss stay within 1e-14, those of the values in the file within 1e-12. ORPO's and the
# alpha-divergence's are in float32, and so are the logarithms of label smoothing in EXO's.
TRL_VALUES = Path(__file__).parents[1] / "golden" / "preference_trl.csv"
LOG3 = math.log(3)


def loss_of(
    loss_type: str | list[str], logps: PairLogps, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of ``preference_loss`` under options of the config."""
    return preference_loss(logps, DPOConfig(loss_type=loss_type, **options))


def pair(
    chosen: float,
    rejected: float,
    ref_chosen: float = 0.0,
    ref_rejected: float = 0.0,
    lengths: tuple[int, int] = (1, 1),
) -> PairLogps:
    values = (chosen, rejected, ref_chosen, ref_rejected)
    logps = [torch.tensor([value], dtype=torch.float64) for value in values]
    sizes = (torch.tensor([length]) for length in lengths)
    made: Any = [*logps, *sizes, *logps[:2], float(lengths[0])]
    return PairLogps(*made)


# c = 1, r = -2, c - r = 3; the means over tokens are -2 and -2.5.
HAND = pair(-4.0, -10.0, ref_chosen=-5.0, ref_rejected=-8.0, lengths=(2, 4))
# Mean probabilities 1/2 and 1/4: odds 1 and 1/3, log odds ratio ln 3.
HAND_ORPO = pair(2 * math.log(1 / 2), 3 * math.log(1 / 4), lengths=(2, 3))

# s(ln 3) = 3/4 and s(-ln 3) = 1/4, so -ln s is ln(4/3) and ln 4.
RIGHT, WRONG = math.log(4 / 3), math.log(4)
HAND_CASES = [
    # beta (c - r) = ln 3
    ("sigmoid", HAND, {"beta": LOG3 / 3}, RIGHT),
    ("sigmoid", HAND, {"beta": LOG3 / 3, "label_smoothing": 0.25}, 0.75 * RIGHT + 0.25 * WRONG),
    # 1/2 + 2/4 = 1
    ("sigmoid_norm", HAND, {"beta": LOG3}, RIGHT),
    # forward KL: 1 - e^-1 - (1 - e^2)
    (
        "sigmoid",
        HAND,
        {"beta": LOG3 / (math.exp(2) - math.exp(-1)), "f_divergence_type": "forward_kl"},
        RIGHT,
    ),
    # Jensen-Shannon: ln(2e/(e+1)) - ln(2e^-2/(e^-2+1)) = 3 - ln((e+1)/(e^-2+1))
    (
        "hinge",
        HAND,
        {"beta": 0.1, "f_divergence_type": "js_divergence"},
        1 - 0.1 * (3 - math.log((math.e + 1) / (math.exp(-2) + 1))),
    ),
    # alpha-divergence with alpha 2: e^1 - e^-2
    (
        "sigmoid",
        HAND,
        {
            "beta": LOG3 / (math.e - math.exp(-2)),
            "f_divergence_type": "alpha_divergence",
            "f_alpha_divergence_coef": 2.0,
        },
        RIGHT,
    ),
    # the chosen response's mean is -2: half of 2 is added
    ("sigmoid", HAND, {"beta": LOG3 / 3, "sft_loss_weight": 0.5}, RIGHT + 1.0),
    # over a mean length of 8 it is -1/2
    (
        "sigmoid",
        replace(HAND, mean_nll_length=8.0),
        {"beta": LOG3 / 3, "sft_loss_weight": 0.5, "nll_scope": "batch"},
        RIGHT + 0.25,
    ),
    # 1/2 + 2/4 - 1/2 = 1/2, squared
    ("ipo", HAND, {"beta": 1.0}, 0.25),
    # 1 - 3/6, and 1 - 3 < 0
    ("hinge", HAND, {"beta": 1 / 6}, 0.5),
    ("hinge", HAND, {"beta": 1.0}, 0.0),
    # (3/4 ln(4/3) - 1/4 ln 4) / (1/2)
    ("robust", HAND, {"beta": LOG3 / 3, "label_smoothing": 0.25}, 1.5 * RIGHT - 0.5 * WRONG),
    ("robust", HAND, {"beta": LOG3 / 3}, RIGHT),
    # the labels' own (3/4, 1/4) costs nothing; e = 1/10: 3/4 ln(3/4 / 9/10) + 1/4 ln(1/4 / 1/10)
    ("exo_pair", HAND, {"beta": LOG3 / 3, "label_smoothing": 0.25}, 0.0),
    (
        "exo_pair",
        HAND,
        {"beta": LOG3 / 3, "label_smoothing": 0.1},
        0.75 * math.log(5 / 6) + 0.25 * math.log(2.5),
    ),
    # s(ln 3) and s(2 ln 3) = 9/10: ln(4/3) + ln(4)/2 + ln(10/9)/2
    ("nca_pair", HAND, {"beta": LOG3}, RIGHT + WRONG / 2 + math.log(10 / 9) / 2),
    ("bco_pair", HAND, {"beta": LOG3}, RIGHT + math.log(10 / 9)),
    # one half of 1 / beta is 1: c is there, r is 1 below
    ("sppo_hard", HAND, {"beta": 0.5}, 1.0),
    # x = ln 3, w = s(2 ln 3) = 9/10: RIGHT/10 + 9/10 e^-x
    ("discopop", HAND, {"beta": LOG3 / 3, "discopop_tau": 0.5}, RIGHT / 10 + 0.3),
    # of a batch of one pair they are DPO
    ("aot", HAND, {"beta": LOG3 / 3, "label_smoothing": 0.25}, 0.75 * RIGHT + 0.25 * WRONG),
    ("aot_unpaired", HAND, {"beta": LOG3 / 3}, RIGHT),
    # 4 over the mean length 2
    ("sft", HAND, {}, 2.0),
    # 1 - s(ln 3) + s(-2 ln 3) = 1/4 + 1/10
    ("apo_zero", HAND, {"beta": LOG3}, 0.35),
    # s(ln 3) + 1 - s(3 ln 3) = 3/4 + 1/28
    ("apo_down", HAND, {"beta": LOG3}, 0.75 + 1 / 28),
    # 2 ln 3 (-2 + 2.5) = ln 3; less gamma = 2 ln 3 it is -ln 3
    ("simpo", HAND, {"beta": 2 * LOG3, "simpo_gamma": 0.0}, RIGHT),
    ("simpo", HAND, {"beta": 2 * LOG3, "simpo_gamma": 2 * LOG3}, WRONG),
    # negative log-likelihood ln 2 and beta ln(4/3)
    ("orpo", HAND_ORPO, {"beta": 0.1}, math.log(2) + 0.1 * RIGHT),
    # the better of two is drawn first with s(x), x = ln 3
    ("plackett_luce", HAND, {"beta": LOG3 / 3}, RIGHT),
]


@pytest.mark.parametrize(("loss_type", "logps", "options", "expected"), HAND_CASES)
def test_by_hand(
    loss_type: str, logps: PairLogps, options: dict[str, Any], expected: float
) -> None:
    losses, _, _ = loss_of(loss_type, logps, **options)
    assert losses.shape == (1,) and losses.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_every_loss_is_worked_out_by_hand() -> None:
    assert {case[0] for case in HAND_CASES} == set(LOSSES)


def test_discopop_of_a_pair_that_is_far_lost_is_finite() -> None:
    """It is ``-x`` there: the weight of ``exp(-x)``, which is infinite, is 0."""
    lost = torch.tensor([-7200.0, -700.0], dtype=torch.float64, requires_grad=True)
    none = torch.zeros(2, dtype=torch.float64)
    logps = replace(pair(0.0, 0.0), chosen=lost, rejected=none, ref_chosen=none, ref_rejected=none)
    losses, _, _ = loss_of("discopop", logps, beta=1.0)
    losses.sum().backward()
    assert losses.tolist() == [7200.0, 700.0]
    assert lost.grad is not None and lost.grad.tolist() == [-1.0, -1.0]


def test_losses_of_a_list_are_added_up() -> None:
    names, weights = ["bco_pair", "sppo_hard", "sft"], [0.5, 2.0, 0.25]
    options = {"beta": 0.5, "f_divergence_type": "reverse_kl"}
    each = [loss_of(name, random_batch(), **options)[0] for name in names]
    plain = loss_of(names, random_batch(), **options)[0]
    torch.testing.assert_close(plain, each[0] + each[1] + each[2], rtol=1e-14, atol=0)
    weighted = loss_of(names, random_batch(), loss_weights=weights, **options)[0]
    expected = 0.5 * each[0] + 2 * each[1] + 0.25 * each[2]
    torch.testing.assert_close(weighted, expected, rtol=1e-14, atol=0)


def test_sft_is_a_mean_over_the_tokens_of_the_batch() -> None:
    """3 and 5 over 1 + 3 tokens: not the mean 7/3 of the responses' own means 3 and 5/3."""
    both = PairLogps(
        *(torch.tensor([-3.0, -5.0], dtype=torch.float64) for _ in range(4)),
        *(torch.tensor([1, 3]) for _ in range(2)),
        *(torch.tensor([-3.0, -5.0], dtype=torch.float64) for _ in range(2)),
        mean_nll_length=2.0,
    )
    assert loss_of("sft", both)[0].mean().item() == 8 / 4
    means = loss_of("sigmoid", both, sft_loss_weight=1.0)[0] - math.log(2)
    assert means.mean().item() == pytest.approx(7 / 3, rel=1e-14)


def test_ratios_of_a_batch_are_sorted_against_each_other() -> None:
    """Policy 3, 1, 2 against the reference's -5, 4, -1; c 6, 1, 3 against r -2, 4, 0."""
    policy = torch.tensor([[9.0, 6.0], [14.0, 13.0], [5.0, 3.0]], dtype=torch.float64)
    reference = torch.tensor([[3.0, 8.0], [13.0, 9.0], [2.0, 3.0]], dtype=torch.float64)
    partners = sorted_partners(policy, reference)
    assert (policy - reference).tolist() == [[6.0, -2.0], [1.0, 4.0], [3.0, 0.0]]
    assert partners[:, 0].tolist() == [4.0, -5.0, -1.0]
    assert partners[:, 1].tolist() == [4.0, -2.0, 0.0]
    assert partners[:, 2].tolist() == [1.0, 6.0, 3.0]


def test_rewards_by_hand() -> None:
    """beta times c and r; without reference in the method, beta times the means."""
    _, chosen, rejected = loss_of("ipo", HAND, beta=0.5)
    assert (chosen.item(), rejected.item()) == (0.5, -1.0)
    _, chosen, rejected = loss_of("simpo", HAND, beta=2.0)
    assert (chosen.item(), rejected.item()) == (-4.0, -5.0)


def trl_rows() -> list[dict[str, str]]:
    with TRL_VALUES.open(newline="") as file:
        return list(csv.DictReader(file))


def precision(row: dict[str, str]) -> float:
    if row["loss_type"] == "orpo" or row["f_divergence_type"] == "alpha_divergence":
        return 1e-5
    return 1e-7 if "exo_pair" in row["loss_type"] else 1e-12


def options_of(row: dict[str, str]) -> dict[str, Any]:
    """A row's options of the config, with their types."""
    options: dict[str, Any] = {}
    for name, key in section_keys(DPOConfig).items():
        if name in row and name not in ("loss_type", "loss_weights"):
            options[name] = key.type(row[name])
    weights = [float(weight) for weight in row["loss_weights"].split()]
    return {**options, "loss_type": row["loss_type"].split(), "loss_weights": weights or None}


def test_trl_has_computed_every_loss_and_divergence() -> None:
    rows = trl_rows()
    trl_s = {name for row in rows for name in row["loss_type"].split()}
    assert trl_s == set(LOSSES) - {"plackett_luce"}  # of rankings, which TRL does not train on
    assert {row["f_divergence_type"] for row in rows} == set(DIVERGENCES)
    assert {len(row["loss_type"].split()) for row in rows} == {1, 2, 3}


@pytest.mark.parametrize("loss_type", sorted({row["loss_type"] for row in trl_rows()}))
def test_equals_trl(loss_type: str) -> None:
    rows = [row for row in trl_rows() if row["loss_type"] == loss_type]
    assert len(rows) >= 6
    for row in rows:
        logps = pair(
            *(float(row[key]) for key in ("chosen", "rejected", "ref_chosen", "ref_rejected")),
            lengths=(int(row["chosen_length"]), int(row["rejected_length"])),
        )
        results = preference_loss(logps, DPOConfig(**options_of(row)))
        expected = [float(row[key]) for key in ("loss", "reward_chosen", "reward_rejected")]
        found = [value.item() for value in results]
        assert found == pytest.approx(expected, rel=precision(row)), row


def random_batch() -> PairLogps:
    generator = torch.Generator().manual_seed(3)
    logps = -8 * torch.rand(4, 16, generator=generator, dtype=torch.float64) - 1
    lengths = torch.randint(1, 9, (2, 16), generator=generator)
    mean_length = float(lengths[0].double().mean())
    made: Any = [*logps, *lengths, *logps[:2], mean_length, *(-2 - logps[2:])]
    return PairLogps(*made)


def with_policy(batch: PairLogps, chosen: torch.Tensor, rejected: torch.Tensor) -> PairLogps:
    """A batch with these log-probabilities of the policy."""
    own = {"chosen": chosen, "rejected": rejected}
    own |= {"chosen_likelihood": chosen, "rejected_likelihood": rejected}
    return replace(batch, **own)


def needed(loss_type: str) -> dict[str, Any]:
    """Options without which a loss is infinite, or (DiscoPOP) rises where a pair is won."""
    found = {"exo_pair": {"label_smoothing": 0.1}, "discopop": {"discopop_tau": 1.0}}
    return found.get(loss_type, {})


def some(values: PairLogps, pairs: slice) -> PairLogps:
    """Some pairs of a batch."""
    found: Any = {
        name: v[pairs] if isinstance(v, torch.Tensor) else v for name, v in vars(values).items()
    }
    return PairLogps(**found)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_batch_is_its_pairs(loss_type: str) -> None:
    """A pair's loss does not depend on the batch it is in, once its partners there are known."""
    batch = random_batch()
    policy = torch.stack([batch.chosen, batch.rejected], dim=1)
    reference = torch.stack([batch.ref_chosen, batch.ref_rejected], dim=1)
    batch = replace(batch, partners=sorted_partners(policy, reference))
    options: dict[str, Any] = {"beta": 0.3, "sft_loss_weight": 0.2, **needed(loss_type)}
    together = torch.stack(loss_of(loss_type, batch, **options))
    for index in range(16):
        alone = torch.stack(loss_of(loss_type, some(batch, slice(index, index + 1)), **options))
        torch.testing.assert_close(together[:, index : index + 1], alone, rtol=1e-14, atol=0)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradients(loss_type: str) -> None:
    batch = random_batch()

    def losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        logps = with_policy(batch, chosen, rejected)
        options = {"beta": 0.3, "sft_loss_weight": 0.2, **needed(loss_type)}
        found = loss_of(loss_type, logps, **options)[0]
        # Of pairs that are held against others the batch's gradient is right.
        return found.sum() if PREFERENCE_LOSSES[loss_type].sorts_batch else found

    assert gradcheck(losses, (batch.chosen.requires_grad_(), batch.rejected.requires_grad_()))


def test_wpo_s_weights_have_no_gradient() -> None:
    """A pair's gradient is multiplied by what its loss is multiplied by."""
    batch = random_batch()
    policy = batch.chosen.clone().requires_grad_(), batch.rejected.clone().requires_grad_()
    plain, weighted = (
        loss_of("sigmoid", with_policy(batch, *policy), use_weighting=weighs)[0]
        for weighs in (False, True)
    )
    weights = (weighted / plain).detach()
    assert weights.min() < 0.9 * weights.max()
    expected = [weights * gradient for gradient in torch.autograd.grad(plain.sum(), policy)]
    found = torch.autograd.grad(weighted.sum(), policy)
    torch.testing.assert_close([*found], expected)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_of_divergences(divergence: str) -> None:
    batch = random_batch()

    def losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        logps = with_policy(batch, chosen, rejected)
        return loss_of("sigmoid", logps, f_divergence_type=divergence)[0]

    assert gradcheck(losses, (batch.chosen.requires_grad_(), batch.rejected.requires_grad_()))


def test_an_alpha_divergence_ends_where_float32_does() -> None:
    """u^(alpha-1) of a response that the policy has unlearnt: finite, as TRL has it."""
    options = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5}
    losses, _, _ = loss_of("hinge", pair(-1000.0, -1.0), beta=1.0, **options)
    assert losses.item() == pytest.approx(1 + 2 * (math.exp(80) - math.exp(0.5)), rel=1e-12)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradient_signs(loss_type: str) -> None:
    """At the reference: rejected goes down, chosen up (APO-down leaves it where it is)."""
    logps = pair(-6.0, -6.0, -6.0, -6.0, lengths=(3, 3))
    chosen, rejected = logps.chosen.requires_grad_(), logps.rejected.requires_grad_()
    losses, *rewards = loss_of(loss_type, logps, beta=0.3, **needed(loss_type))
    assert not any(reward.requires_grad for reward in rewards)
    up, down = torch.autograd.grad(losses.sum(), (chosen, rejected), allow_unused=True)
    assert down is None if loss_type == "sft" else down.item() > 0
    assert up.item() == 0 if loss_type == "apo_down" else up.item() < 0


def test_apo_down_lowers_chosen_too() -> None:
    """With the margin won (c - r = 30) only the chosen response's own term is left."""
    logps = pair(-6.0, -36.0, -6.0, -6.0)
    logps.chosen.requires_grad_()
    losses, _, _ = loss_of("apo_down", logps, beta=0.3)
    assert torch.autograd.grad(losses.sum(), logps.chosen)[0].item() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_of_a_certain_response_is_finite(dtype: torch.dtype) -> None:
    """A learnt response reaches log-probability 0 in float32: its odds are infinite."""
    chosen = torch.zeros(1, dtype=dtype, requires_grad=True)
    rejected = torch.full((1,), -200.0, dtype=dtype, requires_grad=True)
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=torch.int64)
    logps = PairLogps(chosen, rejected, zero, zero, one, one, chosen, rejected, 1.0)
    losses, _, _ = loss_of("orpo", logps, beta=0.1)
    grads = torch.autograd.grad(losses.sum(), (chosen, rejected))
    assert torch.isfinite(torch.cat([losses.detach(), *grads])).all()


def test_a_reference_is_used_iff_needed() -> None:
    batch = random_batch()
    other = replace(batch, ref_chosen=batch.ref_chosen - 1, ref_rejected=batch.ref_rejected - 3)
    for loss_type in LOSSES:
        options = {"beta": 0.3, **needed(loss_type)}
        # Of sft alone the rewards are against the reference.
        found = [torch.stack(loss_of(loss_type, logps, **options)) for logps in (batch, other)]
        assert torch.equal(*found) != PREFERENCE_LOSSES[loss_type].uses_reference


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_divergence_counts_iff_the_loss_takes_it(loss_type: str) -> None:
    found = [
        loss_of(loss_type, random_batch(), f_divergence_type=divergence, **needed(loss_type))[0]
        for divergence in ("reverse_kl", "js_divergence")
    ]
    takes = PREFERENCE_LOSSES[loss_type].takes_divergence and loss_type != "sft"
    assert torch.equal(*found) != takes


@pytest.mark.parametrize("loss_type", LOSSES)
def test_label_smoothing_counts_iff_the_loss_takes_it(loss_type: str) -> None:
    sharp, smooth = (
        loss_of(loss_type, random_batch(), beta=0.3, label_smoothing=flipped)[0]
        for flipped in (0.1, 0.2)
    )
    assert torch.equal(sharp, smooth) != PREFERENCE_LOSSES[loss_type].takes_label_smoothing
