"""Stage ppo as a user runs it: a chain from preference pairs to an aligned model, and mistakes."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.e2e import bad_rewards
from tests.e2e.conftest import Command
from tests.e2e.launch import run_job
from tests.metrics import numbers
from tests.unit.test_reward_worker import end

SIZES = ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2")
QUIET = ("telemetry.tensorboard=false", "telemetry.progress=false")
PPO = (
    *("--config", "ppo_tiny", *QUIET, "data.num_synthetic=64", "global_batch_size=8"),
    *(f"actor.model.config.{size}" for size in SIZES),
    *("generation.num_generations=2", "checkpoint.save_every=2"),
    # Beside a reward model of its own, and data.
    *("actor.model.random_weights=true", "tokenizer.path=byte"),
)
VOWELS = "reward.function=puzzle_align.data.synthetic:vowel_share"
SAMPLES_ON_T2 = "generation.parallel.tensor_model_parallel_size=2"
MOMENTS = ("mean", "std")
LAST = "checkpoints/step_00000004"


def _run(*arguments: str) -> str:
    done = run_job(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _tensors(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / LAST).glob("*.distcp")}


def _half_of(ppo: Path, again: Path) -> Path:
    """A copy of a run as it was at the checkpoint in its middle."""
    shutil.copytree(ppo, again)
    shutil.rmtree(again / LAST)
    return again


def test_a_resumed_run_is_the_whole_one_to_the_last_bit(tmp_path: Path, train: Command) -> None:
    ppo, again = tmp_path / "ppo", tmp_path / "again"
    job = (*PPO, VOWELS, "max_steps=4")
    assert train(*job, f"output_dir={ppo}")[0] == 0
    assert train(*job, f"output_dir={_half_of(ppo, again)}")[0] == 0
    assert [record["step"] for record in numbers(ppo)] == [1, 2, 3, 4]
    assert numbers(again) == numbers(ppo)
    assert _tensors(again) == _tensors(ppo) != {}


def test_a_key_that_a_resumed_run_keeps_is_named_before_anything_is_loaded(
    tmp_path: Path, train: Command
) -> None:
    job = (*PPO, VOWELS, f"output_dir={tmp_path}/ppo")
    assert train(*job, "max_steps=1")[0] == 0
    cure = f" in {tmp_path}/ppo/checkpoints/step_00000001: restore it, or start anew with another"
    changes = {
        "ppo.lam=0.9": "ppo.lam is 0.9, but 0.95",
        "optimizer.adam_beta1=0.8": "optimizer.adam_beta1 is 0.8, but 0.9",  # the critic's, too
        "critic.optimizer.adam_beta1=0.8": "critic.optimizer.adam_beta1 is 0.8, but 0.9",
    }
    for change, line in changes.items():
        for mode in (), ("--validate",):
            code, shown, errors = train(*mode, *job, "max_steps=2", change)
            assert code == 2
            assert errors == [f"error: {line}{cure} output_dir"], errors
            assert mode or not any(text.startswith("data:") for text in shown)
    code, shown, errors = train("--validate", *job, "max_steps=2", "optimizer.lr=1e-4")
    assert (code, errors) == (0, []), errors


# Others have each part: above, test_handover from pairs to PPO, test_convert from PPO to models.
@pytest.mark.slow
def test_from_preference_pairs_to_a_model_that_transformers_loads(
    tmp_path: Path, command: Command
) -> None:
    reward, ppo, again = tmp_path / "reward", tmp_path / "ppo", tmp_path / "again"
    _run(
        *("--config", "reward_tiny", *QUIET, f"output_dir={reward}", "max_steps=2"),
        *(f"reward.model.config.{size}" for size in SIZES),
        *("data.num_synthetic=64", "data.eval_fraction=0.1", "global_batch_size=16"),
    )
    assert command("convert", str(reward), str(reward / "hf"))[0] == 0
    job = (*PPO, "max_steps=4", f"reward.model.path={reward}/hf", SAMPLES_ON_T2)
    log = _run(*job, f"output_dir={ppo}")
    assert "phases" in log and "switch" in log
    assert "samples at step 4" in log and "reward" not in log.splitlines()[-1]
    assert [record["step"] for record in numbers(ppo)] == [1, 2, 3, 4]
    # From the checkpoint in the middle, once more: the same to the last bit.
    _run(*job, f"output_dir={_half_of(ppo, again)}")
    assert numbers(again) == numbers(ppo)
    assert _tensors(again) == _tensors(ppo) != {}
    assert command("convert", str(ppo), str(ppo / "actor"))[0] == 0
    assert command("convert", str(ppo), str(ppo / "critic"), "--role", "critic")[0] == 0
    actor = AutoModelForCausalLM.from_pretrained(ppo / "actor", dtype=torch.float32)
    assert actor(torch.tensor([[257, 65]])).logits.shape == (1, 2, 260)
    critic = AutoModelForSequenceClassification.from_pretrained(ppo / "critic")
    assert critic.config.num_labels == 1


def test_functions_written_for_trl_reward_a_run_on_messages(tmp_path: Path) -> None:
    """Three with weights, one of them asynchronous."""
    questions = [f"How many is {n} + 1?" for n in range(16)]
    rows = [
        {"prompt": [{"role": "user", "content": asked}], "response": f"#### {n + 1}"}
        for n, asked in enumerate(questions)
    ]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("tests.unit.grpo_rewards:right", "tests.unit.grpo_rewards:short")
    own = ("data.format=auto", f"data.train={data}", "data.max_length=80")
    functions = f"reward.function=[{', '.join(names)}, tests.unit.grpo_rewards:judged]"
    job = (*PPO, *own, functions, f"output_dir={tmp_path}/out", "max_steps=2")
    offload = "generation.offload_optimizer=true"
    log = _run(*job, "reward.weights=[1, 0.01, 2]", SAMPLES_ON_T2, offload)
    assert "Warning" not in log  # no library's
    assert "phases" in log and "switch" in log and "samples at step 1" in log
    first, last = numbers(tmp_path / "out")
    names = [f"rewards/{name}/{what}" for name in ("right", "Short", "judged") for what in MOMENTS]
    assert {*names, "accuracy"} <= {*first} and first["accuracy"] == first["rewards/right/mean"]
    for record, done in ((first, 0), (last, 1)):
        assert record["rewards/Short/mean"] == -done / 2 * record["completions/mean_length"]
        parts = [record[f"rewards/{name}/mean"] for name in ("right", "Short", "judged")]
        weighed = parts[0] + 0.01 * parts[1] + 2 * parts[2]
        assert record["objective/scores"] == pytest.approx(weighed, rel=1e-12)
    samples = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").open()]
    assert len(samples) > 0
    assert all("found" in sample and "How many" in sample["prompt"] for sample in samples)


def test_an_iteration_without_an_update_is_said(
    tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    """Sampling rounds otherwise than training: that alone is above such a target."""
    job = (*PPO, VOWELS, "max_steps=1")
    code, _, errors = command("train", *job, f"output_dir={tmp_path}", "ppo.target_kl=1e-30")
    assert code == 0, errors
    said = [line for line in caplog.messages if line.startswith("an iteration without an update")]
    assert len(said) == 1 and said[0].endswith("above ppo.target_kl=1e-30")


def test_a_reward_function_that_fails_ends_the_job_with_one_line(tmp_path: Path) -> None:
    """The line is the last on the screen, and names the user's file and one with the traceback."""
    name = "tests.e2e.bad_rewards:raises"
    done = run_job(*PPO, f"output_dir={tmp_path}", f"reward.function={name}", "max_steps=6")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    place = re.escape(f"{bad_rewards.__file__}:{_first_line(bad_rewards.raises) + 2}")
    said = rf"reward.function={name}: ZeroDivisionError: \S.+ \({place}\)"
    line = rf"error( on rank (?P<rank>\d))?: {said} \(traceback: (?P<file>\S+)\)"
    matched = re.fullmatch(line, last)
    assert matched is not None, last
    assert matched["file"] == f"{tmp_path}/traceback_rank{matched['rank'] or 0}.txt"
    trace = Path(matched["file"]).read_text().splitlines()
    assert trace[-1].startswith("ZeroDivisionError") and any("in raises" in line for line in trace)
    assert "Traceback" not in done.stderr


