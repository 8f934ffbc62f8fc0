"""A stage that starts from the checkpoints of the one before, as a user chains them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import change_job
from tests.e2e.conftest import Command
from tests.e2e.launch import SMALL
from tests.e2e.test_ppo_cli import PPO, QUIET, SIZES, _metrics, _run

STEP = "step_00000001"
SPLIT = "reward.parallel.tensor_model_parallel_size=2"
ONE = ("max_steps=1", "checkpoint.save_every=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model's run, saved on two tensor ranks, and PPO's from its checkpoint."""
    folder = tmp_path_factory.mktemp("chain")
    _run(
        *("--config", "reward_tiny", *QUIET, f"output_dir={folder}/reward", *ONE, SPLIT),
        *(f"reward.model.config.{size}" for size in SIZES),
        *("data.num_synthetic=64", "data.eval_fraction=0.1", "global_batch_size=16"),
    )
    log = _run(*PPO, *ONE, f"output_dir={folder}/ppo", *_reward(folder / "reward"))
    assert f"reward starts from the reward of {folder}/reward/checkpoints/{STEP}" in log
    return folder


def _reward(path: Path) -> tuple[str, ...]:
    return f"reward.model.path={path}", f"critic.model.path={path}"


def test_ppo_computes_what_it_does_from_the_converted_reward_model(
    folder: Path, command: Command
) -> None:
    assert command("convert", f"{folder}/reward", f"{folder}/hf")[0] == 0
    _run(*PPO, *ONE, f"output_dir={folder}/converted", *_reward(folder / "hf"))
    own, converted = (_metrics(folder / name) for name in ("ppo", "converted"))
    assert own == converted
    assert [record["step"] for record in own] == [1]


def test_the_next_stage_needs_no_more_than_one_checkpoint(
    folder: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "ppo", tmp_path / "ppo")
    job = (*SMALL, *QUIET, "checkpoint.save_every=1", f"output_dir={tmp_path}/dpo")
    job = (*job, f"actor.model.path={tmp_path}/ppo")
    assert command("train", *job, "max_steps=1")[0] == 0
    for role in ("actor", "reference"):  # which has the actor's
        started = f"{role} starts from the actor of {tmp_path}/ppo/checkpoints/{STEP}"
        assert started in caplog.messages
    config = json.loads((tmp_path / f"dpo/checkpoints/{STEP}/job.json").read_text())["config"]
    assert config["actor"]["model"]["path"] == f"{tmp_path}/ppo/checkpoints/{STEP}"
    assert config["tokenizer"]["path"] == "byte"
    # What it left behind says all by itself which tokenizer it has.
    os.rename(tmp_path / "ppo", tmp_path / "away")
    sampling = ("--prompt", "a", "generation.max_new_tokens=4")
    code, shown, errors = command("generate", "--model", f"{tmp_path}/dpo", *sampling)
    assert code == 0, errors
    assert json.loads(shown[-1])["prompt"] == "a"


def test_a_resumed_job_keeps_the_checkpoint_that_it_began_with(
    folder: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "ppo", tmp_path / "ppo")
    own = tmp_path / f"ppo/checkpoints/{STEP}"
    job = (*SMALL, *QUIET, "checkpoint.save_every=1", f"output_dir={tmp_path}/dpo")
    job = (*job, f"actor.model.path={tmp_path}/ppo")
    assert command("train", *job, "max_steps=1")[0] == 0
    later = shutil.copytree(own, own.with_name("step_00000009"))
    change_job(later, lambda job: job.update(step=9))
    going_on = f"actor.model.path={tmp_path}/ppo: going on with {own}, which the job began with"
    code, shown, errors = command("train", "--validate", *job, "max_steps=2")
    assert (code, errors) == (0, [])
    assert going_on in shown
    assert command("train", *job, "max_steps=2")[0] == 0
    assert going_on in caplog.messages
    config = json.loads((tmp_path / "dpo/checkpoints/step_00000002/job.json").read_text())["config"]
    assert config["actor"]["model"]["path"] == str(own)
    shutil.rmtree(own)
    line = (
        f"error: actor.model.path: the job in {tmp_path}/dpo/checkpoints/step_00000002 began with "
        f"{own}, which is gone: put it back, or start anew with another output_dir"
    )
    for flags in ((), ("--validate",)):
        code, _, errors = command("train", *flags, *job, "max_steps=3")
        assert (code, errors) == (2, [line])


@pytest.mark.parametrize("validate", [True, False])
def test_a_checkpoint_that_does_not_serve_is_one_line(
    folder: Path, tmp_path: Path, train: Command, validate: bool
) -> None:
    broken = shutil.copytree(folder / f"reward/checkpoints/{STEP}", tmp_path / STEP)
    (broken / "__1_0.distcp").unlink()
    at = f"{folder}/ppo/checkpoints/{STEP}"
    told = {
        f"reward.model.path={folder}/ppo": f"reward.model.path: {at} holds actor and critic, and "
        "no reward: give what 'puzzle-align convert --role' makes of one of them",
        f"reward.model.path={broken}": f"reward.model.path: checkpoint {broken} is damaged or "
        "incomplete (__1_0.distcp is missing): take another",
        f"actor.model.path={folder}/reward": "actor.model: a sequence classifier gives no "
        "next-token logits; give a language model",
    }
    for override, line in told.items():
        flags = ("--validate",) if validate else ()
        code, _, errors = train(*flags, *PPO, f"output_dir={tmp_path}/out", override)
        assert code == 2
        assert [text for text in errors if text.startswith(f"error: {line}")], errors
        assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_validation_says_whose_model_is_taken(
    folder: Path, tmp_path: Path, train: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    paths = ("reward.model.path=reward", "actor.model.path=ppo/checkpoints")
    code, shown, errors = train("--validate", *PPO, f"output_dir={tmp_path}", *paths)
    assert (code, errors) == (0, [])
    models = {line.partition(":")[0]: line for line in shown[:4]}
    assert models["reference"].endswith(f"the actor of ppo/checkpoints/{STEP}")
    assert models["critic"].endswith(f"the reward of reward/checkpoints/{STEP}")
