"""Adapters on the checkpoints of other runs: PPO's actor and critic, their exports, other bases."""

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.bounds import LOSS_BOUND
from tests.checkpoints import change_job
from tests.e2e.conftest import Command
from tests.metrics import numbers

JOB = """
seed: 3
engine: {device: cpu}
tokenizer: {path: byte}
max_steps: 1
global_batch_size: 4
optimizer: {lr: 0.01, warmup_steps: 0}
telemetry: {progress: false, tensorboard: false}
packing: {row_tokens: 64}
data: {format: synthetic, num_synthetic: 16, max_length: 48}
"""
PPO = f"""{JOB}
stage: ppo
generation: {{max_new_tokens: 8}}
reward: {{function: "puzzle_align.data.synthetic:vowel_share"}}
"""
MODEL = (
    "actor.model.config={model_type: llama, hidden_size: 32, intermediate_size: 64, vocab_size:"
    " 260, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,"
    " max_position_embeddings: 64}"
)
ADAPTERS = ("actor.lora.r=4", "critic.base=actor", "critic.lora.r=4")


@pytest.fixture
def runs(tmp_path: Path, train: Command) -> Path:
    """PPO of all weights, and PPO of adapters on its actor."""
    (tmp_path / "ppo.yaml").write_text(PPO)
    for stage in ("dpo", "reward"):
        (tmp_path / f"{stage}.yaml").write_text(f"{JOB}\nstage: {stage}\n")
    _train(train, tmp_path, "full", MODEL)
    _train(train, tmp_path, "lora", f"actor.model.path={tmp_path}/full", *ADAPTERS)
    return tmp_path


def _forget_roles(job: dict[str, Any]) -> None:
    for start in job["starts"].values():
        del start["role"]


def _train(train: Command, folder: Path, name: str, *overrides: str, stage: str = "ppo") -> str:
    """Run a job in ``folder / name``; its error, if it ends with one."""
    given = ("--config", f"{folder}/{stage}.yaml", f"output_dir={folder / name}")
    code, _, err = train(*given, *overrides)
    assert code in (0, 2), err
    return err[-1] if code else ""


def test_a_checkpoint_of_two_models_is_the_base_of_both_roles_adapters(
    runs: Path, train: Command, command: Command
) -> None:
    """The critic's adapters are on the actor of a checkpoint that has a critic, too."""
    for role in ("actor", "critic"):
        merged = ("--role", role, "--merge")
        assert command("convert", f"{runs}/lora", f"{runs}/{role}", *merged)[0] == 0
    for name, actor, critic in (("again", "lora", "lora"), ("merged", "actor", "critic")):
        models = (f"actor.model.path={runs}/{actor}", f"critic.model.path={runs}/{critic}")
        assert not _train(train, runs, name, *models)
    (again,), (merged,) = numbers(runs / "again"), numbers(runs / "merged")
    for metric in ("objective/entropy", "loss/value_avg"):  # of the actor, and of the critic
        assert again[metric] == pytest.approx(merged[metric], rel=LOSS_BOUND)


def test_exported_adapters_go_on_with_the_checkpoint_that_they_were_trained_on(
    runs: Path, train: Command, command: Command
) -> None:
    """Also beside a critic, which gets another head on the same base."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (1000, 12_000):  # as a disk without room for the tokenizer, or for the adapters
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            code, _, errors = command("convert", f"{runs}/lora", f"{runs}/peft")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert code == 2 and errors[-1].startswith(f"error: {runs}/peft cannot be written (")
        assert not list((runs / "peft").iterdir())
    assert command("convert", f"{runs}/lora", f"{runs}/peft")[0] == 0
    adapters = f"actor.lora={{r: 4, path: {runs}/peft}}"
    assert not _train(train, runs, "on", f"actor.model.path={runs}/full", adapters)
    assert not _train(train, runs, "again", f"actor.model.path={runs}/lora")
    assert numbers(runs / "on") == numbers(runs / "again") != []


def test_a_changed_base_is_refused_for_a_role_with_another_head(runs: Path, train: Command) -> None:
    adapters = (f"actor.model.path={runs}/full", "actor.lora.r=4")
    assert not _train(train, runs, "policy", *adapters, stage="dpo")
    given = f"reward.model.path={runs}/policy"
    assert not _train(train, runs, "reward", given, stage="reward")
    _train(train, runs, "other", MODEL, "seed=4")
    shutil.rmtree(runs / "full/checkpoints")
    shutil.copytree(runs / "other/checkpoints", runs / "full/checkpoints")
    error = _train(train, runs, "changed", given, stage="reward")
    assert "other weights than the adapters in" in error


def test_a_run_goes_on_with_or_without_merging(
    runs: Path, train: Command, caplog: pytest.LogCaptureFixture
) -> None:
    given = (f"actor.model.path={runs}/full", *ADAPTERS, "max_steps=2")
    (step,) = (runs / "lora/checkpoints").glob("step_*")
    change_job(step, _forget_roles)  # as it was saved before there were any
    assert not _train(train, runs, "lora", *given, "actor.lora.merge=false")
    assert "resumed from step 1 of 2" in caplog.messages
    error = _train(train, runs, "lora", *given, "max_steps=3", "actor.lora.r=8")
    assert "actor.lora.r is 8, but 4 in " in error
    error = _train(train, runs, "lora", *given, "max_steps=3", "critic.lora.r=8")
    assert "critic.lora.r is 8, but 4 in " in error


def test_a_run_goes_on_with_the_adapters_that_it_began_with(
    runs: Path, train: Command, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    given = ["actor.lora.r=4", f"actor.model.path={runs}/full"]
    for name, lr in (("first", 0.01), ("second", 0.1)):
        assert not _train(train, runs, name, *given, f"optimizer.lr={lr}", stage="dpo")
        assert command("convert", f"{runs}/{name}", f"{runs}/{name}_peft")[0] == 0
    path, other = (f"actor.lora.path={runs}/{name}_peft" for name in ("first", "second"))
    assert not _train(train, runs, "on", *given, path, stage="dpo")
    more = (*given, "max_steps=2")
    for changes, role in (
        ((other,), "actor"),
        ((), "actor"),
        ((path, "reference.lora=off"), "reference"),
    ):
        error = _train(train, runs, "on", *more, *changes, stage="dpo")
        assert error.startswith(f"error: actor.model: the {role} in {runs}/on/checkpoints/")
        assert f" now, or other adapters ({role}.lora): put it back, " in error
    shutil.copytree(runs / "first_peft", runs / "copy")
    assert not _train(train, runs, "on", *more, f"actor.lora.path={runs}/copy", stage="dpo")
    assert "resumed from step 1 of 2" in caplog.messages
