"""A user's reward function: how it is found and called, and every way it can go wrong."""

import asyncio
import functools
import itertools
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.stages.rl.reward_function import GIVEN, RewardFunction, load_reward_function

PROMPTS, COMPLETIONS = ["p" * 99, "q\nq", "r"], ["x", "", "z" * 99]
KWARGS: dict[str, Any] = {
    "prompts": PROMPTS,
    "completions": COMPLETIONS,
    "completion_ids": [[1, 2], [2], [3]],
    "trainer_state": "state",
    "log_extra": print,
    "log_metric": print,
}

SOURCE: str = """
import asyncio
import functools
import sys
import torch

def plain(completions):
    return [len(c) for c in completions]

def wants(prompts, completions, answer, bonus=0, *, scale=1):
    return [scale * (a == c) + (b or 0) for a, c, b in zip(answer, completions, bonus)]

def everything(**kwargs):
    return [float(" ".join(sorted(kwargs)) == NAMES)] * len(kwargs["completions"])

NAMES = "answer completion_ids completions log_extra log_metric n prompts responses trainer_state"

def lengths(completion_ids):
    return map(len, completion_ids)

async def asks(completions, **kwargs):
    return [None if c == "x" else 1 for c in completions]

def fails(prompts, completions):
    return inner(completions)

def inner(completions):
    return [1 / len(c) for c in completions]

def fails_inside(completions, **kwargs):
    return torch.zeros(2) @ torch.zeros(3)

def leaves(completions, **kwargs):
    sys.exit(3)

def cancelled(completions, **kwargs):
    raise asyncio.CancelledError

def fails_late(completions, **kwargs):
    return (1 / len(c) for c in completions)

async def fails_async(completions, **kwargs):
    return inner(completions)

class Judge:
    weight = 2
    def score(self, completions, **kwargs):
        return [self.weight] * len(completions)
    def __call__(self, prompts, completions, **kwargs):
        return [self.weight + 1] * len(completions)

judge = Judge()
constant = 5

def by_place(prompts, responses):
    return [0.0]

def by_place_and_name(prompts, responses, **columns):
    return [0.0] * len(responses)

def places(completions, /, answer):
    return [0.0]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of reward functions in the current folder, which is not yet on the path."""
    (tmp_path / "own_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("x = 1\nimport not_there_at_all\n")
    (tmp_path / "wrong_rewards.py").write_text("def f(:\n")
    (tmp_path / "parsing_rewards.py").write_text("import own_parser\n")
    (tmp_path / "own_parser.py").write_text("import json\n\njson.loads('{not json')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    for name in ("own_rewards", "broken_rewards", "wrong_rewards", "parsing_rewards"):
        sys.modules.pop(name, None)


def message(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def called(name: str, **columns: list) -> list[float]:
    """What the function in the module gives."""
    found = load_reward_function(f"own_rewards:{name}")(KWARGS, columns)
    assert found.dtype == np.float64
    return found.tolist()


class Liar:
    """A number that is none, and has no text."""

    def __float__(self) -> float:
        raise KeyError("no number")

    def __repr__(self) -> str:
        raise LookupError("no text")


def returning(value: object) -> RewardFunction:
    return RewardFunction("m:f", lambda completions, **kwargs: value)


def test_functions_of_the_current_folder_are_called_by_keyword_with_what_they_take(module):
    columns = {"answer": ["x", "x", "r"], "n": [1, 2, 3]}
    assert called("plain", **columns) == [1.0, 0.0, 99.0]
    assert called("wants", **columns, bonus=[None, 0.5, 1]) == [1.0, 0.5, 1.0]
    assert called("judge") == [3.0] * 3
    assert called("judge.score", **columns) == [2.0] * 3
    assert called("lengths") == [2.0, 1.0, 1.0]
    assert str(module) == sys.path[-1]


def test_columns_do_not_take_the_place_of_what_is_given(module):
    """Nor of what TRL keeps for itself; any other name is a column like others."""
    names = ("answer", "responses", "n", "prompt", "completion", *GIVEN)
    assert called("everything", **{name: [0, 0, 0] for name in names}) == [1.0] * 3


def test_asynchronous_functions(module):
    asks = load_reward_function("own_rewards:asks")
    plain = load_reward_function("own_rewards:plain")
    assert asks.signature.is_async and not plain.signature.is_async
    np.testing.assert_array_equal(asyncio.run(asks.later(KWARGS, {})), [np.nan, 1.0, 1.0])
    with pytest.raises(ValueError, match="own_rewards:fails_async: ZeroDivisionError: division"):
        asyncio.run(load_reward_function("own_rewards:fails_async").later(KWARGS, {}))

    class Later:
        async def __call__(self, completions: list[str], **kwargs: object) -> list[float]:
            return [1.0] * len(completions)

    for function in (Later(), functools.partial(Later())):
        assert RewardFunction("m:f", function).signature.is_async


def test_names_of_functions_are_those_of_trl(module):
    """The function's own; of an object that is called, its class's."""
    own = {"plain": "plain", "judge.score": "score", "judge": "Judge"}
    for name, expected in own.items():
        assert load_reward_function(f"own_rewards:{name}").signature.own_name == expected
    part = functools.partial(lambda completions, scale: [], scale=1)
    assert RewardFunction("m:f", part).signature.own_name == "<lambda>"


def test_functions_of_the_package():
    vowels = load_reward_function("puzzle_align.data.synthetic:vowel_share")
    given = {**KWARGS, "prompts": ["p"], "completions": ["aab."]}
    assert vowels(given, {"answer": ["a"]}).tolist() == [0.5]


def test_a_missing_column_is_named_before_training(module):
    wants = load_reward_function("own_rewards:wants")
    wants.signature.check_columns(["n", "answer"])
    for check in (
        lambda: wants.signature.check_columns(["n", "prompts"]),
        lambda: wants(KWARGS, {"n": [1, 2, 3]}),
    ):
        with pytest.raises(ValueError) as error:
            check()
        assert message(error) == (
            "reward.function=own_rewards:wants: needs 'answer', which is neither of what all"
            " functions are given (prompts, completions, completion_ids, trainer_state, log_extra,"
            " log_metric) nor a column beside the prompts (n); rename it, add the column to"
            " data.train, or give the argument a default"
        )


def test_a_function_written_to_be_called_by_place_is_not_misread(module):
    """The old way: its completions would be some column, or nothing."""
    found = load_reward_function("own_rewards:by_place_and_name")
    with pytest.raises(ValueError, match="needs 'responses', which is neither of what all"):
        found.signature.check_columns(["answer"])
    found.signature.check_columns(["responses"])  # by keyword it is the column, as TRL has it


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
        (
            "own_rewards:by_place",
            "takes neither completions nor completion_ids, and would see nothing of what was"
            " sampled; functions are called by keyword, as TRL calls them: write it as"
            " function(prompts, completions, **kwargs)",
        ),
        ("own_rewards:places", "takes 'completions' by place only; functions are called by key"),
        (
            "broken_rewards:f",
            "broken_rewards cannot be imported: ModuleNotFoundError: No module named"
            " 'not_there_at_all' (FOLDER/broken_rewards.py:2)",
        ),
        ("wrong_rewards:f", "wrong_rewards cannot be imported: SyntaxError: "),
        (  # raised in json
            "parsing_rewards:f",
            "parsing_rewards cannot be imported: JSONDecodeError: Expecting property name enclosed"
            " in double quotes: line 1 co... (FOLDER/own_parser.py:3)",
        ),
    ],
)
def test_what_cannot_be_a_function_is_told_before_training(module, name, what):
    with pytest.raises(ValueError) as error:
        load_reward_function(name)
    told = message(error).replace(str(module), "FOLDER")
    assert told.startswith(f"reward.function={name}: {what}")


@pytest.mark.parametrize("name", ["own_rewards:{}", "own_rewards:judge.{}", "{}:f", "own_rewards"])
def test_long_names_are_cut_short(module, name):
    with pytest.raises(ValueError) as error:
        load_reward_function(name.format("x" * 5000) if "{" in name else name * 500)
    assert len(message(error).replace(str(module), "")) < 300


FAILING = {
    "fails": ("    return [1 / len(c) for c in completions]", ZeroDivisionError),
    "fails_inside": ("    return torch.zeros(2) @ torch.zeros(3)", RuntimeError),  # raised in torch
    "fails_late": ("    return (1 / len(c) for c in completions)", ZeroDivisionError),
    "leaves": ("    sys.exit(3)", SystemExit),
    "cancelled": ("    raise asyncio.CancelledError", asyncio.CancelledError),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_inside_names_the_users_line_and_is_chained(module, name):
    source, cause = FAILING[name]
    with pytest.raises(ValueError) as error:
        called(name)
    line = SOURCE.splitlines().index(source) + 1
    assert message(error).endswith(f" ({module}/own_rewards.py:{line})")
    assert re.match(rf"reward\.function=own_rewards:{name}: {cause.__name__}: ", message(error))
    assert isinstance(error.value.__cause__, cause)


@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5, True],
        (1, 0.5, np.bool_(True)),
        np.array([1, 0.5, 1], dtype=np.float32),
        torch.tensor([1, 0.5, 1], requires_grad=True),
        [torch.tensor(1.0), torch.tensor([0.5]), np.float16(1)],
        iter([1, 0.5, 1]),
    ],
)
def test_numbers_of_every_kind(result):
    assert returning(result)(KWARGS, {}).tolist() == [1.0, 0.5, 1.0]


