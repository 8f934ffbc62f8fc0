"""A job plan as JSON and back, and what is no plan."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.files.json_file import to_plain
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.job_plan import JobPlan, check_job_plan
from tests.unit.job_plan_strategies import job_plans
from tests.unit.job_plans import PP, shipped


def read_plan(data: Any, where: str = "plan") -> JobPlan:
    plan = from_plain(JobPlan, data, where)
    check_job_plan(plan, where)
    return plan


@given(job_plans().filter(lambda plan: plan.phases))
def test_a_plan_is_the_same_after_json(plan: JobPlan) -> None:
    data = to_plain(plan)
    again = read_plan(json.loads(json.dumps(data)))
    assert again == plan
    assert to_plain(again) == data == json.loads(json.dumps(data))


@given(job_plans().filter(lambda plan: plan.phases), st.data())
def test_a_plan_of_shuffled_keys_is_the_same(plan: JobPlan, data: st.DataObject) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = data.draw(st.permutations(sorted(value)))
            return {key: shuffled(value[key]) for key in keys}
        return list(map(shuffled, value)) if isinstance(value, list) else value

    assert read_plan(shuffled(to_plain(plan))) == plan


@pytest.mark.parametrize(
    ("name", "ranks", "overrides"),
    [
        ("dpo_70b", 64, []),  # with rope scaling
        ("dpo_tiny", 4, ["placement.reference=concurrent", "reference.parallel={}"]),
        ("dpo_tiny", 2, ["dpo.precompute_ref_log_probs=true"]),
        ("kto_tiny", 2, [f"actor.parallel.{PP}=2"]),
        ("dpo_tiny", 1, ["dpo.reference_free=true", "actor.model.config.eos_token_id=[258, 257]"]),
        ("reward_7b", 8, []),
        ("ppo_tiny", 6, ["actor.ranks=0-3", "critic.ranks=4-5"]),
        ("ppo_33b_7b", 32, []),
    ],
)
def test_plans_of_shipped_configs_are_the_same_after_json(
    name: str, ranks: int, overrides: list[str]
) -> None:
    plan = shipped(name, ranks, *overrides)
    assert read_plan(json.loads(json.dumps(to_plain(plan)))) == plan


def test_json_says_what_a_plan_is() -> None:
    data = to_plain(shipped("dpo_tiny", 2, "placement.reference=sequential"))
    assert list(data) == ["stage", "world_size", "phases"]
    (phase,) = data["phases"]
    assert (phase["name"], phase["order"], phase["once"]) == ("train", "sequential", False)
    reference, actor = phase["contexts"]
    assert (reference["role"], actor["workload"]) == ("reference", "train")
    assert actor["ranks"] == [0, 1]
    assert actor["plan"] == {
        "pipeline": 1,
        "data": 2,
        "tensor": 1,
        "virtual_pipeline": 1,
        "sequence_parallel": False,
        "pipeline_layers": [],
        "schedule": None,
    }


Change = Callable[[dict[str, Any]], Any]
CURE = "; make it again"
AT = "plan.json.phases[0].contexts[1]"


def at_actor(path: str, value: Any) -> Change:
    """Sets a key of the actor's context, or of what is in it."""

    def change(data: dict[str, Any]) -> None:
        *way, last = path.split(".")
        found = data["phases"][0]["contexts"][1]
        for name in way:
            found = found[name]
        found[last] = value

    return change


