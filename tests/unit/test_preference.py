"""Preference losses: values worked out by hand, TRL's own values, gradients."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

from puzzle_align.algos.preference import LOSSES, PairLogps, preference_loss
from puzzle_align.config.sections.preference import PREFERENCE_LOSSES, DPOConfig

# All but TRL's ORPO is in float64, of numbers of order one to ten: a rounding is 1e-16 of them, the
# few of a loss stay within 1e-14, those of the values in the file within 1e-12.
TRL_VALUES = Path(__file__).parents[1] / "golden" / "preference_trl.csv"
LOG3 = math.log(3)


def loss_of(
    loss_type: str, logps: PairLogps, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``preference_loss`` gives under options of the config."""
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
    return PairLogps(*logps, *(torch.tensor([length]) for length in lengths))


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
    # the chosen response's mean is -2: half of 2 is added
    ("sigmoid", HAND, {"beta": LOG3 / 3, "sft_loss_weight": 0.5}, RIGHT + 1.0),
    # 1/2 + 2/4 - 1/2 = 1/2, squared
    ("ipo", HAND, {"beta": 1.0}, 0.25),
    # 1 - 3/6, and 1 - 3 < 0
    ("hinge", HAND, {"beta": 1 / 6}, 0.5),
    ("hinge", HAND, {"beta": 1.0}, 0.0),
    # (3/4 ln(4/3) - 1/4 ln 4) / (1/2)
    ("robust", HAND, {"beta": LOG3 / 3, "label_smoothing": 0.25}, 1.5 * RIGHT - 0.5 * WRONG),
    ("robust", HAND, {"beta": LOG3 / 3}, RIGHT),
    # 1 - s(ln 3) + s(-2 ln 3) = 1/4 + 1/10
    ("apo_zero", HAND, {"beta": LOG3}, 0.35),
    # s(ln 3) + 1 - s(3 ln 3) = 3/4 + 1/28
    ("apo_down", HAND, {"beta": LOG3}, 0.75 + 1 / 28),
    # 2 ln 3 (-2 + 2.5) = ln 3; less gamma = 2 ln 3 it is -ln 3
    ("simpo", HAND, {"beta": 2 * LOG3, "simpo_gamma": 0.0}, RIGHT),
    ("simpo", HAND, {"beta": 2 * LOG3, "simpo_gamma": 2 * LOG3}, WRONG),
    # negative log-likelihood ln 2 and beta ln(4/3)
    ("orpo", HAND_ORPO, {"beta": 0.1}, math.log(2) + 0.1 * RIGHT),
]


@pytest.mark.parametrize(("loss_type", "logps", "options", "expected"), HAND_CASES)
def test_by_hand(
    loss_type: str, logps: PairLogps, options: dict[str, Any], expected: float
) -> None:
    losses, _, _ = loss_of(loss_type, logps, **options)
    assert losses.shape == (1,) and losses.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_every_loss_is_worked_out_by_hand() -> None:
    assert {case[0] for case in HAND_CASES} == set(LOSSES)


def test_rewards_by_hand() -> None:
    """beta times c and r; without reference in the method, beta times the means."""
    _, chosen, rejected = loss_of("ipo", HAND, beta=0.5)
    assert (chosen.item(), rejected.item()) == (0.5, -1.0)
    _, chosen, rejected = loss_of("simpo", HAND, beta=2.0)
    assert (chosen.item(), rejected.item()) == (-4.0, -5.0)


def test_equal_to_the_reference_is_log_two() -> None:
    losses, _, _ = loss_of("sigmoid", pair(-7.0, -9.0, -7.0, -9.0), beta=0.1)
    assert losses.item() == pytest.approx(math.log(2), rel=1e-15)


