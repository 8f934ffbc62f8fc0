"""A job by a plan file, and ``puzzle-align plan``, which makes one.

The run that its keys describe, what it tells, what is refused.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from puzzle_align.config.check import check_unplanned, problems
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.resolution import Resolution
from puzzle_align.planning.costs.profile import Profile, load_profile, save_profile
from puzzle_align.planning.picture.panel import time_text
from puzzle_align.planning.plan_file import PlanFile, open_plan, save_plan
from puzzle_align.stages.engine import resolve_engine
from tests.command import main
from tests.declared import tiny_profile
from tests.e2e.conftest import Command
from tests.e2e.launch import SMALL, run_job
from tests.metrics import numbers
from tests.unit.job_plans import CONFIGS
from tests.unit.plan_files import planned

QUIET = ("telemetry.tensorboard=false", "telemetry.progress=false", "telemetry.log_every=1")
ROWS = "packing.row_tokens=64"
DPO = (*(own for own in SMALL[2:] if own != ROWS), *QUIET, "max_steps=3", "data.eval_fraction=0")
DPO_KEYS = (
    "actor.parallel.pipeline_model_parallel_size=2",
    "placement.reference=time_shared",
    ROWS,
)
PPO = (
    *("actor.model.config.hidden_size=32", "actor.model.config.intermediate_size=64"),
    *("data.num_synthetic=64", "global_batch_size=8", "generation.num_generations=2"),
    *("generation.max_new_tokens=8", *QUIET, "max_steps=4"),
)
PPO_KEYS = (
    "generation.parallel.tensor_model_parallel_size=2",
    "generation.decode_batch_size=8",
)


def _plan(name: str, keys: Sequence[str], job: Sequence[str], world_size: int) -> PlanFile:
    """Plan that the keys give on this machine."""
    engine = load_file(CONFIGS / f"{name}.yaml").engine
    options = resolve_engine(engine).options
    return planned(name, world_size, [*job, *keys], options, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``dpo.json`` and ``ppo.json``, plans for two ranks."""
    found = tmp_path_factory.mktemp("plans")
    save_plan(_plan("dpo_tiny", DPO_KEYS, DPO, 2), found / "dpo.json")
    save_plan(_plan("ppo_tiny", PPO_KEYS, PPO, 2), found / "ppo.json")
    return found


