"""The tiny KTO job: trained on two ranks on a file of single responses, and what it refuses."""

import json
from pathlib import Path

import pytest

from puzzle_align.config.load import find_config, load_file
from puzzle_align.data.synthetic import generate
from tests.e2e.launch import run_job
from tests.metrics import records

NUM_STEPS = 30
SMALLER = ("global_batch_size=96", "actor.model.config.num_hidden_layers=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with more undesirable responses than desirable ones."""
    folder = tmp_path_factory.mktemp("kto")
    lines = []
    for number, (prompt, chosen, rejected) in enumerate(generate(1500, seed=5)):
        kinds = [(rejected, False)] if number % 3 else [(chosen, True), (rejected, False)]
        lines += [{"prompt": prompt, "completion": c, "label": label} for c, label in kinds]
    (folder / "responses.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def _arguments(folder: Path, *overrides: str) -> list[str]:
    own = ["data.format=auto", f"data.train={folder}/responses.jsonl", "tokenizer.path=byte"]
    own += ["actor.model.random_weights=true", f"output_dir={folder}/run", *SMALLER, *overrides]
    return ["--config", "kto_tiny", f"max_steps={NUM_STEPS}", *own]


@pytest.mark.slow  # tests/dist/test_kto_runs.py has the numbers
def test_held_out_responses_are_told_apart(folder: Path) -> None:
    keys = ["optimizer.lr=3e-3", "telemetry.eval_every=0", "kto.desirable_weight=3"]
    pipeline = "actor.parallel.pipeline_model_parallel_size=2"
    job = run_job(*_arguments(folder, pipeline, *keys))
    assert job.returncode == 0, job.stderr
    first, last = (record for record in records(folder / "run") if "eval_loss" in record)
    assert (first["step"], last["step"]) == (0, NUM_STEPS)
    # Policy = reference: no ratio, no divergence.
    assert first["eval_rewards/margins"] == first["eval_kl"] == 0
    assert last["eval_rewards/margins"] > 0.5 and last["eval_loss"] < 0.9 * first["eval_loss"]
    assert last["eval_rewards/chosen"] > 0 > last["eval_rewards/rejected"]
    lines = job.stderr.splitlines()
    assert any("2000 responses, 0 of them truncated, 500 desirable" in line for line in lines)
    assert not any("responses are desirable and" in line for line in lines)  # the weight is right
    assert any(line.split()[:2] == ["phases", "kl"] for line in lines)
    assert any("responses/s" in line and " kl " in line for line in lines)


def test_the_shipped_config_is_the_tiny_dpo_s_with_its_pairs_taken_apart() -> None:
    kto, dpo = (load_file(find_config(name)) for name in ("kto_tiny", "dpo_tiny"))
    assert (kto.actor, kto.data, kto.optimizer) == (dpo.actor, dpo.data, dpo.optimizer)
