"""The reference's log-probabilities on disk: their key, and values that are not kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puzzle_align.config.load import load_job
from puzzle_align.layout.model import ModelOptions
from puzzle_align.stages.preference.reference_table import _is_there, _write, model_fingerprint
from puzzle_align.stages.weights import role_weights
from tests.jobs import parallel, resolved
from tests.refusals import refusal

JOB = """
engine: {device: cpu}
actor:
  model:
    random_weights: true
    config:
      {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
       num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 260,
       max_position_embeddings: 64}
dpo: {precompute_ref_log_probs: true}
tokenizer: {path: byte}
data: {format: synthetic, num_synthetic: 8, max_length: 64}
"""


def test_a_model_is_its_dimensions_its_precision_and_its_weights(tmp_path: Path) -> None:
    """And neither its plan, nor how it attends."""

    def found(*overrides: str, **options: Any) -> str:
        config = load_job(JOB, [f"output_dir={tmp_path}", *overrides])
        job = resolved(config, 2)
        (planned,) = job.plan.phase("precompute").contexts
        changed = replace(planned, options=ModelOptions(**options))
        return model_fingerprint(changed, role_weights(job.models[planned.role], config))

    same = {found(), found(*parallel("actor", P=2)), found(attention="dense")}
    assert len(same) == 1
    others = [
        found(dtype="bf16"),
        found(dtype="bf16", fp8="hybrid"),
        found("seed=7"),
        found("actor.model.config.rope_theta=5000"),
    ]
    assert len({*same, *others}) == 1 + len(others)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_table_is_kept_if_every_value_is_finite(tmp_path: Path, value: float) -> None:
    table = np.full((3, 2), -1.5)
    _write(tmp_path, ["good"], table)
    table[1, 1] = value
    line = refusal(lambda: _write(tmp_path, ["bad"], table))
    assert line.startswith("the reference gives log-probabilities that are not finite: ")
    assert _is_there(tmp_path, ["good"]) and not _is_there(tmp_path, ["bad"])