def trl_rows() -> list[dict[str, str]]:
    with TRL_VALUES.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_equals_trl(loss_type: str) -> None:
    rows = [row for row in trl_rows() if row["loss_type"] == loss_type]
    assert len(rows) >= 6
    rel = 1e-5 if loss_type == "orpo" else 1e-12  # TRL's ORPO is float32
    for row in rows:
        number = {key: float(value) for key, value in row.items() if key != "loss_type"}
        logps = pair(
            *(number[key] for key in ("chosen", "rejected", "ref_chosen", "ref_rejected")),
            lengths=(int(row["chosen_length"]), int(row["rejected_length"])),
        )
        results = loss_of(
            loss_type,
            logps,
            beta=number["beta"],
            label_smoothing=number["label_smoothing"],
            simpo_gamma=number["simpo_gamma"],
            sft_loss_weight=number["sft_loss_weight"],
        )
        expected = [number[key] for key in ("loss", "reward_chosen", "reward_rejected")]
        assert [value.item() for value in results] == pytest.approx(expected, rel=rel)


def random_batch() -> PairLogps:
    generator = torch.Generator().manual_seed(3)
    logps = -8 * torch.rand(4, 16, generator=generator, dtype=torch.float64) - 1
    lengths = torch.randint(1, 9, (2, 16), generator=generator)
    return PairLogps(*logps, *lengths)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_batch_is_its_pairs(loss_type: str) -> None:
    """A pair's loss does not depend on the batch it is in."""
    batch = random_batch()
    options: dict[str, Any] = {"beta": 0.3, "simpo_gamma": 0.5, "sft_loss_weight": 0.2}
    together = torch.stack(loss_of(loss_type, batch, **options))
    for index in range(16):
        one = PairLogps(*(value[index : index + 1] for value in vars(batch).values()))
        alone = torch.stack(loss_of(loss_type, one, **options))
        torch.testing.assert_close(together[:, index : index + 1], alone, rtol=1e-14, atol=0)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradients(loss_type: str) -> None:
    batch = random_batch()
    rest = list(vars(batch).values())[2:]

    def losses(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        logps = PairLogps(chosen, rejected, *rest)
        return loss_of(loss_type, logps, beta=0.3, sft_loss_weight=0.2)[0]

    assert gradcheck(losses, (batch.chosen.requires_grad_(), batch.rejected.requires_grad_()))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradient_signs(loss_type: str) -> None:
    """At the reference: rejected goes down, chosen up (APO-down leaves it where it is)."""
    logps = pair(-6.0, -6.0, -6.0, -6.0, lengths=(3, 3))
    chosen, rejected = logps.chosen.requires_grad_(), logps.rejected.requires_grad_()
    losses, reward, _ = loss_of(loss_type, logps, beta=0.3)
    assert not reward.requires_grad
    up, down = torch.autograd.grad(losses.sum(), (chosen, rejected))
    assert down.item() > 0
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
    logps = PairLogps(chosen, rejected, zero, zero, one, one)
    losses, _, _ = loss_of("orpo", logps, beta=0.1)
    grads = torch.autograd.grad(losses.sum(), (chosen, rejected))
    assert torch.isfinite(torch.cat([losses.detach(), *grads])).all()


def test_a_reference_is_used_iff_needed() -> None:
    batch = random_batch()
    other = PairLogps(
        batch.chosen,
        batch.rejected,
        batch.ref_chosen - 1,
        batch.ref_rejected - 3,
        batch.chosen_lengths,
        batch.rejected_lengths,
    )
    for loss_type in LOSSES:
        same = torch.equal(
            loss_of(loss_type, batch, beta=0.3)[0],
            loss_of(loss_type, other, beta=0.3)[0],
        )
        assert same != PREFERENCE_LOSSES[loss_type].uses_reference


@pytest.mark.parametrize("loss_type", LOSSES)
def test_label_smoothing_counts_iff_the_loss_takes_it(loss_type: str) -> None:
    sharp, smooth = (
        loss_of(loss_type, random_batch(), beta=0.3, label_smoothing=flipped)[0]
        for flipped in (0.0, 0.2)
    )
    assert torch.equal(sharp, smooth) != PREFERENCE_LOSSES[loss_type].takes_label_smoothing