def _first_line(function: Callable[..., object]) -> int:
    return function.__code__.co_firstlineno  # type: ignore[attr-defined]


def test_a_job_that_is_asked_to_stop_leaves_nothing_of_its_reward_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pools' workers know nothing of what the ranks do with the signal."""
    workers = tmp_path / "workers"
    monkeypatch.setenv("WORKERS", str(workers))
    monkeypatch.setenv("MARK", str(tmp_path))
    own = (f"output_dir={tmp_path}", "reward.function=tests.e2e.bad_rewards:pools")
    done = run_job(*PPO, *own, "max_steps=6", "actor.parallel.data_parallel_size=2")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "asked to stop: saved step 2; run again to resume from it" in done.stderr
    assert len({*workers.read_text().split()}) == 2  # one a rank
    assert end(str(tmp_path))


def test_a_warm_up_as_long_as_the_job_is_an_error_before_training(
    tmp_path: Path, train: Command
) -> None:
    """Its length is known once the data are read."""
    keys = ("max_steps=-1", "ppo.critic_warmup=8")
    code, _, errors = train(*PPO, f"output_dir={tmp_path}", *keys)
    line = "none of the job's 8 iterations to the actor"
    assert code == 2 and any(line in shown for shown in errors), errors
    assert not (tmp_path / "metrics.jsonl").exists()
