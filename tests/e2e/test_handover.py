"""A stage that starts from the checkpoints of the one before, as a user chains them.

A resumed run goes on with the weights that it began with, wherever they lie by now.
"""

import json
import math
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.saved import find_checkpoint
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.stages.weights import find_starts
from tests.bounds import LOSS_BOUND
from tests.checkpoints import change_job, flip
from tests.dist.spawn import run_ranks
from tests.e2e.conftest import Command
from tests.e2e.launch import SMALL
from tests.e2e.test_ppo_cli import PPO, QUIET, SIZES, _run
from tests.jobs import resolved
from tests.metrics import numbers, records
from tests.specs import CONFIG

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
    assert f"the reward of {folder}/reward/checkpoints/{STEP}" in log
    return folder


def _reward(path: Path) -> tuple[str, ...]:
    return f"reward.model.path={path}", f"critic.model.path={path}"


def test_ppo_computes_what_it_does_from_the_converted_reward_model(
    folder: Path, command: Command
) -> None:
    assert command("convert", f"{folder}/reward", f"{folder}/hf")[0] == 0
    _run(*PPO, *ONE, f"output_dir={folder}/converted", *_reward(folder / "hf"))
    own, converted = (numbers(folder / name) for name in ("ppo", "converted"))
    assert own == converted
    assert [record["step"] for record in own] == [1]


def test_the_next_stage_needs_no_more_than_one_checkpoint(
    folder: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(folder / "ppo", tmp_path / "ppo")
    job = (*SMALL, *QUIET, "checkpoint.save_every=1", f"output_dir={tmp_path}/dpo")
    job = (*job, f"actor.model.path={tmp_path}/ppo")
    assert command("train", *job, "max_steps=1")[0] == 0
    started = f", the actor of {tmp_path}/ppo/checkpoints/{STEP}"
    roles = [line.partition(":")[0] for line in caplog.messages if line.endswith(started)]
    assert roles == ["actor", "reference"]  # which has the actor's
    config = json.loads((tmp_path / f"dpo/checkpoints/{STEP}/job.json").read_text())["config"]
    assert config["actor"]["model"]["path"] == f"{tmp_path}/ppo/checkpoints/{STEP}"
    assert config["tokenizer"]["path"] == "byte"
    # What it left behind says all by itself which tokenizer it has.
    os.rename(tmp_path / "ppo", tmp_path / "away")
    sampling = ("--prompt", "a", "generation.max_new_tokens=4")
    code, shown, errors = command("generate", "--model", f"{tmp_path}/dpo", *sampling)
    assert code == 0, errors
    assert json.loads(shown[-1])["prompt"] == "a"


@pytest.mark.parametrize("precompute", [True, False])
def test_adapters_are_trained_on_the_model_of_a_checkpoint(
    folder: Path, tmp_path: Path, command: Command, precompute: bool
) -> None:
    """The reference reads nothing of it, since all its weights are the actor's."""
    job = (*SMALL, *QUIET, f"actor.model.path={folder}/ppo", "max_steps=1")
    adapted = ("actor.lora.r=2", f"dpo.precompute_ref_log_probs={precompute}".lower())
    for name, keys in (("whole", ()), ("adapted", adapted)):
        code, _, errors = command("train", *job, *keys, f"output_dir={tmp_path}/{name}")
        assert code == 0, errors
    whole, first = (
        next(record for record in records(tmp_path / name) if "loss" in record)
        for name in ("whole", "adapted")
    )
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    for name in ("logps/chosen", "logps/rejected"):  # adapters change nothing at first
        assert first[name] == pytest.approx(whole[name], rel=LOSS_BOUND)


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
    problems = {
        f"reward.model.path={folder}/ppo": f"reward.model.path: {at} holds actor and critic, and "
        "no reward: give what 'puzzle-align convert --role' makes of one of them",
        f"reward.model.path={broken}": f"reward.model.path: checkpoint {broken} is damaged or "
        "incomplete (__1_0.distcp is missing): take another",
        f"actor.model.path={folder}/reward": "actor.model: a sequence classifier gives no "
        "next-token logits; give a language model",
    }
    for override, line in problems.items():
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


MODEL = {**CONFIG, "hidden_size": 32}
SAVED = "run/checkpoints/*/job.json"
CHANGED = "model.layers.3.mlp.down_proj.weight"


def _model(folder: Path, seed: int = 0, changed: int = 0, **config: Any) -> Path:
    """A model of a seed, one of its tensors of another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, **config}))
    tensors = {}
    shapes = hf_shapes(from_hf_config({**MODEL, **config}, ""))
    for number, (name, shape) in enumerate(shapes.items()):
        own = 100 * (changed if name == CHANGED else seed) + number
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(own))
        tensors[name] = 0.02 * drawn + (1 if len(shape) == 1 else 0)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _job(output: Path, steps: int, role: str, model: Path) -> list[str]:
    own = (f"{role}.model.path={model}", f"actor.model.random_weights={role != 'actor'}".lower())
    return [*SMALL, *own, "tokenizer.path=byte", f"output_dir={output}", f"max_steps={steps}"]


# The actor's is found by the same check, and refused for other sizes in test_loop_roles, too.
@pytest.mark.parametrize("role", ["reference", pytest.param("actor", marks=pytest.mark.slow)])
def test_a_frozen_model_is_the_one_that_the_run_began_with(
    role: str, tmp_path: Path, train: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """``role``: who has the model; the actor's is also that of the reference."""
    first, moved, output = _model(tmp_path / "first"), tmp_path / "moved", tmp_path / "run"
    assert train(*_job(output, 1, role, first))[0] == 0
    first.rename(moved)
    resumed = _job(output, 2, role, moved)
    assert train(*resumed)[0] == 0
    saved = find_checkpoint(output)
    assert saved.step == 2 and "resumed from step 1 of 2" in caplog.messages

    begun = f"error: {role}.model: the reference in {saved.path} began with "
    cure = "put it back, or start anew with another output_dir"
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"changed": 1}, f"other weights than are in {moved} now: {cure}"),
        ({"rms_norm_eps": 1e-5}, f"rms_norm_eps=1e-06, and here is 1e-05: {cure}"),
    )
    for change, difference in changes:
        line = begun + difference
        if role == "actor" and "rms_norm_eps" in change:
            line = f"error: {saved.path} is of another model than {role}.model: rms_norm_eps is"
            line += " 1e-05, but 1e-06 there: "
        _model(moved, **change)
        code, _, shown = train(*resumed)
        assert code == 2
        assert len(shown) == 1 and shown[0].startswith(line), shown
    _model(moved)
    weights = moved / "model.safetensors"
    start = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    for place in (start, start + 77_777, weights.stat().st_size - 1):
        flip(weights, place)
        code, _, shown = train(*resumed)
        assert code == 2 and len(shown) == 1, shown
        assert shown[0] == f"{begun}other weights than are in {moved} now: {cure}"
        flip(weights, place)
    assert train(*resumed)[0] == 0


