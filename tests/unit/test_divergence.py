"""Updates that fail in a row: what is counted, and what is said."""

import logging
import math

import pytest

from puzzle_align.config.load import find_config, load_file
from puzzle_align.stages.divergence import Divergence, Health, Update
from tests.jobs import resolved

GOOD = Update("actor", True, 0.5, 1.0)
SPOILT = {"loss": 0.5, "logps/chosen": -math.inf, "logps/rejected": -9.0}
SKIPPED = Update("actor", False, 0.5, math.nan, SPOILT)
NO_LOSS = Update("actor", True, math.nan, 0.0)
TOO_LARGE, LARGEST = (Update("actor", True, loss, 1.0) for loss in (-3.5e38, 3.4e38))
LOST = Update("critic", False, math.inf, math.inf, {"loss": math.inf})


def after(*steps: list[Update], overrides: tuple[str, ...] = (), logs: bool = True) -> Divergence:
    given = ["optimizer.max_skipped_steps=2", "engine.device=cpu", *overrides]
    found = Divergence(resolved(load_file(find_config("ppo_tiny"), given)), logs)
    for number, updates in enumerate(steps, start=1):
        found.note(number, updates)
    return found


def cause(found: Divergence) -> tuple[int, str]:
    reason = found.cause()
    assert reason is not None
    return reason


@pytest.mark.parametrize(
    ("steps", "health"),
    [
        ([[GOOD]], Health.GOOD),
        ([[SKIPPED]], Health.SKIPPED),
        ([[NO_LOSS]], Health.FAILING),  # its gradients may be 0, and the update made
        ([[TOO_LARGE]], Health.FAILING),  # for float32
        ([[LARGEST]], Health.GOOD),
        ([[LOST]], Health.FAILING),
        ([[SKIPPED], [], [NO_LOSS]], Health.FAILING),
        ([[SKIPPED], [NO_LOSS], [GOOD], [SKIPPED]], Health.SKIPPED),
        ([[SKIPPED], [GOOD], [SKIPPED, SKIPPED]], Health.FAILING),
        ([[SKIPPED, SKIPPED], [SKIPPED]], Health.OVER),
        ([[SKIPPED, SKIPPED, SKIPPED, GOOD]], Health.GOOD),  # recovered within the step
        ([[SKIPPED, LOST], [SKIPPED, LOST]], Health.FAILING),  # each model's own count
        ([[GOOD, LOST], [GOOD, LOST], [GOOD, LOST]], Health.OVER),
    ],
)
def test_failures_in_a_row_are_counted_model_by_model(steps, health):
    assert after(*steps).health == health


def test_a_limit_of_zero_ends_at_the_first_and_the_critic_may_have_its_own():
    assert after([SKIPPED], overrides=("optimizer.max_skipped_steps=0",)).health == Health.OVER
    own = "critic.optimizer.max_skipped_steps=0"
    assert after([LOST], overrides=(own,)).health == Health.OVER
    assert after([SKIPPED], overrides=(own,)).health == Health.SKIPPED


def test_the_first_cause_is_reported():
    assert after([GOOD]).cause() is None
    found = after([GOOD], [LOST], [SKIPPED, LOST])
    assert cause(found) == (
        2,
        "the critic learns nothing any more: its last 2 updates, from step 2 on, failed (loss inf, "
        "gradient norm inf; optimizer.max_skipped_steps=2); lower optimizer.lr, or look at that "
        "step's data and at the job's initial weights",
    )
    _, line = cause(after([SKIPPED]))
    assert (
        "its last update, of step 1, failed (loss 0.5, gradient norm nan, logps/chosen -inf;"
        in line
    )
    _, line = cause(after([GOOD], [LOST], overrides=("critic.optimizer.max_skipped_steps=1",)))
    assert "; critic.optimizer.max_skipped_steps=1); lower critic.optimizer.lr, or" in line


def test_every_failure_is_warned_of_on_one_rank(caplog):
    with caplog.at_level(logging.WARNING):
        after([SKIPPED], logs=False).note_evaluation(1, {"loss": math.nan})
        after([GOOD], [SKIPPED], [NO_LOSS]).note_evaluation(3, {"loss": math.inf})
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: the actor's update was skipped (loss 0.5, gradient norm nan, logps/chosen -inf): "
        "1 in a row (optimizer.max_skipped_steps=2)",
        "step 3: the actor's update has no finite loss (loss nan, gradient norm 0): "
        "2 in a row (optimizer.max_skipped_steps=2)",
        "the loss of the held-out data is inf at step 3",
    ]


def test_an_evaluation_spoils_its_own_step():
    found = after([GOOD])
    found.note_evaluation(1, {"loss": math.nan})
    assert found.health == Health.FAILING
    step, line = cause(found)
    assert step == 1 and line.startswith("the loss of the held-out data is nan at step 1; lower")
    found.note(2, [GOOD])
    assert found.health == Health.GOOD
    found.note_evaluation(2, {})
    assert found.health == Health.GOOD
