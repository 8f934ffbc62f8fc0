"""``plan.json`` written and read, its keys in a config, and a job held against it."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from puzzle_align.cli.main import main
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import Decided, dump_job, load_file, load_job
from puzzle_align.config.placement import job_plan
from puzzle_align.planning.costs.profile import load_profile, save_profile
from puzzle_align.planning.memory.job import ranks_named
from puzzle_align.planning.plan_file import PlanFile, Predicted, load_plan, save_plan
from tests.unit.job_plan_strategies import job_plans
from tests.unit.job_plans import CONFIGS, OPTIONS
from tests.unit.plan_files import given, planned
from tests.unit.planner_spaces import SMALL, measured_of

P, T = "actor.parallel.pipeline_model_parallel_size", "actor.parallel.tensor_model_parallel_size"
KEYS = {P: 2, "placement.reference": "sequential"}
seconds = st.floats(0, 1e9, allow_nan=False)
values = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9)
    | st.lists(st.integers(1, 9), max_size=3)
    | st.dictionaries(st.text(max_size=5), st.integers(), max_size=2)
)
files = st.builds(
    PlanFile,
    keys=st.dictionaries(st.text(max_size=12), values, max_size=3),
    job_plan=job_plans(),
    predicted=st.builds(
        Predicted,
        iteration=seconds,
        phases=st.dictionaries(st.text(max_size=9), seconds, max_size=3),
        memory=st.dictionaries(st.just("0"), st.integers(0, 2**50)),
    ),
    notes=st.lists(st.text(max_size=20), max_size=2).map(tuple),
)


@drawn(files)
@settings(max_examples=50)  # it waits for the disk
def test_a_plan_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, file: PlanFile) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.json"
    save_plan(file, path)
    read = load_plan(path)
    assert read == file
    assert list(read.keys) == list(file.keys)  # they are set in their order
    assert (read.stage, read.world_size) == (file.job_plan.stage, file.job_plan.world_size)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda d: d.pop("keys"), ": key 'keys' is missing"),
        (lambda d: d.update(format=9), ": format 9, and this version reads 1"),
        (lambda d: d.update(keys=[]), ".keys: expected a mapping, got a list"),
        (
            lambda d: d["job_plan"].update(world_size="2"),
            ".job_plan.world_size: expected an integer, got '2'",
        ),
        (
            lambda d: d["job_plan"]["phases"][0]["contexts"][0].update(ranks=[0, 2]),
            ".job_plan: the reference's ranks [0, 2] are not 2 different ones of the 2",
        ),
        (
            lambda d: d["predicted"].update(iteration=float("nan")),
            ".predicted.iteration: expected a number, got nan",
        ),
        (
            lambda d: d["predicted"]["phases"].update(train=-1.0),
            ".predicted.phases.train: -1.0 are no seconds",
        ),
        (
            lambda d: d["predicted"].update(memory={"0-2": 1}),
            ".predicted.memory: ranks 0-2 are not among the 2",
        ),
        (
            lambda d: d["predicted"].update(memory={"all": 1}),
            ".predicted.memory: 'all' are no ranks, such as 0-3,8",
        ),
    ],
)
def test_what_is_no_plan_is_one_line(tmp_path: Path, change: Change, line: str) -> None:
    path = tmp_path / "plan.json"
    save_plan(planned("dpo_tiny", 2, KEYS), path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as raised:
        load_plan(path)
    said = str(raised.value)
    assert said.startswith(f"{path}{line}") and "; make it " in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (None, "no such file; make it"),
        ("{", "make it with puzzle-align plan"),
        ("[]", "is not a JSON object"),
        ("{}", "format None"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, written: str | None, line: str
) -> None:
    path = tmp_path / "plan.json"
    if written is not None:
        path.write_text(written)
    with pytest.raises(ValueError, match=line) as raised:
        load_plan(path)
    assert str(raised.value).startswith(f"{path}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "ranks"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,8", [0, 1, 8])]
)
def test_ranks_by_name(name: str, ranks: list[int]) -> None:
    assert ranks_named(name, "memory") == ranks


@pytest.mark.parametrize("name", ["", "0-", "-1", "1-0", "0,,1", "0-1-2", "a"])
def test_what_names_no_ranks(name: str) -> None:
    with pytest.raises(ValueError, match=r"^memory: '.*' are no ranks, such as 0-3,8"):
        ranks_named(name, "memory")


def _load(keys: dict[str, Any], *overrides: str, text: str = "") -> JobConfig:
    return load_job(text, overrides, decided=Decided("plan.json", keys))


def test_keys_are_those_of_a_config_that_says_so() -> None:
    text = "stage: ppo\ngeneration: {parallel: {data_parallel_size: 8}, ranks: 0-7}\nseed: 5\n"
    keys = {
        "generation.ranks": None,
        "generation.parallel": None,
        "generation.parallel.tensor_model_parallel_size": 2,
        "actor.parallel": {"pipeline_layers": [3, 2]},
        "actor.ranks": "0-3",
        "optimizer.lr": 1e-06,
        "actor.model.path": 'a "b" é',
    }
    job = _load(keys, "seed=7", text=text)
    assert job.generation.ranks is None
    assert job.generation.parallel is not None
    assert job.generation.parallel.data_parallel_size is None
    assert job.generation.parallel.tensor_model_parallel_size == 2
    assert job.actor.parallel is not None and job.actor.parallel.pipeline_layers == [3, 2]
    assert (job.actor.ranks, job.optimizer.lr, job.seed) == ("0-3", 1e-6, 7)
    assert job.actor.model.path == 'a "b" é'
    assert load_job(dump_job(job)) == job


@pytest.mark.parametrize(
    ("override", "decided"),
    [
        (f"{P}=4", P),
        ("actor.parallel=null", P),
        ("actor.parallel.recompute=full", "actor.parallel.recompute"),
        ("reference.parallel.recompute=full", "reference.parallel"),
    ],
)
def test_an_override_of_what_is_decided_is_an_error(override: str, decided: str) -> None:
    keys = {"seed": 3, P: 2, "actor.parallel.recompute": "none", "reference.parallel": None}
    with pytest.raises(ValueError) as raised:
        _load(keys, override)
    assert str(raised.value) == (
        f"override '{override}': plan.json decides '{decided}'; leave the override out, or plan "
        "the job again with it"
    )
    assert _load(keys, "actor.model.path=x", f"{T}=2").seed == 3  # others may be overridden


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"actor.paralel.recompute": "full"},
            "unknown key 'actor.paralel'; the nearest known one is 'actor.parallel'",
        ),
        ({"seed.x": 1}, "'seed' is a value, not a section with 'x'"),
        ({P: "two"}, f"{P}: expected an integer, got 'two'"),
        ({"seed": None}, "seed: null is not a value here"),
        ({"placement.score": "all"}, "placement.score: 'all' is not one of "),
    ],
)
def test_a_key_that_the_config_does_not_have_is_an_error(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as raised:
        _load(keys, text="seed: 1")
    assert str(raised.value).startswith(f"plan.json: {line}")


def _refused(
    name: str, keys: dict[str, Any], overrides: Sequence[str], file: PlanFile | None = None
) -> str:
    """What is said of a job with the keys and overrides, where ``file`` was planned without."""
    file = file or planned(name, 4, keys)
    job = load_file(CONFIGS / f"{name}.yaml", overrides, given(file).decided)
    with pytest.raises(ValueError) as raised:
        given(file).check_job_plan(job, job_plan(job, OPTIONS, 4))
    said = str(raised.value)
    assert said.startswith("plan.json: ") and said.endswith(": plan this job again")
    assert "\n" not in said
    return said.removeprefix("plan.json: ").removesuffix(": plan this job again")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["actor.model.config.hidden_size=256"],
            "the actor's model has hidden_size=128, and in this job (actor.model) 256",
        ),
        (
            ["actor.parallel.recompute=full"],
            "the actor runs with recompute=none, and in this job (engine, actor.parallel) full",
        ),
        ([f"{T}=2"], "the actor's plan (train) has data=2, and in this job (actor.parallel) 1"),
        (
            ["dpo.loss_type=simpo"],
            "its phases are train (infer reference, train actor), and this job's train (train "
            "actor)",
        ),
        (
            ["dpo.precompute_ref_log_probs=true"],
            "its phases are train (infer reference, train actor), and this job's precompute (infer "
            "reference), train (train actor)",
        ),
    ],
)
def test_a_job_of_another_plan_is_refused(overrides: list[str], line: str) -> None:
    assert _refused("dpo_tiny", {P: 2}, overrides) == line


@pytest.mark.parametrize(
    ("keys", "overrides", "line"),
    [
        (
            {"critic.ranks": "2-3", "critic.parallel": {}},
            ["actor.ranks=0-1", "actor.parallel.data_parallel_size=2"],
            "the actor's plan (train) has data=4, and in this job (actor.parallel) 2",
        ),
        (
            {"generation.ranks": "0-1", "generation.parallel.data_parallel_size": None},
            ["generation.parallel.tensor_model_parallel_size=2"],
            "the actor's plan (generate) has data=2, and in this job (generation.parallel) 1",
        ),
        (
            {"generation.parallel.data_parallel_size": 2},
            ["generation.ranks=2-3"],
            "the actor (generate) has ranks=(0, 1), and in this job (generation.parallel) (2, 3)",
        ),
        ({P: 2}, ["placement.learn=sequential"], "its phase learn has order=time_shared, and in "),
    ],
)
def test_a_ppo_job_of_another_plan_is_refused(
    keys: dict[str, Any], overrides: list[str], line: str
) -> None:
    before = ["generation.ranks=0-1"] if "ranks=2-3" in overrides[0] else []
    file = planned("ppo_tiny", 4, keys, before)
    assert _refused("ppo_tiny", keys, overrides, file).startswith(line)


def test_a_job_of_the_same_plan_is_not_refused() -> None:
    file = planned("dpo_tiny", 4, {P: 2})
    job = load_file(CONFIGS / "dpo_tiny.yaml", ["dpo.beta=0.5"], given(file).decided)
    given(file).check_job_plan(job, file.job_plan)


def test_ranks_and_stage_are_those_that_were_planned() -> None:
    plan = given(planned("dpo_tiny", 4, {P: 2}))
    plan.check_world_size(4)
    with pytest.raises(ValueError) as raised:
        plan.check_world_size(8)
    assert str(raised.value) == (
        "plan.json is for 4 ranks, and the job would have 8: start 4, or plan for 8"
    )
    with pytest.raises(ValueError, match=r"^plan\.json is for stage dpo, and the job is of stage"):
        load_file(CONFIGS / "ppo_tiny.yaml", decided=plan.decided)


def test_the_config_that_is_printed_is_the_one_that_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(planned("dpo_tiny", 2, KEYS), tmp_path / "plan.json")
    plan = ("--plan", str(tmp_path / "plan.json"))
    assert main(["train", "--config", "dpo_tiny", *plan, "--print-config", "seed=5"]) == 0
    overrides = ["seed=5", *(f"{key}={value}" for key, value in KEYS.items())]
    expected = load_file(CONFIGS / "dpo_tiny.yaml", overrides)
    assert load_job(capsys.readouterr().out) == expected
    assert main(["train", "--config", "dpo_tiny", *plan, "--print-config", f"{P}=1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: override '{P}=1': {plan[1]} decides '{P}'; ")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: text.replace('"median": ', '"median": -', 1), "median: -.* is below 0"),
        (lambda text: text.replace('"tensor": 1', '"tensor": 0', 1), "tensor: 0 is below 1"),
        (lambda text: text.replace('"hidden_size": ', '"hidden_size": -', 1), "is below 1"),
        (lambda text: text.replace('"median": ', '"median": 1e999, "x": ', 1), "'x' is unknown"),
        (
            lambda text: text.replace('"spread": 0.0', '"spread": 1e999', 1),
            "spread: expected a number, got inf",
        ),
        (
            lambda text: text.replace('"tensor": 1', f'"tensor": {10**30}', 1),
            "tensor: expected an integer, got 1000",
        ),
        (lambda text: text.replace("{", '{"format": 1, ', 1), "'format' is given twice"),
        (lambda text: text.replace("[", "[" * 100_000, 1), "nested too deep"),
        (lambda text: text.replace('"format": 1', '"format": true', 1), "format True, and"),
        *(
            (
                lambda text, name=name: re.sub(f'"{name}": ("[^"]*"|null)', f'"{name}": "x"', text),
                f"{name}: expected .*, got 'x'; make it again",
            )
            for name in ("dtype", "fp8", "fp8_recipe", "transformer_impl", "recompute")
        ),
    ],
)
def test_a_profile_of_other_values_is_one_line(tmp_path, change, line) -> None:
    path = tmp_path / "profile.json"
    save_profile(measured_of(SMALL).profile, path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=line) as raised:
        load_profile(path)
    assert str(raised.value).startswith(str(path)) and "\n" not in str(raised.value)


def test_a_plan_of_absurdly_many_ranks_is_one_line(tmp_path) -> None:
    path = tmp_path / "plan.json"
    save_plan(planned("dpo_tiny", 4, {P: 2}), path)
    text = path.read_text()
    for was, now, line in (
        ('"world_size": 4', f'"world_size": {10**18}', "world_size=1000.* is no number of ranks"),
        ('"0-3": ', '"0-999999999": ', "ranks 0-999999999 are not among the 4"),
        ('"0-3": ', '"0-3": -', "memory: -.* bytes on 0-3"),
    ):
        path.write_text(text.replace(was, now))
        with pytest.raises(ValueError, match=line):
            load_plan(path)
