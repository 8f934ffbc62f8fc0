"""Metric sums and throughput against numbers derived by hand."""

import math
from pathlib import Path

import pytest
import torch

from puzzle_align.telemetry.preference_metrics import (
    NAMES,
    TOKEN_NAMES,
    num_values,
    pair_values,
    summarize,
    token_values,
)
from puzzle_align.telemetry.throughput import StepStats, peak_flops, peak_memory, rates

STATUS = Path("/proc/self/status")


def test_means_of_four_pairs_by_hand():
    found = summarize(_values(slice(None)))
    assert found == {
        "loss": pytest.approx(0.6),
        "rewards/chosen": pytest.approx(0.5),
        "rewards/rejected": pytest.approx(0.25),
        "rewards/accuracies": pytest.approx(2.5 / 4),  # right, a tie, wrong, right
        "rewards/margins": pytest.approx(0.25),
        "logps/chosen": -20.0,
        "logps/rejected": -30.0,
    }
    assert tuple(found) == NAMES


def test_token_metrics_are_means_over_the_batch_s_tokens_by_hand():
    """Two pairs of 1 + 3 and 3 + 1 tokens: no mean of the responses' own means."""
    tokens = token_values(
        entropy=torch.tensor([[2.0, 3.0], [3.0, 4.0]]),
        mean_logit=torch.tensor([[-1.0, -2.0], [-5.0, 4.0]]),
        is_top1=torch.tensor([[1.0, 3.0], [1.0, 0.0]]),
        lengths=torch.tensor([[1, 3], [3, 1]]),
    )
    found = summarize(torch.cat([_values(slice(2)), tokens], dim=1))
    assert found["entropy"] == 12 / 8
    assert found["logits/chosen"] == -6 / 4 and found["logits/rejected"] == 2 / 4
    assert found["mean_token_accuracy"] == 2 / 4
    assert tuple(found) == NAMES + TOKEN_NAMES
    assert num_values(statistics=True) == _values(slice(2)).size(1) + tokens.size(1)
    assert num_values(statistics=False) == _values(slice(2)).size(1)


def test_every_pair_has_a_row_of_its_own_whatever_the_split():
    whole = _values(slice(None))
    assert whole.dtype == torch.float64 and whole.shape == (4, len(NAMES))
    for cut in range(5):
        assert torch.equal(torch.cat([_values(slice(cut)), _values(slice(cut, None))]), whole)


def test_policy_equal_to_reference_has_accuracy_one_half_and_log_two():
    zero = torch.zeros(2)
    found = summarize(pair_values(torch.full((2,), math.log(2)), zero, zero, zero - 5, zero - 7))
    assert found["rewards/accuracies"] == 0.5
    assert found["rewards/margins"] == 0.0
    assert found["loss"] == pytest.approx(0.6931, abs=1e-4)


def test_values_hold_no_graph():
    losses = torch.ones(2, requires_grad=True) * 2
    assert not pair_values(losses, losses, losses, losses, losses).requires_grad


def _values(pairs: slice) -> torch.Tensor:
    return pair_values(
        losses=torch.tensor([0.5, 0.25, 1.05, 0.6], dtype=torch.float64)[pairs],
        chosen_rewards=torch.tensor([2.0, 0.5, -1.0, 0.5])[pairs],
        rejected_rewards=torch.tensor([1.0, 0.5, -0.75, 0.25])[pairs],
        chosen_logps=torch.tensor([-10.0, -20.0, -30.0, -20.0])[pairs],
        rejected_logps=torch.tensor([-15.0, -30.0, -45.0, -30.0])[pairs],
    )


def test_rates_of_two_steps_by_hand():
    step = StepStats(
        seconds=2.0, num_pairs=64, num_tokens=6000, num_row_tokens=8000, num_flops=3.12e14
    )
    found = rates(step + step, peak_flops=312e12)
    assert found == {
        "pairs_per_second": 32.0,
        "tokens_per_second": 3000.0,
        "step_time": 4.0,
        "fill": 0.75,
        "mfu": 0.5,
    }


def test_rates_of_two_ppo_iterations_by_hand():
    first = StepStats(
        seconds=2.0, num_responses=8, num_tokens=600, phases={"generate": 1, "score": 1}
    )
    second = StepStats(
        seconds=4.0, num_responses=8, num_tokens=600, phases={"generate": 3, "learn": 1}
    )
    assert rates(first + second, peak_flops=1e12) == {
        "responses_per_second": 16 / 6,
        "tokens_per_second": 200.0,
        "step_time": 6.0,
        "time/generate": 4.0,
        "time/score": 1.0,
        "time/learn": 1.0,
        "generate/tokens_per_second": 300.0,
    }


def test_rates_leave_out_what_was_not_measured():
    assert rates(StepStats(), 1e12) == {}
    assert rates(StepStats(seconds=2.0), 1e12) == {"tokens_per_second": 0.0, "step_time": 2.0}
    assert "mfu" not in rates(StepStats(seconds=1.0, num_pairs=1, num_flops=1e9), None)
    assert "mfu" not in rates(StepStats(seconds=1.0, num_pairs=1), 1e12)


@pytest.mark.parametrize(
    ("name", "given", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", None, 312.0e12),
        ("NVIDIA H100 80GB HBM3", None, 989.4e12),
        ("NVIDIA H100 PCIe", None, 756.0e12),
        ("NVIDIA H200", None, 989.4e12),
        ("NVIDIA H200 NVL", None, 835.5e12),
        ("NVIDIA H200", 700.0, 7e14),
        ("Radeon", 100.0, 1e14),
        ("Radeon", None, None),
    ],
)
def test_peak_of_known_devices_and_of_the_config(name: str, given, peak: float | None):
    assert peak_flops(name, given) == peak


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc")
def test_peak_memory_on_cpu_is_the_kernels_high_water_mark():
    torch.ones(2**20)
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    high_water = int(line.split()[1]) * 1024
    assert 0.9 * high_water < peak_memory(torch.device("cpu")) < 2**40
