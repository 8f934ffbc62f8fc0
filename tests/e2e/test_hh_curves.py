"""On real preference pairs, DPO and a reward model have one loss curve each, whatever the plan.

The data are anthropics/hh-rlhf's ``harmless-base`` test split; the file is looked for in
``HH_RLHF_FILE``, else in ``../shared/data``. About fifteen minutes on two cores:

    python -m pytest -m slow tests/e2e/test_hh_curves.py
"""

import json
import math
import os
from pathlib import Path

import pytest

from tests.bounds import LOSS_BOUND
from tests.e2e.launch import ROOT, torchrun

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
AXES = {
    "P": "pipeline_model_parallel_size",
    "D": "data_parallel_size",
    "T": "tensor_model_parallel_size",
}


def _losses(folder: Path, axis: str, role: str = "actor", *overrides: str) -> list[float]:
    config = folder / "hh.yaml"
    config.write_text(CONFIG.replace("ROLE", role))
    output_dir = folder / axis
    done = torchrun(
        *("--config", str(config), f"data.train={FILE}", f"output_dir={output_dir}"),
        *(f"{role}.parallel.{AXES[axis]}=2", *overrides),
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (output_dir / "metrics.jsonl").open()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is not there")
def test_two_hundred_steps_have_one_curve_under_three_plans(tmp_path: Path) -> None:
    curves = {axis: _losses(tmp_path, axis) for axis in AXES}
    for axis, losses in curves.items():
        assert len(losses) == 200
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6), axis
        # The bound of one loss, kept through fifty steps.
        assert losses[:50] == pytest.approx(curves["P"][:50], rel=LOSS_BOUND), axis
        assert sum(losses[-20:]) / 20 < 0.685, axis


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not FILE.is_file(), reason=f"{FILE} is not there")
def test_a_reward_model_has_one_curve_under_three_plans(tmp_path: Path) -> None:
    curves = {
        axis: _losses(tmp_path, axis, "reward", "stage=reward", "max_steps=30") for axis in AXES
    }
    for axis, losses in curves.items():
        assert len(losses) == 30
        assert losses == pytest.approx(curves["P"], rel=LOSS_BOUND), axis
