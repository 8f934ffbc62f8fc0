"""A job plan as JSON and back, and what is no plan."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.files.json_file import to_plain
from puzzle_align.files.typed import from_plain
from puzzle_align.layout.job_plan import JobPlan, check_job_plan
from tests.refusals import refusal
from tests.unit.job_plan_strategies import job_plans
from tests.unit.job_plans import PP, shipped
from tests.unit.plan_files import put


def read_plan(data: Any, where: str = "plan") -> JobPlan:
    plan = from_plain(JobPlan, data, where)
    check_job_plan(plan, where)
    return plan


@settings(max_examples=30)
@given(job_plans().filter(lambda plan: plan.phases), st.integers(0, 2**32))
def test_a_plan_is_the_same_after_json_and_of_shuffled_keys(plan: JobPlan, seed: int) -> None:
    data = to_plain(plan)
    again = read_plan(json.loads(json.dumps(data)))
    assert again == plan
    assert to_plain(again) == data == json.loads(json.dumps(data))

    order = random.Random(seed)

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = order.sample(sorted(value), len(value))
            return {key: shuffled(value[key]) for key in keys}
        return list(map(shuffled, value)) if isinstance(value, list) else value

    assert read_plan(shuffled(to_plain(plan))) == plan


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


CURE = "; make it again"
ACTOR = "phases.0.contexts.1"  # its place, as ``put`` takes it


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("extra", 1, ": key 'extra' is unknown"),
        ("stage", ..., ": key 'stage' is missing"),
        ("phases.0.once", ..., ".phases[0]: key 'once' is missing"),
        (f"{ACTOR}.plan.data", ..., ".phases[0].contexts[1].plan: key 'data' is missing"),
        (f"{ACTOR}.model.colour", "red", ".phases[0].contexts[1].model: key 'colour' is unknown"),
        (
            f"{ACTOR}.model.rope_scaling",
            {"factor": 1.0, "low_freq_factor": 1.0, "x": 1},
            ".phases[0].contexts[1].model.rope_scaling: key ",
        ),
        ("phases.1", "score", ".phases[1]: expected "),
        (
            "phases.0.order",
            "alone",
            ".phases[0].order: expected one of sequential, time_shared, concurrent",
        ),
        *(
            (place, value, re.sub(r"\.(\d)", r"[\1]", f".{place}: expected "))
            for place, value in (
                *(("world_size", "4"), ("world_size", 4.0), ("world_size", True)),
                *(("stage", None), ("phases", {}), ("phases.0.once", 0)),
                *((f"{ACTOR}.workload", "rest"), (f"{ACTOR}.workload", ["train"])),
                *((f"{ACTOR}.ranks", "0-3"), (f"{ACTOR}.ranks.3", "3")),
                *((f"{ACTOR}.plan", [2, 2, 1]), (f"{ACTOR}.plan.sequence_parallel", "no")),
                (f"{ACTOR}.plan.schedule", ["1f1b"]),
                *((f"{ACTOR}.options.attention", "eager"), (f"{ACTOR}.model.head", "both")),
                (f"{ACTOR}.model.rope_theta", "1e6"),
                (f"{ACTOR}.model.rope_scaling", [8.0]),
                (f"{ACTOR}.model.eos_token_id", "2"),
                (f"{ACTOR}.model.hidden_size", None),
            )
        ),
        (
            f"{ACTOR}.model.eos_token_id",
            [2, "3"],
            ".phases[0].contexts[1].model.eos_token_id[1]: expected ",
        ),
    ],
)
def test_what_is_no_plan_is_one_line(place: str, value: Any, message: str) -> None:
    data = to_plain(shipped("dpo_tiny", 4, f"actor.parallel.{PP}=2"))
    assert read_plan(json.loads(json.dumps(data)), "plan.json") is not None
    put(data, place, value)
    line = _refused(data)
    assert line.startswith(f"plan.json{message}")
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
    put(data, f"{ACTOR}.ranks", ranks)
    assert _refused(data) == (
        f"plan.json: the actor's ranks {ranks} are not 4 different ones of the 4{CURE}"
    )


def test_whole_numbers_may_stand_for_floats() -> None:
    data = to_plain(shipped("dpo_tiny", 2))
    put(data, f"{ACTOR}.model.rope_theta", 10_000)
    theta = read_plan(data).context("actor", "train").model.rope_theta
    assert theta == 10_000.0


def _refused(data: Any) -> str:
    return refusal(lambda: read_plan(data, "plan.json"))


def test_a_phase_has_each_role_once_and_a_plan_no_size_below_one() -> None:
    written = to_plain(shipped("dpo_tiny", 2))
    contexts = written["phases"][0]["contexts"]
    for wrong, line in (
        ([], "plan.json: phase train has the roles []: each must be there once"),
        (
            [contexts[0], contexts[0]],
            "plan.json: phase train has the roles ['reference', 'reference']",
        ),
        (
            [{**contexts[0], "plan": {**contexts[0]["plan"], "data": 0}, "ranks": []}],
            "plan.json: the reference's plan has data=0; make it again",
        ),
        (
            [{**contexts[0], "plan": {**contexts[0]["plan"], "pipeline_layers": [4, 0]}}],
            "plan.json: the reference's plan has pipeline_layers=(4, 0); make it again",
        ),
    ):
        data = {**written, "phases": [{**written["phases"][0], "contexts": wrong}]}
        assert _refused(data).startswith(line)


def test_a_schedule_is_one_that_there_is() -> None:
    data = to_plain(shipped("dpo_tiny", 4, f"actor.parallel.{PP}=2"))
    put(data, f"{ACTOR}.plan.schedule", "2f2b")
    assert _refused(data) == f"plan.json: the actor's plan has schedule=2f2b{CURE}"