def _run(output: Path, name: str, *arguments: str) -> list[str]:
    done = run_job("--config", name, f"output_dir={output}", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def _weights(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in output.glob("checkpoints/*/*.distcp")}


# PPO obeys a plan in ``test_a_plan_is_made_reported_and_run``, and its own keys in test_ppo_runs.
@pytest.mark.parametrize(
    ("name", "keys", "job", "num_steps"),
    [
        ("dpo_tiny", DPO_KEYS, DPO, 1),
        pytest.param("ppo_tiny", PPO_KEYS, PPO, 2, marks=pytest.mark.slow),
    ],
)
def test_a_plan_s_run_is_that_of_its_keys_to_the_last_bit(
    folder: Path, name: str, keys: Sequence[str], job: tuple[str, ...], num_steps: int
) -> None:
    stage = name.partition("_")[0]
    path, by_plan, by_hand = folder / f"{stage}.json", folder / stage, folder / f"{stage}_by_hand"
    log = _run(by_plan, name, "--plan", str(path), *job)
    assert not any("measured" in line for line in _run(by_hand, name, *job, *keys))
    assert numbers(by_plan) == numbers(by_hand) != []
    assert _weights(by_plan) == _weights(by_hand) != {}
    assert not (by_hand / "plan_report.json").exists()

    predicted = json.loads(path.read_text())["predicted"]
    report = json.loads((by_plan / "plan_report.json").read_text())
    assert (report["num_steps"], report["num_left_out"]) == (num_steps, 2)
    assert set(report["times"]) == {*predicted["phases"], "iteration"}
    assert report["memory"] == {"0-1": {"predicted": 2**30, "measured": None}}
    for phase, times in report["times"].items():
        seconds = predicted["phases"].get(phase, predicted["iteration"])
        assert times["predicted"] == seconds and times["measured"] > 0
    first = log.index("summary")
    (title,) = (number for number, line in enumerate(log) if ", predicted and measured (" in line)
    assert first < title and log[title].startswith(f"{path}, ")
    *rows, memory = log[title + 2 :]
    assert [line.split()[0] for line in rows] == list(report["times"])
    assert memory.split() == ["memory,", "ranks", "0-1", "1.0", "GiB", "-", "-"]  # on a CPU


def test_a_run_goes_on_by_another_plan_as_far_as_it_does_today(folder: Path) -> None:
    output, other = folder / "resumed", folder / "other.json"
    _run(output, "dpo_tiny", "--plan", str(folder / "dpo.json"), *DPO, "checkpoint.save_every=2")
    job = tuple("max_steps=5" if own == "max_steps=3" else own for own in DPO)
    save_plan(_plan("dpo_tiny", [ROWS], job, 2), other)
    _run(output, "dpo_tiny", "--plan", str(other), *job)
    assert [record["step"] for record in numbers(output)] == [1, 2, 3, 4, 5]
    report = json.loads((output / "plan_report.json").read_text())
    assert (report["num_steps"], report["num_left_out"]) == (2, 0)
    # Once more there is no step to do, and what was measured of those that were is kept.
    assert not any(
        "measured" in line for line in _run(output, "dpo_tiny", "--plan", str(other), *job)
    )
    assert json.loads((output / "plan_report.json").read_text()) == report


def _changed(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The plan of ``dpo.json`` under another name, a field of it changed by hand."""
    data = json.loads((folder / "dpo.json").read_text())
    change(data)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data))
    return path


def _measured(trace: Path) -> tuple[int, bool]:
    """Microbatches of a traced step, and whether the reference ran before the policy began."""
    events = json.loads(trace.read_text())["traceEvents"]
    (measured,) = (e["pid"] for e in events if e["args"].get("name", "").endswith(", measured"))
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == measured]
    of = {role: [e for e in spans if e["args"]["model"] == role] for role in ("actor", "reference")}
    number = len({event["args"]["microbatch"] for event in of["actor"]})
    last_reference = max(event["ts"] for event in of["reference"])
    return number, last_reference < min(event["ts"] for event in of["actor"])


@pytest.mark.slow  # a run by a plan has the numbers of its keys above, which are of these fields
def test_a_run_obeys_a_field_that_is_changed_by_hand(folder: Path) -> None:
    traced = (*DPO, "telemetry.trace_steps=1", "max_steps=4")  # step 3 runs some of step 4's rows
    rows = _changed(folder, "rows", lambda d: d["settings"].update(row_tokens=128))
    order = _changed(
        folder, "order", lambda d: d["job_plan"]["phases"][0].update(order="sequential")
    )
    num_microbatches = []
    for path, row_tokens, is_sequential in ((rows, 128, False), (order, 64, True)):
        output = folder / f"by_{path.stem}"
        _run(output, "dpo_tiny", "--plan", str(path), *traced)
        (saved,) = output.glob("checkpoints/*/job.json")
        assert json.loads(saved.read_text())["config"]["packing"]["row_tokens"] == row_tokens
        number, before = _measured(output / "trace" / "step_3.json")
        assert before == is_sequential
        num_microbatches.append(number)
    assert num_microbatches[0] < num_microbatches[1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "{path} is for 2 ranks, and the job would have 1: start 2, or plan for 1"),
        (
            ["--validate", "--world-size", "4"],
            "{path} is for 2 ranks, and the job would have 4: start 2, or plan for 4",
        ),
        (
            ["--validate", "actor.model.config.hidden_size=64"],
            "{path}: the actor's model has hidden_size=32, and in this job (actor.model) 64: plan "
            "this job again",
        ),
    ],
)
def test_what_a_plan_is_not_for_is_one_line(
    folder: Path, tmp_path: Path, train: Command, arguments: list[str], line: str
) -> None:
    path, output = folder / "dpo.json", tmp_path / "run"
    job = ("--config", "dpo_tiny", "--plan", str(path), *DPO, f"output_dir={output}")
    code, _, errors = train(*job, *arguments)
    assert (code, errors) == (2, [f"error: {line.format(path=path)}"])
    assert not output.exists()


def test_validate_takes_ranks_and_keys_from_the_plan(
    folder: Path, tmp_path: Path, train: Command
) -> None:
    path = folder / "dpo.json"
    job = ("--config", "dpo_tiny", "--plan", str(path), *DPO, f"output_dir={tmp_path}/run")
    code, shown, errors = train(*job, "--validate")
    assert (code, errors) == (0, [])
    assert any(line.startswith("actor: llama, ") and "(P2, D1, T1)" in line for line in shown)
    assert shown[-1] == "valid: dpo on 2 ranks; nothing was trained"
    assert shown[-2] == f"{path} predicts 0.25 s an iteration: train 0.25 s"


def test_inspect_takes_ranks_and_keys_from_the_plan(folder: Path, command: Command) -> None:
    dpo = ("--config", "dpo_tiny", "--plan", str(folder / "dpo.json"), *DPO)
    code, shown, errors = command("inspect", "schedule", *dpo)
    assert (code, errors) == (0, [])
    assert any(line.startswith("actor: llama, (P2, D1, T1)") for line in shown)
    assert any("reference time_shared" in line for line in shown)
    ppo = ("--config", "ppo_tiny", "--plan", str(folder / "ppo.json"), *PPO)
    code, shown, errors = command("inspect", "reshard", *ppo)
    assert (code, errors) == (0, [])
    assert shown[1:3] == ["from (P1, D2, T1), ranks 0 to 1", "to   (P1, D1, T2), ranks 0 to 1"]
    for subject, job in (("schedule", dpo), ("reshard", ppo)):
        code, _, errors = command("inspect", subject, *job, "actor.model.config.hidden_size=64")
        assert code == 2 and len(errors) == 1
        assert "the actor's model has hidden_size=32, and in this job" in errors[0]
        code, _, errors = command("inspect", subject, *job, "--world-size", "4")
        assert code == 2 and "is for 2 ranks, and the job would have 4" in errors[0]
    code, _, errors = command("inspect", "reshard", *ppo, "--from", "1,1,1", "--to", "1,2,1")
    assert code == 2 and errors[0].startswith("error: --from and --to: --plan sets both plans")


FEW = ("data.num_synthetic=256", "telemetry.progress=false")
SHORT = (
    *("generation.max_new_tokens=8", "generation.num_generations=2", "global_batch_size=8"),
    "ppo.num_mini_batches=1",
)
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> Plan:
    """``plan(config, *arguments)`` with a declared profile: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(
        name: str, *arguments: str, profile: Profile | None = None, keys: Sequence[str] = FEW
    ) -> tuple[int, str, str]:
        job = load_file(find_config(name), keys)
        save_profile(profile or tiny_profile(job), tmp_path / "profile.json")
        own = [*keys, f"output_dir={tmp_path}/out"]
        asked = ["--profile", "profile.json", *arguments]
        code = main(["plan", "--config", name, *asked, *own])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


# DPO runs by a plan above; KTO is planned as it is, and test_chosen_plans has its plans.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dpo_tiny", marks=pytest.mark.slow),
        pytest.param("kto_tiny", marks=pytest.mark.slow),
        "reward_tiny",
        "ppo_tiny",
    ],
)
def test_a_plan_is_made_reported_and_run(name: str, plan: Plan, tmp_path: Path) -> None:
    keys = (*FEW, *SHORT) if name == "ppo_tiny" else FEW
    code, shown, errors = plan(name, "--gpus", "2", "--png", "passes.png", keys=keys)
    assert code == 0, errors
    lines = shown.splitlines()
    best = next(line.split() for line in lines if line.startswith("   1 "))
    saved, role = open_plan(tmp_path / "plan.json"), "reward" if name == "reward_tiny" else "actor"
    predicted, chosen = saved.predicted, saved.plan.context(role, "train").plan
    assert sum(predicted.phases.values()) == pytest.approx(predicted.iteration)
    # In ms, with a share of the work beside the iterations.
    assert float(best[1]) * 1e-3 == pytest.approx(predicted.iteration, rel=1e-2)
    assert any(line.startswith(f"  1: {role} {chosen}") for line in lines)
    line = f"plan.json: {time_text(predicted.iteration)} an iteration; run it with --plan"
    assert lines[-1] == line
    assert "loses by" in shown and "makespan" in shown
    assert imread(tmp_path / "passes.png").ndim == 3
    done = run_job(
        "--config", name, "--plan", str(tmp_path / "plan.json"), *keys, "max_steps=3",
        f"output_dir={tmp_path}/run", "telemetry.tensorboard=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "plan_report.json").read_text())
    assert set(report["times"]) == {*predicted.phases, "iteration", *predicted.beside}
    assert all(each["measured"] > 0 for each in report["times"].values())


def test_several_sizes_of_cluster_are_reported_and_no_plan_is_written(
    plan: Plan, tmp_path: Path
) -> None:
    code, shown, _ = plan("ppo_tiny", "--gpus", "1,2,4", "--png", "growth.png")
    assert code == 0
    rows = [line.split() for line in shown.splitlines() if line[:6].strip().isdecimal()]
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert rows[0][4] == "100%"
    assert imread(tmp_path / "growth.png").ndim == 3
    assert not (tmp_path / "plan.json").exists()


def test_where_nothing_fits_the_nearest_plan_is_reported(plan: Plan, tmp_path: Path) -> None:
    code, _, errors = plan("dpo_tiny", "--gpus", "2", "--memory", "0.0001")
    (line,) = errors.splitlines()
    assert code == 2 and line.startswith("error: --gpus 2: no plan fits the 0.00 GiB of a rank")
    assert "the nearest, actor (P" in line and "take more ranks" in line
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.dtype=bf16"], "engine.dtype: bf16, but the profile was measured with fp32"),
        (
            ["optimizer.state_dtype=bf16", "optimizer.use_distributed_optimizer=true"],
            "optimizer.state_dtype: bf16, but the profile's optimizer steps were measured with",
        ),
        ([], "an example, as long as data.max_length allows, needs 128: profile with --tokens 128"),
        (["placement.reference=sequential"], "plan decides 'placement.reference'"),
        (["--response-tokens", "4"], "--response-tokens: stage dpo samples nothing; leave it out"),
    ],
)
def test_what_does_not_fit_the_job_is_one_line(
    overrides: list[str], message: str, plan: Plan
) -> None:
    rows = (512, 1024) if overrides else (8,)
    profile = tiny_profile(load_file(find_config("dpo_tiny"), FEW), rows)
    code, _, errors = plan("dpo_tiny", "--gpus", "2", *overrides, profile=profile)
    (line,) = errors.splitlines()
    assert code == 2 and message in line, line


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("dpo_tiny", "global_batch_size=0", "global_batch_size: 0 is out of range; choose at"),
        ("ppo_tiny", "global_batch_size=1", "ppo.num_mini_batches: 2 do not divide the 1 prompts"),
        ("dpo_tiny", "data.max_length=300", "data.max_length: 300 is over max_position_embeddings"),
        ("dpo_tiny", "actor.lora.target_modules=x", "actor.lora.target_modules: ['x']; give"),
        ("dpo_tiny", "reference.base=actor", "reference.base: actor, but all weights of the actor"),
    ],
)
def test_a_wrong_key_is_one_line_before_the_search(
    name: str, override: str, message: str, plan: Plan
) -> None:
    code, shown, errors = plan(name, "--gpus", "2", override)
    assert (code, shown) == (2, "") and errors.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("dpo_tiny", ["placement.reference=concurrent", "packing.row_tokens=64"]),
        ("kto_tiny", ["kto.precompute_ref_log_probs=true"]),
        ("grpo_tiny", ["critic.parallel={}", "critic.ranks=4-7"]),
        ("ppo_tiny_lora", ["generation.overlap_switch=true"]),
    ],
)
def test_what_the_plan_will_decide_is_not_checked(name: str, overrides: list[str]) -> None:
    job = load_file(find_config(name), overrides)
    assert problems(Resolution(job))
    check_unplanned(job)