def test_none_is_where_a_function_does_not_apply():
    np.testing.assert_array_equal(returning([None, 2, None])(KWARGS, {}), [np.nan, 2.0, np.nan])


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ([1.0, 2.0], "returned 2 rewards for 3 completions"),
        (None, "returned NoneType, not a list"),
        (1.0, "returned float, not a list"),
        ("abc", "returned str, not a list"),
        (torch.tensor(1.0), "returned Tensor, not a list"),
        ({"a": 1, "b": 2, "c": 3}, "returned dict, not a list"),
        ({1, 2, 3}, "returned set, not a list"),
        ([1, 2, float("nan")], "returned nan for completion 2 (prompt 'r', completion 'zzz"),
        ([1, -np.inf, 2], r"returned -inf for completion 1 (prompt 'q\nq', completion '')"),
        (["1", 2, 3], "returned '1' for completion 0 (prompt 'ppp"),
        ([[1], [2], [3]], "returned [1] for completion 0"),
        (np.ones((3, 1)), "returned [1.0] for completion 0"),
        ([10**400, 2, 3], "returned 1000"),
        ([10**5000, 2, 3], "returned a int for completion 0"),
        ([1, 2, 1e39], "returned 1e+39 for completion 2"),
        ([1e300, 2, -np.inf], "returned 1e+300 for completion 0"),
        (np.array([1, 2j, 3]), "returned (1+0j) for completion 0"),
        ([1, np.ma.masked, 3], "returned masked for completion 1"),
        (np.array(["1", "2", "3"]), "returned '1' for completion 0"),
        ([np.timedelta64(1, "s"), 2, 3], "returned np.timedelta64(1,'s') for completion 0"),
        (itertools.count(), "returned 1003 or more rewards for 3 completions"),
        ([1, 2, Liar()], "returned a Liar for completion 2"),
    ],
)
def test_what_is_no_reward_is_told(result, what):
    with pytest.raises(ValueError) as error:
        returning(result)(KWARGS, {})
    assert message(error).startswith(f"reward.function=m:f: {what}")
    assert message(error).endswith(
        "; return a list with a finite float32 number, or None, for every completion"
    )
    assert len(message(error)) < 300


def test_a_function_cannot_change_what_others_are_given():
    kwargs = {**KWARGS, "completions": [*COMPLETIONS]}
    popping = RewardFunction("m:f", lambda completions: [len(completions.pop()) for _ in range(3)])
    assert popping(kwargs, {}).tolist() == [99.0, 0.0, 1.0]
    assert kwargs["completions"] == COMPLETIONS