def test_a_reward_model_neither_joins_nor_leaves_a_run_that_is_under_way(
    folder: Path, tmp_path: Path, train: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """No critic starts from it: nothing else would tell that the rewards are others."""
    function = "reward.function=puzzle_align.data.synthetic:vowel_share"
    group = (*PPO, function, "ppo.advantage_estimator=grpo", "ppo.kl_coef=0", "max_steps=2")
    scored = f"reward.model.path={folder}/reward"
    began = {"without": (), "with": (scored,)}
    errors = {}
    for name, reward in began.items():
        job = (*group, f"output_dir={tmp_path}/{name}")
        assert train(*job, *reward, "max_steps=1")[0] == 0
        (other,) = (value for key, value in began.items() if key != name)
        code, _, (errors[name],) = train(*job, *other)
        assert code == 2
        assert train(*job, *reward)[0] == 0
    assert caplog.messages.count("resumed from step 1 of 2") == 2
    for name, line in errors.items():
        saved = tmp_path / name / "checkpoints" / STEP
        assert line.startswith(f"error: reward.model: the job in {saved} began {name}"), line
        assert line.endswith(", or start anew with another output_dir")
    assert f" a reward ({folder}/reward/checkpoints/{STEP}), and here is none: " in errors["with"]


def test_a_trained_model_needs_its_start_no_more(tmp_path: Path, train: Command) -> None:
    """A path to other weights is no way to train those in a run that is under way."""
    head = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    first, other = (_model(tmp_path / str(n), seed=n, **head) for n in (1, 2))
    own = ("--config", "reward_tiny", "packing.row_tokens=64", "data.max_length=64")
    few = ("data.num_synthetic=64", "global_batch_size=16", "tokenizer.path=byte")
    common = (*own, *few, f"output_dir={tmp_path}/run")

    def ends(path: Path, steps: int) -> tuple[int, list[str], list[str]]:
        return train(*common, f"reward.model.path={path}", f"max_steps={steps}")

    assert ends(first, 1)[0] == 0
    code, _, (line,) = ends(other, 2)
    assert code == 2 and line.startswith("error: reward.model: the reward in ")
    assert f"began with other weights than are in {other} now: " in line
    _model(first, seed=2, **head)
    assert ends(first, 2)[0] == 0
    # Nor is what lies there by now what the run began with, however often it was saved since.
    begun, later = (json.loads(file.read_text()) for file in sorted(tmp_path.glob(SAVED)))
    assert (begun["step"], later["step"]) == (1, 2)
    assert later["starts"] == begun["starts"] and later["job_id"] == begun["job_id"]


def test_another_model_on_another_node_s_disk_is_refused(tmp_path: Path) -> None:
    for number, change in enumerate((0, 0, 1)):
        _model(tmp_path / f"node{number}" / "model", changed=change)
    assert run_ranks(_as_nodes, 2, tmp_path, (0, 1)) == [None, None]
    lines = run_ranks(_as_nodes, 2, tmp_path, (0, 2))
    wrong = f"on node {platform.node()}: reference.model.path: model is another model there than"
    assert lines == [f"{wrong} on rank 0's node: copy it again"] * 2


def _as_nodes(rank: int, world_size: int, folder: Path, nodes: tuple[int, int]) -> str | None:
    """Error about the models of two nodes, each in the folder that a node's ranks are in."""
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(folder / f"node{nodes[rank]}")
    keys = ["reference.model.path=model", "actor.model.config.hidden_size=32"]
    config = load_file(find_config("dpo_tiny"), keys)
    try:
        find_starts(resolved(config, world_size))
    except ValueError as error:
        return str(error)
    return None
