"""Report of a run beside its prediction: medians, ratios, the table."""

from dataclasses import replace

from puzzle_align.planning.plan_file import Predicted
from puzzle_align.stages.plan_report import Compared, compare
from puzzle_align.telemetry import StepStats

PREDICTED = Predicted(
    iteration=3.0, phases={"generate": 1.0, "learn": 2.0, "switch": 0.5}, memory={"0,2": 2**30}
)


def _steps(*seconds: float) -> list[StepStats]:
    return [StepStats(seconds=s, phases={"generate": s / 4, "learn": s / 2}) for s in seconds]


def test_the_first_two_steps_are_left_out_where_there_are_others() -> None:
    for seconds, num_left_out, middle in (
        ((9.0,), 0, 9.0),
        ((9.0, 5.0), 0, 7.0),
        ((9.0, 5.0, 4.0), 2, 4.0),
        ((99.0, 50.0, 4.0, 6.0, 8.0, 90.0), 2, 7.0),
    ):
        found = compare(PREDICTED, _steps(*seconds), None)
        assert (found.num_steps, found.num_left_out) == (len(seconds) - num_left_out, num_left_out)
        assert found.times == {
            "generate": Compared(predicted=1.0, measured=middle / 4),
            "learn": Compared(predicted=2.0, measured=middle / 2),
            "switch": Compared(predicted=0.5, measured=None),
            "iteration": Compared(predicted=3.0, measured=middle),
        }
        assert found.memory == {"0,2": Compared(predicted=2**30, measured=None)}


def test_a_step_without_phases_is_one() -> None:
    predicted = Predicted(iteration=1.0, phases={"train": 1.0}, memory={})
    found = compare(predicted, [StepStats(seconds=2.0)], None)
    assert found.times["train"] == found.times["iteration"] == Compared(predicted=1.0, measured=2.0)
    assert found.times["train"].ratio == 2.0


def test_memory_is_that_of_the_rank_that_held_most() -> None:
    found = compare(PREDICTED, _steps(1.0), [3 * 2**30, 9 * 2**30, 2**29])
    assert found.memory == {"0,2": Compared(predicted=2**30, measured=3 * 2**30)}


def test_the_table() -> None:
    found = compare(PREDICTED, _steps(8.0, 8.0, 8.0), [3 * 2**30] * 3)
    assert found.table("plan.json") == (
        "plan.json, predicted and measured (median of 1 step after the first 2)\n"
        "                       predicted    measured   ratio\n"
        "  generate               1.000 s     2.000 s    2.00\n"
        "  learn                  2.000 s     4.000 s    2.00\n"
        "  switch                 0.500 s           -       -\n"
        "  iteration              3.000 s     8.000 s    2.67\n"
        "  memory, ranks 0,2      1.0 GiB     3.0 GiB    3.00"
    )
    assert "(median of 2 steps)" in compare(PREDICTED, _steps(1.0, 2.0), None).table("plan.json")


def test_work_beside_the_steps_is_compared_each_time_that_it_is_done() -> None:
    predicted = replace(PREDICTED, beside={"precompute": 6.0, "evaluate": 0.5})
    found = compare(predicted, _steps(1.0), None, {"evaluate": [0.4, 0.6, 0.8]})
    assert found.times["evaluate"] == Compared(predicted=0.5, measured=0.6)
    assert found.times["precompute"] == Compared(predicted=6.0, measured=None)
    assert "evaluate" not in compare(PREDICTED, _steps(1.0), None, {"evaluate": [0.4]}).times
