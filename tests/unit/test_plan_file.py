"""``plan.json`` written and read, put into a job, and changed by hand."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from puzzle_align.config.chosen_plan import decided_keys, refuse_overrides, with_plan
from puzzle_align.config.load import load_file, load_job
from puzzle_align.config.resolution import Engine, Resolution
from puzzle_align.config.resolve import Resolved, try_to_resolve
from puzzle_align.config.sections.models import PlacementConfig
from puzzle_align.layout.job_plan import OptimizerStates, Settings
from puzzle_align.planning.costs.profile import load_profile, save_profile
from puzzle_align.planning.memory.job import ranks_named
from puzzle_align.planning.plan_file import GivenPlan, PlanFile, Predicted, open_plan, save_plan
from tests.command import main
from tests.refusals import refusal
from tests.unit.job_plan_strategies import job_plans
from tests.unit.job_plans import CONFIGS, OPTIONS
from tests.unit.plan_files import planned, put
from tests.unit.planner_spaces import SMALL, measured_of

P, T = "actor.parallel.pipeline_model_parallel_size", "actor.parallel.tensor_model_parallel_size"
seconds = st.floats(0, 1e9, allow_nan=False)
roles = st.lists(st.sampled_from(("actor", "critic")), max_size=2).map(tuple)
sizes = st.builds(
    Settings,
    row_tokens=st.integers(1, 2**20),
    optimizers=st.builds(OptimizerStates, sharded=roles, small=roles, on_host=roles),
    overlap_switch=st.booleans(),
    set_aside=st.lists(st.text(max_size=9), max_size=2).map(tuple),
    merged=roles,
)
files = st.builds(
    PlanFile,
    job_plan=job_plans().filter(lambda plan: plan.phases),
    settings=sizes,
    device=st.sampled_from(("cpu", "cuda")),
    predicted=st.builds(
        Predicted,
        iteration=seconds,
        phases=st.dictionaries(st.text(max_size=9), seconds, max_size=3),
        memory=st.dictionaries(st.just("0"), st.integers(0, 2**50)),
    ),
    notes=st.lists(st.text(max_size=20), max_size=2).map(tuple),
)


@drawn(files)
@settings(max_examples=20)  # it waits for the disk
def test_a_plan_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, file: PlanFile) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.json"
    save_plan(file, path)
    assert open_plan(path) == file.given(str(path))


Changes = Mapping[str, Any]  # values by the paths that ``put`` takes


def _written(name: str, num_ranks: int, folder: Path, changes: Changes) -> Path:
    """The plan file of a config with two pipeline ranks, changed by hand."""
    path = folder / "plan.json"
    save_plan(planned(name, num_ranks, [f"{P}=2"]), path)
    data = json.loads(path.read_text())
    for place, value in changes.items():
        put(data, place, value)
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("changed", "value", "line"),
    [
        ("settings", ..., ": key 'settings' is missing"),
        ("keys", {}, ": key 'keys' is unknown"),
        ("format", 1, ": format 1, and this version reads 2"),
        ("settings", [], ".settings: expected a mapping, got a list"),
        ("device", "tpu", ".device: "),
        ("settings.row_tokens", 1.5, ".settings.row_tokens: expected an integ"),
        ("job_plan.phases", [], ".job_plan: it has no phases"),
        ("job_plan.world_size", 10**18, ".job_plan: world_size=1000000000000000000 is not a numb"),
        ("job_plan.world_size", "2", ".job_plan.world_size: expected an integer, got '2'"),
        (
            "job_plan.phases.0.contexts.0.ranks",
            [0, 2],
            ".job_plan: the reference's ranks [0, 2] are not 2 different ones of the 2",
        ),
        ("predicted.iteration", math.nan, ".predicted.iteration: expected a number, got nan"),
        ("predicted.memory", {"0-2": 1}, ".predicted.memory: ranks 0-2 are not among the 2"),
        ("predicted.memory", {"0-999999999": 1}, ".predicted.memory: ranks 0-999999999 are not"),
        ("predicted.memory", {"all": 1}, ".predicted.memory: 'all' is not a rank range, such as 0"),
    ],
)
def test_what_is_no_plan_is_one_line(tmp_path: Path, changed: str, value: Any, line: str) -> None:
    path = _written("dpo_tiny", 2, tmp_path, {changed: value})
    said = refusal(lambda: open_plan(path))
    assert said.startswith(f"{path}{line}") and "; make it " in said


@pytest.mark.parametrize(
    ("written", "line"),
    [
        (None, "no such file; make it"),
        ("{", "make it with puzzle-align plan"),
        ("[]", "is not a JSON object"),
        ("{}", "format None"),
    ],
)
def test_an_unreadable_file_is_one_line(tmp_path: Path, written: str | None, line: str) -> None:
    path = tmp_path / "plan.json"
    if written is not None:
        path.write_text(written)
    said = refusal(lambda: open_plan(path))
    assert said.startswith(f"{path}") and line in said


@pytest.mark.parametrize(
    ("name", "ranks"), [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,8", [0, 1, 8])]
)
def test_ranks_by_name(name: str, ranks: list[int]) -> None:
    assert ranks_named(name, "memory", 9) == ranks


@pytest.mark.parametrize("name", ["", "0-", "-1", "1-0", "0,,1", "0-1-2", "a"])
def test_what_names_no_ranks(name: str) -> None:
    with pytest.raises(ValueError, match=r"^memory: '.*' is not a rank range, such as 0-3,8"):
        ranks_named(name, "memory", 9)


def _resolved(name: str, plan: GivenPlan, *overrides: str, num_ranks: int = 4) -> Resolved:
    """The job of a shipped config by a plan, on a machine that computes as the plan says."""
    config = load_file(CONFIGS / f"{name}.yaml", overrides)
    return try_to_resolve(config, Engine("cuda", OPTIONS), num_ranks, plan)


def test_a_plan_takes_the_place_of_what_the_config_says() -> None:
    overrides = ["packing.row_tokens=256", "generation.ranks=0-1", "placement.learn=sequential"]
    file = planned("ppo_tiny", 4, [*overrides, f"{P}=2"])
    sizes = [f"generation.{name}=7" for name in ("prefill_tokens", "decode_batch_size")]
    sampling = ["generation.ranks=0-9", "generation.parallel.data_parallel_size=3", *sizes]
    given = (*sampling, f"{T}=3", "ppo.gamma=0.9")
    job = _resolved("ppo_tiny", file.given("plan.json"), *given).job
    assert job is not None
    assert (job.plan, job.settings) == (file.job_plan, file.settings)
    config = job.config
    assert (config.packing.row_tokens, config.ppo.gamma) == (256, 0.9)
    assert (config.engine.dtype, config.engine.attention) == ("bf16", "flex")
    assert config.generation.ranks is config.generation.parallel is config.actor.parallel is None
    planned_sizes = file.settings.prefill_tokens, file.settings.decode_batch_size
    assert (config.generation.prefill_tokens, config.generation.decode_batch_size) == planned_sizes
    own = load_file(CONFIGS / "ppo_tiny.yaml", ["placement.profile=p.json"])
    placement = with_plan(own, file.given("plan.json")).placement
    assert placement == PlacementConfig(profile="p.json")


@pytest.mark.parametrize(
    ("stage", "override", "decided"),
    [
        ("dpo", f"{P}=4", "actor.parallel"),
        ("dpo", "actor.parallel=null", "actor.parallel"),
        ("dpo", "placement.reference=auto", "placement.reference"),
        ("dpo", "dpo.precompute_ref_log_probs=true", "dpo.precompute_ref_log_probs"),
        ("dpo", "engine={}", "engine.device"),
        *(
            (stage, f"{key}=auto", key)
            for stage in ("dpo", "ppo")
            for key in (
                *("engine.dtype", "engine.attention", "engine.transformer_impl"),
                *("engine.apply_rope_fusion", "packing.row_tokens", "reference.parallel"),
            )
        ),
        ("ppo", "generation.ranks=0", "generation.ranks"),
        ("ppo", "critic.ranks=0", "critic.ranks"),
        ("ppo", "generation.parallel={}", "generation.parallel"),
        ("ppo", "generation.decode_batch_size=8", "generation.decode_batch_size"),
        ("ppo", "placement.learn=auto", "placement.learn"),
    ],
)
def test_an_override_of_what_is_decided_is_refused(stage: str, override: str, decided: str) -> None:
    roles = {"dpo": ("actor", "reference"), "ppo": ("actor", "critic", "reference")}[stage]
    keys = decided_keys(stage, roles)
    assert refusal(lambda: refuse_overrides([override], "plan.json", keys)) == (
        f"override '{override}': plan.json decides '{decided}'; leave the override out"
    )
    refuse_overrides(["actor.model.path=x", "dpo.beta=0.5", "reward.ranks=0"], "plan.json", keys)
    refuse_overrides(["placement.reference=auto"], "plan.json", decided_keys("dpo", ["actor"]))


_AGAIN = ": plan this job again"


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        (
            "dpo_tiny",
            ["actor.model.config.hidden_size=256"],
            f"the actor's model has hidden_size=128, and in this job (actor.model) 256{_AGAIN}",
        ),
        (
            "dpo_tiny",
            ["dpo.loss_type=simpo"],
            "it has train (infer reference, train actor), and this job train (train actor): plan "
            "this job again",
        ),
        (
            "dpo_tiny",
            ["dpo.loss_type=aot"],
            "phase train has order=time_shared, but a loss that sorts (aot, aot_unpaired) needs the"
            " whole batch's reference first: change one",
        ),
        (
            "dpo_tiny",
            ["optimizer.use_distributed_optimizer=true"],
            "it was planned with optimizers=OptimizerStates(sharded=(), small=(), on_host=()), and "
            f"this job has OptimizerStates(sharded=('actor',), small=(), on_host=()){_AGAIN}",
        ),
        (
            "ppo_tiny",
            ["ppo.kl_coef=0"],
            "it has score (infer reference, infer critic), and this job score (infer critic): plan "
            "this job again",
        ),
    ],
)
def test_a_job_that_does_not_fit_is_refused(name: str, overrides: list[str], line: str) -> None:
    plan = planned(name, 4, [f"{P}=2"]).given("plan.json")
    resolved = _resolved(name, plan, *overrides)
    assert f"plan.json: {line}" in resolved.problems and resolved.job is None


def test_ranks_and_stage_are_those_that_were_planned() -> None:
    chosen = planned("dpo_tiny", 4, [f"{P}=2"]).given("plan.json")
    chosen.check_world_size(4)
    assert refusal(lambda: chosen.check_world_size(8)) == (
        "plan.json is for 4 ranks, and the job would have 8: start 4, or plan for 8"
    )
    with pytest.raises(ValueError, match=r"^plan\.json is for stage dpo, and the job is of stage"):
        with_plan(load_file(CONFIGS / "ppo_tiny.yaml"), chosen)


def _changed(stage: str, tmp_path: Path, changes: Changes) -> GivenPlan:
    """A file of two pipeline and two data ranks, changed by hand."""
    return replace(open_plan(_written(f"{stage}_tiny", 4, tmp_path, changes)), source="plan.json")


EACH = "job_plan.phases.*.contexts.*"
LAST = "job_plan.phases.-1.contexts"


@pytest.mark.parametrize("stage", ["dpo", "ppo"])
@pytest.mark.parametrize(
    "changes",
    [
        {"settings.row_tokens": 256},
        {f"{EACH}.ranks": [3, 2, 1, 0]},
        {f"{EACH}.options.recompute": "full"},
        {f"{EACH}.plan.pipeline": 4, f"{EACH}.plan.data": 1},
        {f"{EACH}.plan.pipeline_layers": [3, 1]},
        {"job_plan.phases.-1.order": "sequential"},
    ],
)
def test_a_plan_changed_by_hand_is_obeyed(tmp_path: Path, stage: str, changes: Changes) -> None:
    plan = _changed(stage, tmp_path, changes)
    assert plan != planned(f"{stage}_tiny", 4, [f"{P}=2"]).given("plan.json")
    job = _resolved(f"{stage}_tiny", plan).job
    assert job is not None
    assert (job.plan, job.settings) == (plan.plan, plan.settings)
    assert job.config.packing.row_tokens == plan.settings.row_tokens


@pytest.mark.parametrize(
    ("stage", "changes", "line"),
    [
        (
            "dpo",
            {"job_plan.phases.0.order": "concurrent"},
            "phase train has order=concurrent, but its models' ranks make it sequential or "
            "time_shared: change one",
        ),
        (
            "dpo",
            {f"{LAST}.0.plan.pipeline": 1, f"{LAST}.0.plan.data": 4},
            "phase train has order=time_shared, but no two models have the same ranks and the same "
            "plan: reference (P1, D4, T1), actor (P2, D2, T1): change one",
        ),
        (
            "dpo",
            {f"{EACH}.plan.pipeline": 1, f"{EACH}.plan.data": 1, f"{EACH}.plan.tensor": 4},
            "the actor's plan (train): tensor size 4 does not divide num_key_value_heads=2 of "
            "actor.model; choose a divisor of 2",
        ),
        (
            "dpo",
            {f"{EACH}.plan.data": 1, f"{EACH}.ranks": [0, 1]},
            "ranks 2, 3 hold no model: use them, or plan for fewer",
        ),
        (
            "dpo",
            {f"{LAST}.0.plan.data": 1, f"{LAST}.0.ranks": [2, 3]},
            "the models of phase train hold only some of the ranks: in stage dpo each holds all, "
            "or they hold different ones (concurrent)",
        ),
        (
            "dpo",
            {
                "job_plan.phases.0.order": "concurrent",
                f"{EACH}.plan.data": 1,
                f"{LAST}.0.ranks": [0, 1],
                f"{LAST}.1.ranks": [2, 3],
            },
            "rank 0 does not train the actor: it writes the metrics",
        ),
        (
            "ppo",
            {"settings.set_aside": ["gradients"]},
            f"it was planned with set_aside=('gradients',), and this job has (){_AGAIN}",
        ),
        (
            "dpo",
            {"settings.row_tokens": 64},
            "data.max_length: 128 does not fit a row; lower it, or raise packing.row_tokens (now "
            "64)",
        ),
        (
            "dpo",
            {f"{LAST}.0.options.logprob_chunk_size": 8},
            "the reference runs with logprob_chunk_size=8, and in this job "
            f"(engine.logprob_chunk_size) 1024{_AGAIN}",
        ),
        (
            "ppo",
            {"job_plan.phases.1.contexts.0.role": "reward"},
            "it has score (infer reward, infer critic), and this job score (infer reference, infer "
            f"critic){_AGAIN}",
        ),
        (
            "ppo",
            {"job_plan.phases.1.contexts.1.ranks": [1, 0, 3, 2]},
            "the critic has another plan, or other ranks, to infer than to train: give it the same,"
            " only sampling may differ",
        ),
        (
            "ppo",
            {"job_plan.phases.1.contexts.1.options.recompute": "full"},
            "the critic has different options in different phases: give it the same",
        ),
        (
            "ppo",
            {"settings.overlap_switch": True},
            "generation.overlap_switch: true, but the actor samples under the plan that it is "
            "trained under: nothing moves; set generation.parallel to another, or leave it out",
        ),
    ],
)
def test_a_plan_changed_by_hand_is_refused(
    tmp_path: Path, stage: str, changes: Changes, line: str
) -> None:
    resolved = _resolved(f"{stage}_tiny", _changed(stage, tmp_path, changes))
    own_key = line.startswith("data.max_length")
    assert (line if own_key else f"plan.json: {line}") in resolved.problems
    assert resolved.job is None


def test_ranks_ascend_where_torch_sorts_them(tmp_path: Path) -> None:
    config = load_file(CONFIGS / "ppo_tiny.yaml", [f"{P}=2", f"generation.{T[6:]}=2"])
    engine = Engine("cuda", OPTIONS, orders_ranks=False)
    for able, ranks in ((replace(engine, orders_ranks=True), (2, 0, 3, 1)), (engine, (0, 1, 2, 3))):
        assert Resolution(config, 4, able).plan.context("actor", "generate").ranks == ranks
    chosen = _changed("dpo", tmp_path, {f"{EACH}.ranks": [0, 2, 1, 3]})
    config = load_file(CONFIGS / "dpo_tiny.yaml")
    assert try_to_resolve(config, engine, 4, chosen).problems == tuple(
        f"plan.json: the {model}'s plan ({workload}): its ranks do not ascend; install torch "
        "2.12, or sort them"
        for model, workload in (("actor", "train"), ("reference", "infer"))
    )


def test_the_config_that_is_printed_has_the_sizes_that_are_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan(planned("dpo_tiny", 2, [f"{P}=2", "packing.row_tokens=256"]), tmp_path / "plan.json")
    plan = ("--plan", str(tmp_path / "plan.json"))
    assert main(["train", "--config", "dpo_tiny", *plan, "--print-config", "seed=5"]) == 0
    printed = load_job(capsys.readouterr().out)
    assert (printed.packing.row_tokens, printed.seed, printed.engine.dtype) == (256, 5, "bf16")
    assert main(["train", "--config", "dpo_tiny", *plan, "--print-config", f"{P}=1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: override '{P}=1': {plan[1]} decides 'actor.parallel'; ")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda text: text.replace('"median": ', '"median": -', 1), "median: -.* is below 0"),
        (lambda text: text.replace('"tensor": 1', '"tensor": 0', 1), "tensor: 0 is below 1"),
        (lambda text: re.sub('"tokens": [0-9]+', '"tokens": 0', text), "tokens: 0 is below 1"),
        (lambda text: text.replace('"hidden_size": ', '"hidden_size": -', 1), "is below 0"),
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
    said = refusal(lambda: load_profile(path))
    assert said.startswith(f"{path}") and re.search(line, said)
