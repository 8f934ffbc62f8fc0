"""Loss curves that are the same whatever the plan: of ppo_tiny, and on real preference pairs.

The pairs are anthropics/hh-rlhf's ``harmless-base`` test split; the file is looked for in
``HH_RLHF_FILE``, else in ``../shared/data``. About twenty-five minutes on two cores:

    python -m pytest -m slow tests/e2e/test_curves.py
"""

import math
import os
from pathlib import Path

import pytest

from tests.bounds import LOSS_BOUND
from tests.e2e.launch import ROOT, torchrun
from tests.jobs import parallel
from tests.metrics import losses, records

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
P2, T2 = parallel("actor", P=2), parallel("actor", T=2)
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
            *parallel("critic", D=2),
        ),
    ),
    "concurrent": (
        2,
        (
            "actor.ranks=0-0",
            "critic.ranks=1-1",
            *parallel("critic", D=1),
            "reference.ranks=1-1",
            *parallel("reference", D=1),
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
    return records(folder)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_reward_reaches_most_of_its_maximum(tmp_path: Path) -> None:
    found = _records(tmp_path, 2)
    first, last = found[0]["objective/scores"], found[-1]["objective/scores"]
    assert first < 0.1 * MAXIMUM
    assert last >= 0.8 * MAXIMUM
    assert max(record["objective/kl"] for record in found) < 100  # of 16 tokens


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_greedy_iterations_have_one_curve(tmp_path: Path) -> None:
    # At ppo_tiny's own rate, 3e-3, one iteration multiplies what rounding makes by thirty.
    settings = ("max_steps=10", "optimizer.lr=1e-3")
    settings += ("generation.temperature=0", "generation.num_generations=1")
    curves = {
        name: _records(tmp_path / str(number), ranks, *settings, *overrides)
        for number, (name, (ranks, overrides)) in enumerate(PLANS.items())
    }
    expected = curves["(1,1,1)"]
    assert len(expected) == 10
    for name, curve in curves.items():
        for own, one in zip(curve, expected, strict=True):
            for metric in NAMES:
                where = (name, one["step"], metric)
                assert own[metric] == pytest.approx(one[metric], rel=1e-5, abs=1e-6), where
        assert curve[-1]["objective/scores"] > 0.8 * MAXIMUM  # from 0.1


FILE = Path(
    os.environ.get("HH_RLHF_FILE", ROOT.parent / "shared/data/hh_rlhf_harmless_base_test.jsonl.gz")
)
CONFIG = """
global_batch_size: 32
max_steps: 200
engine: {device: cpu}
ROLE:
  model:
    random_weights: true
    config:
      model_type: llama
      hidden_size: 64
      intermediate_size: 192
      num_hidden_layers: 2
      num_attention_heads: 4
      num_key_value_heads: 2
      vocab_size: 260
      max_position_embeddings: 1024
tokenizer: {path: byte}
data: {max_length: 768}
packing: {row_tokens: 4096}
optimizer: {lr: 1e-4, warmup_steps: 10}
"""
AXES = ("P", "D", "T")


def _losses(folder: Path, axis: str, role: str = "actor", *overrides: str) -> list[float]:
    config = folder / "hh.yaml"
    config.write_text(CONFIG.replace("ROLE", role))
    output_dir = folder / axis
    done = torchrun(
        *("--config", str(config), f"data.train={FILE}", f"output_dir={output_dir}"),
        *(*parallel(role, **{axis: 2}), *overrides),
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    return losses(output_dir)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is not there")
def test_two_hundred_steps_have_one_curve_under_three_plans(tmp_path: Path) -> None:
    curves = {axis: _losses(tmp_path, axis) for axis in AXES}
    for axis, curve in curves.items():
        assert len(curve) == 200
        assert curve[0] == pytest.approx(math.log(2), abs=1e-6), axis
        # The bound of one loss, kept through fifty steps.
        assert curve[:50] == pytest.approx(curves["P"][:50], rel=LOSS_BOUND), axis
        assert sum(curve[-20:]) / 20 < 0.685, axis


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is not there")
def test_a_reward_model_has_one_curve_under_three_plans(tmp_path: Path) -> None:
    curves = {
        axis: _losses(tmp_path, axis, "reward", "stage=reward", "max_steps=30") for axis in AXES
    }
    for axis, curve in curves.items():
        assert len(curve) == 30
        assert curve == pytest.approx(curves["P"], rel=LOSS_BOUND), axis
