"""Meaning of ``<role>.model.path``: a checkpoint's role, its tokenizer, and its pinned files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from puzzle_align.config.check import check_keys, raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.model_path import ModelPaths
from puzzle_align.config.resolution import Engine, Resolution
from puzzle_align.config.resolve import keep_models, try_to_resolve
from puzzle_align.config.saved import Saved, open_checkpoint
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.layout.hf_config import from_hf_config, to_hf_config
from puzzle_align.layout.model import ModelOptions, with_scalar_head
from puzzle_align.stages.tokenizer import foreign_tokenizers
from tests.checkpoints import change_job, seal
from tests.jobs import model_of, problems_of
from tests.refusals import closed, refusal
from tests.specs import CONFIG

SPEC = from_hf_config(CONFIG, "")
MODELS = {
    role: {
        "model": to_hf_config(SPEC if role == "actor" else with_scalar_head(SPEC)),
        "dtype": "fp32",
        "world_size": 1,
        "has_optimizer": True,
    }
    for role in ("actor", "reward", "critic")
}


def _saved(path: Path, *roles: str, stage: str = "dpo", **config: Any) -> Path:
    """Save the record that a checkpoint has of itself."""
    job = {"tokenizer": {"path": None}, "actor": {"model": {"path": None}}, **config}
    models = {role: MODELS[role] for role in roles}
    path.mkdir(parents=True)
    step = int(path.name[5:])
    described = {"step": step, "models": models, "config": {"stage": stage, **job}}
    (path / "job.json").write_text(json.dumps(described))
    seal(path, step)
    return path


def _job(*overrides: str, stage: str = "ppo") -> JobConfig:
    sound = f"""
stage: {stage}
actor: {{model: {{config: {json.dumps(CONFIG)}, random_weights: true}}}}
data: {{train: prompts.jsonl, max_length: 512, max_prompt_length: 256}}
generation: {{max_new_tokens: 128}}
packing: {{row_tokens: 4096}}
"""
    return load_job(sound, overrides)


@pytest.mark.parametrize(
    ("wanted", "there", "taken"),
    [
        ("actor", ("actor",), "actor"),
        ("actor", ("actor", "critic"), "actor"),
        ("reference", ("actor", "critic"), "actor"),
        ("reward", ("reward",), "reward"),
        ("reward", ("actor",), "actor"),
        ("critic", ("reward",), "reward"),
        ("critic", ("actor",), "actor"),
        ("critic", ("actor", "critic"), "critic"),
    ],
)
def test_the_role_of_that_name_is_taken_or_what_serves_for_it(
    tmp_path: Path, wanted: str, there: tuple[str, ...], taken: str
) -> None:
    step = _saved(tmp_path / "checkpoints" / "step_00000003", *there)
    named = ModelPaths().model(str(tmp_path), f"{wanted}.model")
    assert (named.path, named.role) == (step, taken)
    assert named.spec == (SPEC if taken == "actor" else with_scalar_head(SPEC))
    assert str(named) == f"the {taken} of {step}"


def test_which_of_several_is_not_guessed(tmp_path: Path) -> None:
    step = _saved(tmp_path / "step_00000003", "actor", "critic")
    (line,) = problems_of(_job(f"reward.model.path={tmp_path}", "tokenizer.path=byte"), 1)
    assert line == (
        f"reward.model.path: {step} holds actor and critic, and no reward: give what "
        "'puzzle-align convert --role' makes of one of them"
    )


def test_a_critic_without_a_model_takes_the_one_that_the_reward_has(tmp_path: Path) -> None:
    _saved(tmp_path / "step_00000003", "reward", stage="reward", reward={"model": {"path": None}})
    job = _job(f"reward.model.path={tmp_path}", "tokenizer.path=byte")
    assert model_of(job, "critic").spec.head == "scalar"
    assert problems_of(job, 1) == []


def test_a_policy_is_no_reward_model_of_stage_ppo(tmp_path: Path) -> None:
    _saved(tmp_path / "step_00000003", "actor")
    (line,) = problems_of(_job(f"reward.model.path={tmp_path}", "tokenizer.path=byte"), 1)
    assert line.startswith(f"reward.model.path: {tmp_path} is a language model, which has no")


def test_the_tokenizer_is_that_of_the_checkpoints_job(tmp_path: Path) -> None:
    own, path = f"actor.model.path={tmp_path}", tmp_path / "step_00000003"
    _saved(path, "actor", actor={"model": {"path": "/models/a"}})
    assert Resolution(_job(own)).tokenizer().path == "/models/a"
    shutil.rmtree(path)
    own_tokenizer = {"path": "/tokens", "chat_template": "{{ x }}", "of another version": 1}
    _saved(path, "actor", tokenizer=own_tokenizer)
    found = Resolution(_job(own)).tokenizer()
    assert (found.path, found.chat_template) == ("/tokens", "{{ x }}")
    replaced = Resolution(_job(own, "tokenizer.chat_template='{{ y }}'")).tokenizer()
    assert (replaced.path, replaced.chat_template) == ("/tokens", "{{ y }}")
    assert Resolution(_job(own, "tokenizer.path=byte")).tokenizer().path == "byte"
    # It is as the actor's that a job's tokenizer is looked for, whatever its reward model has.
    assert Resolution(_job(f"reward.model.path={tmp_path}")).tokenizer().path is None


def test_a_job_says_which_checkpoint_it_takes(tmp_path: Path) -> None:
    for step in (2, 10):
        _saved(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", "actor")
    paths = [f"{role}.model.path={tmp_path}/run" for role in ("actor", "reference", "critic")]
    given = _job(*paths)
    pinned = Resolution(given).pinned()
    latest = str(tmp_path / "run" / "checkpoints" / "step_00000010")
    for role in ("actor", "reference", "critic"):
        assert getattr(pinned, role).model.path == latest
    assert pinned.tokenizer.path == "byte"
    assert Resolution(pinned).pinned() == pinned
    # Nothing else is touched: neither what no role uses, nor a Hugging Face directory, of which the
    # tokenizer is taken.
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    other = _job(f"actor.model.path={tmp_path}/hf/", "reward.function=a:b")
    named = replace(other.tokenizer, path=other.actor.model.path)
    assert Resolution(other).pinned() == replace(other, tokenizer=named)


def test_an_adapter_beside_a_model_is_not_left_out_in_silence(tmp_path: Path) -> None:
    """transformers would add it to the model."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_config.json").write_text("{}")
    line = refusal(lambda: ModelPaths().model(str(tmp_path), "actor.model"))
    assert line.startswith(f"actor.model.path: {tmp_path} has an adapter beside the model")