def without_plan(data: dict[str, Any]) -> None:
    del data["phases"][0]["contexts"][1]["plan"]["data"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(extra=1), "plan.json: key 'extra' is unknown"),
        (lambda data: data.pop("stage"), "plan.json: key 'stage' is missing"),
        (lambda data: data["phases"][0].pop("once"), "plan.json.phases[0]: key 'once' is missing"),
        (without_plan, f"{AT}.plan: key 'data' is missing"),
        (at_actor("model.colour", "red"), f"{AT}.model: key 'colour' is unknown"),
        (
            at_actor("model.rope_scaling", {"factor": 1.0, "low_freq_factor": 1.0, "x": 1}),
            f"{AT}.model.rope_scaling: key ",
        ),
        (lambda data: data.update(world_size="4"), "plan.json.world_size: expected "),
        (lambda data: data.update(world_size=4.0), "plan.json.world_size: expected "),
        (lambda data: data.update(world_size=True), "plan.json.world_size: expected "),
        (lambda data: data.update(stage=None), "plan.json.stage: expected "),
        (lambda data: data.update(phases={}), "plan.json.phases: expected "),
        (lambda data: data["phases"].append("score"), "plan.json.phases[1]: expected "),
        (
            lambda data: data["phases"][0].update(order="alone"),
            "plan.json.phases[0].order: expected one of sequential, time_shared, concurrent",
        ),
        (lambda data: data["phases"][0].update(once=0), "plan.json.phases[0].once: expected "),
        (at_actor("workload", "rest"), f"{AT}.workload: expected "),
        (at_actor("workload", ["train"]), f"{AT}.workload: expected "),
        (at_actor("ranks", "0-3"), f"{AT}.ranks: expected "),
        (at_actor("ranks", [0, 1, 2, "3"]), f"{AT}.ranks[3]: expected "),
        (at_actor("plan", [2, 2, 1]), f"{AT}.plan: expected "),
        (at_actor("plan.sequence_parallel", "no"), f"{AT}.plan.sequence_parallel: expected "),
        (at_actor("plan.schedule", ["1f1b"]), f"{AT}.plan.schedule: expected "),
        (at_actor("options.attention", "eager"), f"{AT}.options.attention: expected "),
        (at_actor("model.head", "both"), f"{AT}.model.head: expected "),
        (at_actor("model.rope_theta", "1e6"), f"{AT}.model.rope_theta: expected "),
        (at_actor("model.rope_scaling", [8.0]), f"{AT}.model.rope_scaling: expected "),
        (at_actor("model.eos_token_id", "2"), f"{AT}.model.eos_token_id: expected "),
        (at_actor("model.eos_token_id", [2, "3"]), f"{AT}.model.eos_token_id[1]: expected "),
        (at_actor("model.hidden_size", None), f"{AT}.model.hidden_size: expected "),
    ],
)
def test_what_is_no_plan_is_one_line_that_names_the_place(change: Change, message: str) -> None:
    data = to_plain(shipped("dpo_tiny", 4, f"actor.parallel.{PP}=2"))
    assert read_plan(json.loads(json.dumps(data)), "plan.json") is not None
    change(data)
    line = _refused(data)
    assert line.startswith(message)
    assert line.endswith(CURE)


@pytest.mark.parametrize("data", [None, [], "dpo", 3])
def test_what_is_no_mapping_is_no_plan(data: Any) -> None:
    line = _refused(data)
    assert line.startswith("plan.json: expected a mapping, got ") and line.endswith(CURE)


@pytest.mark.parametrize(
    "ranks", [[0, 1, 2, 4], [-1, 0, 1, 2], [0, 1, 2, 2], [0, 1, 2], [0, 1, 2, 3, 3], []]
)
def test_ranks_are_those_of_the_world_once_and_as_many_as_the_plan_needs(ranks: list[int]) -> None:
    data = to_plain(shipped("dpo_tiny", 4, f"actor.parallel.{PP}=2"))
    at_actor("ranks", ranks)(data)
    assert _refused(data) == (
        f"plan.json: the actor's ranks {ranks} are not 4 different ones of the 4{CURE}"
    )


def test_whole_numbers_may_stand_for_floats() -> None:
    data = to_plain(shipped("dpo_tiny", 2))
    at_actor("model.rope_theta", 10_000)(data)
    theta = read_plan(data).context("actor", "train").model.rope_theta
    assert theta == 10_000.0


def _refused(data: Any) -> str:
    with pytest.raises(ValueError) as raised:
        read_plan(data, "plan.json")
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_a_phase_has_each_role_once_and_a_plan_no_size_below_one() -> None:
    written = to_plain(shipped("dpo_tiny", 2))
    contexts = written["phases"][0]["contexts"]
    for wrong, line in (
        ([], "plan: phase train has the roles []: each must be there once"),
        ([contexts[0], contexts[0]], "plan: phase train has the roles ['reference', 'reference']"),
        (
            [{**contexts[0], "plan": {**contexts[0]["plan"], "data": 0}, "ranks": []}],
            "plan: the reference's plan has data=0; make it again",
        ),
        (
            [{**contexts[0], "plan": {**contexts[0]["plan"], "pipeline_layers": [4, 0]}}],
            "plan: the reference's plan has pipeline_layers=(4, 0); make it again",
        ),
    ):
        with pytest.raises(ValueError) as raised:
            read_plan({**written, "phases": [{**written["phases"][0], "contexts": wrong}]})
        assert str(raised.value).startswith(line)


def test_a_schedule_is_one_that_there_is() -> None:
    data = to_plain(shipped("dpo_tiny", 4, f"actor.parallel.{PP}=2"))
    at_actor("plan.schedule", "2f2b")(data)
    assert _refused(data) == f"plan.json: the actor's plan has schedule=2f2b{CURE}"
