"""A user's reward function: how it is found and called, and every way it can go wrong."""

import re
import sys

import numpy as np
import pytest
import torch

from puzzle_align.stages.rl.reward_function import RewardFunction, load_reward_function

PROMPTS, RESPONSES = ["p" * 99, "q\nq", "r"], ["x", "", "z" * 99]

SOURCE = """
import functools
import torch

def plain(prompts, responses):
    return [len(r) for r in responses]

def wants(prompts, responses, answer, bonus=0, *, scale=1):
    return [scale * (a == r) + (b or 0) for a, r, b in zip(answer, responses, bonus)]

def everything(texts, answers, **columns):
    return [float("".join(columns) == "answern")] * len(answers)

def fails(prompts, responses):
    return inner(responses)

def inner(responses):
    return [1 / len(r) for r in responses]

def fails_inside(prompts, responses):
    return torch.zeros(2) @ torch.zeros(3)

class Judge:
    weight = 2
    def score(self, prompts, responses):
        return [self.weight] * len(responses)
    def __call__(self, prompts, responses, **columns):
        return [self.weight + 1] * len(responses)

judge = Judge()
constant = 5

def one(text):
    return [0.0]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of reward functions in the current folder, which is not yet on the path."""
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("x = 1\nimport not_there_at_all\n")
    (tmp_path / "wrong_rewards.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    for name in ("own_rewards", "broken_rewards", "wrong_rewards"):
        sys.modules.pop(name, None)


def message(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def returning(value: object) -> RewardFunction:
    return RewardFunction("m:f", lambda prompts, responses: value)


def test_functions_of_the_current_folder_get_the_columns_they_take(module):
    columns = {"answer": ["x", "x", "r"], "n": [1, 2, 3]}
    found = load_reward_function("own_rewards:plain")(PROMPTS, RESPONSES, columns)
    assert found.tolist() == [1.0, 0.0, 99.0] and found.dtype == np.float64
    wants = load_reward_function("own_rewards:wants")
    both = {**columns, "bonus": [None, 0.5, 1]}
    assert wants(PROMPTS, RESPONSES, both).tolist() == [1.0, 0.5, 1.0]
    assert load_reward_function("own_rewards:judge")(PROMPTS, RESPONSES, {}).tolist() == [3.0] * 3
    scored = load_reward_function("own_rewards:judge.score")(PROMPTS, RESPONSES, columns)
    assert scored.tolist() == [2.0] * 3
    assert str(module) == sys.path[-1]


def test_columns_with_the_names_of_the_texts_are_no_clash(module):
    names = ("answer", "prompts", "responses", "texts", "answers", "n")
    columns = {name: [0, 0, 0] for name in names}
    everything = load_reward_function("own_rewards:everything")
    assert everything(PROMPTS, RESPONSES, columns).tolist() == [1.0] * 3
    everything.check_columns([])


def test_functions_of_the_package():
    vowels = load_reward_function("puzzle_align.data.synthetic:vowel_share")
    assert vowels(["p"], ["aab."], {"answer": ["a"]}).tolist() == [0.5]


def test_a_missing_column_is_named_before_training(module):
    wants = load_reward_function("own_rewards:wants")
    wants.check_columns(["n", "answer"])
    for check in (
        lambda: wants.check_columns(["n", "prompts"]),
        lambda: wants(PROMPTS, RESPONSES, {"n": [1, 2, 3]}),
    ):
        with pytest.raises(ValueError) as error:
            check()
        assert message(error) == (
            "reward.function=own_rewards:wants: needs column 'answer', and the prompts have n;"
            " add it to data.train, or give the argument a default"
        )


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("own_rewards", "no module:function; write module:function"),
        (":f", "no module:function"),
        ("no_such.thing:f", "no module 'no_such' installed or in FOLDER; write module:function"),
        ("own_rewards.sub:f", "no module 'own_rewards.sub' installed or in FOLDER"),
        ("own_rewards:nothing", "no 'nothing' in FOLDER/own_rewards.py; write"),
        ("own_rewards:judge.nothing", "no 'nothing' in own_rewards; write"),
        ("own_rewards:constant", "is int, not a function"),
        ("own_rewards:one", "takes no prompts and responses; write it as function(prompts, "),
        (
            "broken_rewards:f",
            "broken_rewards cannot be imported: ModuleNotFoundError: No module named"
            " 'not_there_at_all' (FOLDER/broken_rewards.py:2)",
        ),
        ("wrong_rewards:f", "wrong_rewards cannot be imported: SyntaxError: "),
    ],
)
def test_what_cannot_be_a_function_is_told_before_training(module, name, what):
    with pytest.raises(ValueError) as error:
        load_reward_function(name)
    told = message(error).replace(str(module), "FOLDER")
    assert told.startswith(f"reward.function={name}: {what}")


def test_an_error_inside_names_the_users_line_and_is_chained(module):
    function = load_reward_function("own_rewards:fails")
    with pytest.raises(ValueError) as error:
        function(PROMPTS, RESPONSES, {})
    line = SOURCE.splitlines().index("    return [1 / len(r) for r in responses]") + 1
    assert message(error) == (
        "reward.function=own_rewards:fails: ZeroDivisionError: division by zero"
        f" ({module}/own_rewards.py:{line})"
    )
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(ValueError) as error:  # raised in torch: the line that called it
        load_reward_function("own_rewards:fails_inside")(PROMPTS, RESPONSES, {})
    assert re.search(r"own_rewards\.py:\d+\)$", message(error))


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5, True],
        (1, 0.5, np.bool_(True)),
        np.array([1, 0.5, 1], dtype=np.float32),
        torch.tensor([1, 0.5, 1], requires_grad=True),
        [torch.tensor(1.0), torch.tensor([0.5]), np.float16(1)],
    ],
)
def test_numbers_of_every_kind(result):
    assert returning(result)(PROMPTS, RESPONSES, {}).tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ([1.0, 2.0], "returned 2 rewards for 3 responses"),
        (None, "returned NoneType, not a list"),
        (1.0, "returned float, not a list"),
        (torch.tensor(1.0), "returned Tensor, not a list"),
        ({"a": 1}, "returned dict, not a list"),
        ([1, 2, float("nan")], "returned nan for response 2 (prompt 'r', response 'zzz"),
        ([1, -np.inf, 2], r"returned -inf for response 1 (prompt 'q\nq', response '')"),
        (["1", 2, 3], "returned '1' for response 0 (prompt 'ppp"),
        ([None, 2, 3], "returned None for response 0"),
        ([[1], [2], [3]], "returned [1] for response 0"),
        (np.ones((3, 1)), "returned [1.0] for response 0"),
        ([10**400, 2, 3], "returned 1000"),
    ],
)
def test_what_is_no_reward_is_told(result, what):
    with pytest.raises(ValueError) as error:
        returning(result)(PROMPTS, RESPONSES, {})
    assert message(error).startswith(f"reward.function=m:f: {what}")
    assert message(error).endswith("; return a list with a finite number for every response")
    assert len(message(error)) < 300


def test_the_function_is_not_called_without_responses_and_cannot_change_them():
    assert RewardFunction("m:f", lambda prompts, responses: 1 / 0)([], [], {}).shape == (0,)
    responses = list(RESPONSES)
    popping = RewardFunction("m:f", lambda prompts, given: [len(given.pop()) for _ in responses])
    assert popping(PROMPTS, responses, {}).tolist() == [99.0, 0.0, 1.0]
    assert responses == RESPONSES
