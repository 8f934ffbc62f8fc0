"""ppo_tiny: it learns, and its curve is the same under every placement and plan.

About ten minutes on two cores:

    python -m pytest -m slow tests/e2e/test_ppo_curves.py
"""

import json
from pathlib import Path

import pytest

from tests.e2e.launch import torchrun

MAXIMUM = 1.0  # of the reward: every character a vowel
NAMES = (
    "objective/scores",
    "objective/kl",
    "objective/entropy",
    "loss/policy_avg",
    "loss/value_avg",
    "policy/entropy_avg",
    "val/ratio",
)
P2 = ("actor.parallel.pipeline_model_parallel_size=2",)
T2 = ("actor.parallel.tensor_model_parallel_size=2",)
PLANS = {
    "(1,1,1)": (1, ()),
    "(2,1,1), time-shared": (2, P2),
    "(2,1,1), sequential": (2, (*P2, "placement.score=sequential", "placement.learn=sequential")),
    "(1,2,1)": (2, ()),
    "(1,1,2)": (2, T2),
    "(2,1,2)": (4, (*P2, *T2)),
    "hybrid: actor and reference on one pipeline, the critic beside": (
        4,
        (
            *P2,
            "actor.ranks=0-1",
            "critic.ranks=2-3",
            "critic.parallel.data_parallel_size=2",
        ),
    ),
    "concurrent": (
        2,
        (
            "actor.ranks=0-0",
            "critic.ranks=1-1",
            "critic.parallel.data_parallel_size=1",
            "reference.ranks=1-1",
            "reference.parallel.data_parallel_size=1",
        ),
    ),
}


def _records(folder: Path, ranks: int, *overrides: str) -> list[dict[str, float]]:
    done = torchrun(
        *("--config", "ppo_tiny", f"output_dir={folder}", "telemetry.progress=false"),
        *("telemetry.tensorboard=false", *overrides),
        ranks=ranks,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_reward_reaches_most_of_its_maximum(tmp_path: Path) -> None:
    records = _records(tmp_path, 2)
    first, last = records[0]["objective/scores"], records[-1]["objective/scores"]
    assert first < 0.1 * MAXIMUM
    assert last >= 0.8 * MAXIMUM
    assert max(record["objective/kl"] for record in records) < 100  # of 16 tokens


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_greedy_iterations_have_one_curve(tmp_path: Path) -> None:
    settings = ("max_steps=10", "generation.temperature=0", "generation.num_generations=1")
    curves = {
        name: _records(tmp_path / str(number), ranks, *settings, *overrides)
        for number, (name, (ranks, overrides)) in enumerate(PLANS.items())
    }
    expected = curves["(1,1,1)"]
    assert len(expected) == 10
    for name, records in curves.items():
        for own, one in zip(records, expected, strict=True):
            for metric in NAMES:
                where = (name, one["step"], metric)
                # The bound of these metrics against plain PPO, in test_ppo_runs.
                assert own[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-6), where