def test_ranks_look_at_no_checkpoint_before_they_have_met(tmp_path: Path) -> None:
    path = _saved(tmp_path / "step_00000003", "actor")
    (path / "job.json").write_text("{}")
    keys = f"actor.model.path={tmp_path}", "reward.function=a:b"
    given = _job(*keys)
    check_keys(given)
    with pytest.raises(ValueError, match="is damaged or incomplete"):
        Resolution(given).all_models()
    # What is wrong without a look is told at once.
    for mistake, message in (("seed=-1", "seed: -1"), ("data.train=null", "data.train: null")):
        with pytest.raises(ValueError, match=message):
            check_keys(_job(*keys, mistake))
    missing = _job(f"actor.model.path={tmp_path}/none", "reward.function=a:b")
    with pytest.raises(ValueError, match="none: no such directory"):
        raise_first(problems_of(missing, 1))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a\0b", r"a\x00b: no such directory; give"),
        ("a" * 5000, f"{'a' * 397}...: File name too long; give"),
    ],
)
def test_what_is_no_path_is_one_line(path: str, message: str) -> None:
    job = replace(_job("reward.function=a:b"), actor=RoleConfig(model=ModelConfig(path=path)))
    assert refusal(lambda: raise_first(problems_of(job, 1))).startswith(
        f"actor.model.path: {message}"
    )


def _begun(path: Path, **paths: Path) -> Saved:
    """A checkpoint of a job that began with models in ``paths``."""
    config = {role: {"model": {"path": str(own)}} for role, own in paths.items()}
    return open_checkpoint(_saved(path, "actor", "critic", stage="ppo", **config))


def test_a_job_keeps_what_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    first, latest = (_saved(run / f"checkpoints/step_0000000{n}", "reward") for n in (1, 2))
    saved = _begun(tmp_path / "own/step_00000005", reward=first)
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "run/checkpoints", str(run)):
        job, (line,) = keep_models(_job(f"reward.model.path={folder}"), saved)
        assert job.reward.model.path == str(first)
        assert line == (
            f"reward.model.path={folder}: going on with {first}, which the job began with"
        )
    # What names a checkpoint, or another folder, is taken at its word.
    _saved(tmp_path / "other/step_00000001", "reward")
    for path in (latest, tmp_path / "other"):
        given = _job(f"reward.model.path={path}")
        assert keep_models(given, saved) == (given, [])
    other = _begun(tmp_path / "other/step_00000006", reward=tmp_path / "run/model")
    assert keep_models(given := _job(f"reward.model.path={run}"), other) == (given, [])
    with closed(run):
        line = refusal(lambda: keep_models(_job(f"reward.model.path={run}"), saved))
    assert line.startswith(f"reward.model.path: {first} cannot be read (job.json: Permission den")
    (first / "job.json").unlink()
    line = refusal(lambda: keep_models(_job("reward.model.path=run"), saved))
    assert f"began with {first}, which is gone: put it back" in line


def _foreign(*overrides: str) -> list[str]:
    resolution = Resolution(_job(*overrides))
    return foreign_tokenizers(resolution.tokenizer().path, resolution.all_models().values())


def test_another_tokenizer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of_reward = {"stage": "reward", "reward": {"model": {"path": str(tmp_path / "tokens")}}}
    step = _saved(tmp_path / "reward/step_00000001", "reward", **of_reward)
    given = "reward.model.path=reward", "critic.model.path=reward"
    assert _foreign(*given, "tokenizer.path=tokens") == []
    both = _foreign(*given)
    assert [line.partition(": ")[0] for line in both] == ["critic.model.path", "reward.model.path"]
    assert f"/{step.name} was trained with tokenizer {tmp_path}/tokens, this job" in both[1]
    assert "this job has byte: " in both[1]
    assert _foreign(given[0], "reward.model.random_weights=true") == []
    # Of what is not known, nothing is said.
    change_job(step, lambda job: job.update(config={}))
    assert _foreign(*given) == []


def test_a_checkpoint_without_a_job_names_no_tokenizer(tmp_path: Path) -> None:
    path = _saved(tmp_path / "step_00000003", "actor")
    change_job(path, lambda job: job.update(config={}))
    job = _job(f"actor.model.path={path}", "reward.function=a:b")
    resolved = try_to_resolve(job, Engine("cpu", ModelOptions()), 1)
    (line,) = resolved.problems
    assert "damaged or incomplete (job.json names no stage)" in line and resolved.job is None
