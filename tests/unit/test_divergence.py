"""Updates that fail in a row: what is counted, and what is said."""

import logging
import math

import pytest

from puzzle_align.config.load import load_job
from puzzle_align.stages.divergence import Divergence, Update

GOOD = Update("actor", True, 0.5, 1.0)
SKIPPED = Update("actor", False, 0.5, math.nan, {"loss": 0.5, "logps/chosen": -math.inf})
NO_LOSS = Update("actor", True, math.nan, 0.0)
LOST = Update("critic", False, math.inf, math.inf)


def after(*steps: list[Update], overrides: tuple[str, ...] = ()) -> Divergence:
    found = Divergence(load_job("stage: ppo", ["optimizer.max_skipped_steps=2", *overrides]), True)
    for number, updates in enumerate(steps, start=1):
        found.note(number, updates)
    return found


def cause(found: Divergence) -> tuple[int, str]:
    told = found.cause()
    assert told is not None
    return told


@pytest.mark.parametrize(
    ("steps", "failing", "grave", "over"),
    [
        ([[GOOD]], False, False, False),
        ([[SKIPPED]], True, False, False),
        ([[NO_LOSS]], True, True, False),  # its gradients may be 0, and the update made
        ([[LOST]], True, True, False),
        ([[SKIPPED], [], [NO_LOSS]], True, True, False),
        ([[SKIPPED], [NO_LOSS], [GOOD], [SKIPPED]], True, False, False),
        ([[SKIPPED], [GOOD], [SKIPPED, SKIPPED]], True, True, False),
        ([[SKIPPED, SKIPPED], [SKIPPED]], True, True, True),
        ([[SKIPPED, SKIPPED, SKIPPED, GOOD]], False, False, False),  # recovered within the step
        ([[SKIPPED, LOST], [SKIPPED, LOST]], True, True, False),  # each model's own count
        ([[GOOD, LOST], [GOOD, LOST], [GOOD, LOST]], True, True, True),
    ],
)
def test_failures_in_a_row_are_counted_model_by_model(steps, failing, grave, over):
    found = after(*steps)
    assert (found.is_failing, found.is_grave, found.is_over) == (failing, grave, over)


def test_a_limit_of_zero_ends_at_the_first_and_the_critic_may_have_its_own():
    assert after([SKIPPED], overrides=("optimizer.max_skipped_steps=0",)).is_over
    own = "critic.optimizer.max_skipped_steps=0"
    assert after([LOST], overrides=(own,)).is_over
    assert not after([SKIPPED], overrides=(own,)).is_over


def test_the_first_cause_is_told():
    assert after([GOOD]).cause() is None
    found = after([GOOD], [LOST], [SKIPPED, LOST])
    assert cause(found) == (
        2,
        "the critic learns nothing any more: its last 2 updates, from step 2 on, failed (loss inf, "
        "gradient norm inf; optimizer.max_skipped_steps=2); lower optimizer.lr, or look at that "
        "step's data and at the weights that training began at",
    )
    _, line = cause(after([SKIPPED]))
    assert (
        "its last update, of step 1, failed (loss 0.5, gradient norm nan, logps/chosen -inf;"
        in line
    )
    _, line = cause(after([GOOD], [LOST], overrides=("critic.optimizer.max_skipped_steps=1",)))
    assert "; critic.optimizer.max_skipped_steps=1); lower critic.optimizer.lr, or" in line


def test_every_failure_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        after([GOOD], [SKIPPED], [NO_LOSS])
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: the actor's update was skipped (loss 0.5, gradient norm nan, logps/chosen -inf): "
        "1 in a row (optimizer.max_skipped_steps=2)",
        "step 3: the actor's update has no finite loss (loss nan, gradient norm 0): "
        "2 in a row (optimizer.max_skipped_steps=2)",
    ]


def test_an_evaluation_spoils_its_own_step():
    found = after([GOOD])
    found.note_evaluation(1, {"loss": math.nan})
    assert found.is_failing and not found.is_over
    assert found.is_grave
    step, line = cause(found)
    assert step == 1 and line.startswith("the loss of the held-out data is nan at step 1; lower")
    found.note(2, [GOOD])
    assert not found.is_failing
    found.note_evaluation(2, {})
    assert not found.is_failing
