"""The tiny reward model: trained on two ranks, exported, read by transformers."""

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from puzzle_align.config.load import find_config, load_file
from puzzle_align.stages.preference.data import job_pairs
from puzzle_align.stages.tokenizer import open_tokenizer
from tests import metrics
from tests.bounds import LOGIT_BOUND
from tests.e2e.conftest import Command
from tests.e2e.launch import run_job, torchrun

NUM_STEPS = 30
OVERRIDES = [
    f"max_steps={NUM_STEPS}",
    "data.num_synthetic=4000",
    "data.eval_fraction=0.02",
    "reward.model.config.num_hidden_layers=2",
    "global_batch_size=32",
    "reward.parallel.pipeline_model_parallel_size=2",
    "telemetry.eval_every=0",
]


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward") / "run"


@pytest.fixture(scope="module")
def job(output: Path) -> subprocess.CompletedProcess[str]:
    return run_job("--config", "reward_tiny", f"output_dir={output}", *OVERRIDES)


@pytest.fixture(scope="module")
def records(job, output: Path) -> list[dict[str, float]]:
    assert job.returncode == 0, job.stderr
    return metrics.records(output)


def test_held_out_pairs_are_told_apart(records, job) -> None:
    first, last = (record for record in records if "eval_loss" in record)
    assert (first["step"], last["step"]) == (0, NUM_STEPS)
    assert 0.2 < first["eval_accuracy"] < 0.8
    assert last["eval_accuracy"] >= 0.9
    assert last["eval_loss"] < first["eval_loss"]
    assert last["eval_min_reward"] < last["eval_mean_reward"] < last["eval_max_reward"]
    lines = job.stderr.splitlines()
    start = f"eval at step {NUM_STEPS}: loss "
    assert any(line.startswith(start) and " accuracy " in line for line in lines)
    assert any(line.split()[:2] == ["eval", "accuracy"] for line in lines)


def test_transformers_gives_the_same_scores(
    records, output: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = command("convert", str(output), "hf")
    assert code == 0, errors
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.config.num_labels == 1
    config = load_file(find_config("reward_tiny"), [f"output_dir={output}", *OVERRIDES])
    pairs = job_pairs(config, open_tokenizer(config.tokenizer)).eval
    assert pairs is not None and len(pairs) == 80
    scores = torch.zeros(len(pairs), 2)
    with torch.no_grad():
        for pair in range(len(pairs)):
            for branch in range(2):
                text = [*pairs.prompt(pair).tolist(), *pairs.response(pair, branch).tolist()]
                scores[pair, branch] = model(torch.tensor([text])).logits.item()
    last = records[-1]
    assert last["eval_min_reward"] == pytest.approx(scores.min().item(), abs=LOGIT_BOUND)
    assert last["eval_mean_reward"] == pytest.approx(scores.mean().item(), abs=LOGIT_BOUND)
    assert last["eval_max_reward"] == pytest.approx(scores.max().item(), abs=LOGIT_BOUND)
    margins = scores[:, 0] - scores[:, 1]
    assert last["eval_margin"] == pytest.approx(margins.mean().item(), abs=LOGIT_BOUND)
    assert last["eval_accuracy"] == pytest.approx((margins > 0).double().mean().item())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_tiny_run_tells_held_out_pairs_apart(tmp_path: Path) -> None:
    done = torchrun("--config", "reward_tiny", f"output_dir={tmp_path}", timeout=540)
    assert done.returncode == 0, done.stderr
    accuracies = [r["eval_accuracy"] for r in metrics.records(tmp_path) if "eval_accuracy" in r]
    assert accuracies[-1] >= 0.95