def test_a_folder_that_is_missing_is_said_before_the_search(plan: Plan) -> None:
    code, shown, errors = plan("dpo_tiny", "--gpus", "2", "--output", "none/plan.json")
    assert (code, shown) == (2, "") and "none is not a writable folder; make it" in errors


def test_responses_are_taken_no_longer_than_they_may_be(plan: Plan) -> None:
    code, _, errors = plan("ppo_tiny", "--gpus", "2", "--response-tokens", "17")
    line = "error: --response-tokens 17: responses have generation.max_new_tokens=16 at most; give"
    assert code == 2 and errors == f"{line} no more\n"


def test_a_file_that_is_no_profile_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--config", "dpo_tiny", "--gpus", "2", "--profile"]
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    other = tmp_path / "other.json"
    other.write_text('{"format": 0}')
    for path, message in (
        (tmp_path / "none.json", "no such file; make it with puzzle-align profile"),
        (broken, "make it with puzzle-align profile"),
        (other, "format 0, and this version reads 1"),
    ):
        assert main([*asked, str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}") and message in line


@pytest.mark.parametrize(
    ("option", "value", "cure"),
    [
        ("--memory", "80GB", "give a number above 0"),
        ("--margin", "8%", "give a number of at least 0, below 1"),
        ("--gpus", "8,x", "give a whole number of at least 1"),
    ],
)
def test_an_option_that_is_no_number_has_a_cure(
    option: str, value: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"--config": "dpo_tiny", "--profile": "p.json", "--gpus": "2", option: value}
    with pytest.raises(SystemExit):
        main(["plan", *(word for pair in asked.items() for word in pair)])
    named = value.rpartition(",")[2]
    assert f"argument {option}: {named}: {cure}" in " ".join(capsys.readouterr().err.split())


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = tiny_profile(load_file(find_config("ppo_tiny"), FEW))
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
