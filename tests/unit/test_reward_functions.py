"""Reward functions together: against the calls and the sum that TRL's GRPOTrainer makes of them."""

import asyncio
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.config.sections.models import RewardConfig
from puzzle_align.stages.rl.reward_calls import CalledFunctions, Completions, TrainerState
from puzzle_align.stages.rl.reward_function import load_reward_function
from puzzle_align.stages.rl.reward_functions import RewardFunctions
from tests.unit import grpo_rewards, more_rewards

QUESTIONS = ["How many is 2 + 3?", "How many eggs?", "And then?"]
TEXTS = ["It is #### 5", "1,200", ""]
IDS = [[5, 6, 258], [7], [258]]
COLUMNS = {"response": ["2 + 3 = 5\n#### 5", "#### 1200", "#### 7"], "level": [1, 2, 3]}
STATE = TrainerState(global_step=3, max_steps=12, epoch=0.25)
NAMES = ["right", "marked", "short", "judged"]


def in_process(config: RewardConfig) -> RewardFunctions:
    called = CalledFunctions([load_reward_function(name) for name in config.functions])
    return RewardFunctions(config, called.signatures, called)


def functions(*names: str, **keys: Any) -> RewardFunctions:
    named = [f"tests.unit.grpo_rewards:{name}" for name in names]
    return in_process(RewardConfig(function=named, **keys))


def completions(conversational: bool) -> Completions:
    if not conversational:
        return Completions([*QUESTIONS], [*TEXTS], IDS, COLUMNS)
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = [[{"role": "assistant", "content": text}] for text in TEXTS]
    return Completions([*prompts], [*answers], IDS, COLUMNS)


def trl_rewards(functions: list[Any], weights: list[float], given: Completions) -> torch.Tensor:
    """``_calculate_rewards`` of TRL 1.16, and the weighted sum of its ``sum_then_normalize``."""
    keywords: dict[str, Any] = {
        "prompts": given.prompts,
        "completions": given.completions,
        "completion_ids": given.completion_ids,
        "trainer_state": STATE,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
        **given.columns,
    }
    per_function = torch.zeros(len(given.prompts), len(functions), dtype=torch.float64)
    for i, function in enumerate(functions):
        output = function(**keywords)
        if inspect.isawaitable(output):
            output = asyncio.run(_awaited(output))
        output = [reward if reward is not None else torch.nan for reward in output]
        per_function[:, i] = torch.tensor(output, dtype=torch.float64)
    unscorable = torch.isnan(per_function).all(dim=1)
    rewards = (per_function * torch.tensor(weights, dtype=torch.float64).unsqueeze(0)).nansum(dim=1)
    rewards[unscorable] = torch.nan
    return rewards


async def _awaited(output: Any) -> Any:
    return await output


@pytest.mark.parametrize("conversational", [False, True])
@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["right"], None),
        (NAMES, None),
        (NAMES, [1.0, 0.5, 2.0, -3.0]),
        (["judged", "marked"], [2.0, 0.25]),  # neither applies to the last completion
    ],
)
def test_functions_written_for_trl_give_what_trl_makes_of_them(conversational, names, weights):
    given = completions(conversational)
    ours = functions(*names, weights=weights)
    found = ours.weighed(ours(given, STATE).rewards)
    plain = [getattr(grpo_rewards, name) for name in names]
    expected = trl_rewards(plain, weights or [1.0] * len(names), given)
    np.testing.assert_array_equal(found, expected.numpy())
    assert bool(np.isnan(found[2])) == ("right" not in names)


def test_rewards_by_hand():
    judged = functions(*NAMES)(completions(True), STATE)
    lengths = [len(question) / 1000 for question in QUESTIONS]
    expected = [
        [1.0, 1.0, -0.75, lengths[0]],
        [1.0, 0.0, -0.25, lengths[1]],
        [0.0, math.nan, -0.25, math.nan],
    ]
    np.testing.assert_array_equal(judged.rewards, expected)
    assert judged.extra == {"found": ["5", "1,200", ""]}
    assert judged.metrics == {"accuracy": [2 / 3]}


def test_names_that_two_functions_share_are_told_apart():
    both = functions("right", "short")
    assert both.names == ["right", "Short"]
    same = in_process(
        RewardConfig(function=["tests.unit.grpo_rewards:right", "tests.unit.more_rewards:right"])
    )
    assert same.names == ["tests.unit.grpo_rewards:right", "tests.unit.more_rewards:right"]


def test_no_completions_no_call():
    empty = functions(*NAMES)(Completions([], [], [], {}), STATE)
    assert empty.rewards.shape == (0, 4) and empty.metrics == {}
    assert functions("right").weighed(empty.rewards[:, :1]).shape == (0,)


def from_(module: str, *names: str) -> RewardFunctions:
    return in_process(RewardConfig(function=[f"tests.unit.{module}:{name}" for name in names]))


def test_asynchronous_functions_run_at_once_and_in_one_loop():
    """Each waits for the other; what one made of the loop in a call can be used in the next."""
    pair = from_("more_rewards", "first", "second")
    for _ in range(2):
        assert pair(completions(False), STATE).rewards.tolist() == [[1.0, 2.0]] * 3
    assert len(more_rewards.LOOPS) == 4 and len(set(more_rewards.LOOPS)) == 1


def test_where_one_asynchronous_function_fails_the_others_end():
    both = from_("more_rewards", "fails", "waits")
    with pytest.raises(ValueError) as error:
        both(completions(False), STATE)
    assert str(error.value).startswith("reward.function=tests.unit.more_rewards:fails: KeyError: ")
    assert more_rewards.ENDED == ["waits"]


def test_what_is_logged_must_be_of_all_completions():
    with pytest.raises(ValueError, match=r"log_extra was given 1 values of 'x' for 3 completions"):
        from_("more_rewards", "logs_too_little")(completions(False), STATE)


def test_a_state_has_what_is_known_and_nothing_else():
    with pytest.raises(ValueError, match="'TrainerState' object has no attribute 'log_history'"):
        from_("more_rewards", "asks_for_history")(completions(False), STATE)
