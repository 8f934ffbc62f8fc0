"""Users' reward functions: found, called and summed as TRL does; every mistake is one line."""

import asyncio
import functools
import inspect
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rewards.functions import (
    GIVEN,
    Completions,
    Result,
    RewardFunction,
    TrainerState,
    call_functions,
    load_reward_function,
)
from puzzle_align.stages.rl.rewards import Functions
from tests.refusals import refusal
from tests.unit import grpo_rewards, more_rewards

QUESTIONS = ["How many is 2 + 3?", "How many eggs?", "And then?"]
TEXTS = ["It is #### 5", "1,200", ""]
IDS = [[5, 6, 258], [7], [258]]
COLUMNS = {"response": ["2 + 3 = 5\n#### 5", "#### 1200", "#### 7"], "level": [1, 2, 3]}
STATE = TrainerState(global_step=3, max_steps=12, epoch=0.25)
NAMES = ["right", "marked", "short", "judged"]
ODD = Completions(["p" * 99, "q\nq", "r"], ["x", "", "z" * 99], [[1, 2], [2], [3]], {})

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
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of reward functions in the current folder, which is not yet on the path."""
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("x = 1\nimport not_there_at_all\n")
    (tmp_path / "wrong_rewards.py").write_text("def f(:\n")
    (tmp_path / "parsing_rewards.py").write_text("import my_parser\n")
    (tmp_path / "my_parser.py").write_text("import json\n\njson.loads('{not json')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    for name in ("my_rewards", "broken_rewards", "wrong_rewards", "parsing_rewards"):
        sys.modules.pop(name, None)


def loaded(module: str, *names: str) -> list[RewardFunction]:
    return [load_reward_function(f"{module}:{name}") for name in names]


def in_process(functions: list[RewardFunction]) -> Functions:
    """Functions that are called in this process."""
    loop = asyncio.new_event_loop()

    def call(given: Completions, state: TrainerState) -> list[Result]:
        results = dict(call_functions(functions, given, state, loop))
        return [results[number] for number in sorted(results)]

    return Functions([function.signature for function in functions], call)


def functions(*names: str) -> Functions:
    return in_process(loaded("tests.unit.grpo_rewards", *names))


def completions(conversational: bool) -> Completions:
    if not conversational:
        return Completions([*QUESTIONS], [*TEXTS], IDS, COLUMNS)
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = [[{"role": "assistant", "content": text}] for text in TEXTS]
    return Completions([*prompts], [*answers], IDS, COLUMNS)


def called(function: RewardFunction, **columns: list[Any]) -> list[float]:
    """Rewards of ``ODD``."""
    given = Completions(ODD.prompts, ODD.completions, ODD.completion_ids, columns)
    ((_, result),) = call_functions([function], given, STATE, asyncio.new_event_loop())
    assert result.rewards.dtype == np.float64
    return result.rewards.tolist()


def returning(value: object) -> RewardFunction:
    return RewardFunction("m:f", lambda completions, **kwargs: value)


def trl_rewards(plain: list[Any], given: Completions) -> torch.Tensor:
    """``_calculate_rewards`` of TRL 1.16: float64 [n, functions]."""
    keywords: dict[str, Any] = {
        "prompts": given.prompts,
        "completions": given.completions,
        "completion_ids": given.completion_ids,
        "trainer_state": STATE,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
        **given.columns,
    }
    per_function = torch.zeros(len(given.prompts), len(plain), dtype=torch.float64)
    for i, function in enumerate(plain):
        output = function(**keywords)
        if inspect.isawaitable(output):
            output = asyncio.run(_awaited(output))
        output = [reward if reward is not None else torch.nan for reward in output]
        per_function[:, i] = torch.tensor(output, dtype=torch.float64)
    return per_function


async def _awaited(output: Any) -> Any:
    return await output


@pytest.mark.parametrize("conversational", [False, True])
def test_functions_written_for_trl_give_what_trl_gets_of_them(conversational: bool) -> None:
    given, ours = completions(conversational), functions(*NAMES)
    assert ours.call is not None
    results = ours.call(given, STATE)
    rewards = np.stack([result.rewards for result in results], axis=1)
    plain = [getattr(grpo_rewards, name) for name in NAMES]
    np.testing.assert_array_equal(rewards, trl_rewards(plain, given).numpy())
    lengths = [len(question) / 1000 for question in QUESTIONS]
    by_hand = [
        [1.0, 1.0, -0.75, lengths[0]],
        [1.0, 0.0, -0.25, lengths[1]],
        [0.0, math.nan, -0.25, math.nan],
    ]
    np.testing.assert_array_equal(rewards, by_hand)
    assert [result.extra for result in results] == [{"found": ["5", "1,200", ""]}, {}, {}, {}]
    assert [result.metrics for result in results] == [{"accuracy": [2 / 3]}, {}, {}, {}]


def test_a_function_gets_what_it_names(module: Path) -> None:
    columns = {"answer": ["x", "x", "r"], "n": [1, 2, 3]}
    plain, wants, judge, score, lengths, asks = loaded(
        "my_rewards", "plain", "wants", "judge", "judge.score", "lengths", "asks"
    )
    assert called(plain, **columns) == [1.0, 0.0, 99.0]
    assert called(wants, **columns, bonus=[None, 0.5, 1]) == [1.0, 0.5, 1.0]
    assert called(judge) == [3.0] * 3
    assert called(score, **columns) == [2.0] * 3
    assert called(lengths) == [2.0, 1.0, 1.0]
    np.testing.assert_array_equal(called(asks), [math.nan, 1.0, 1.0])
    assert str(module) == sys.path[-1]


def test_columns_do_not_take_the_place_of_what_is_given(module: Path) -> None:
    """Nor of what TRL keeps for itself; any other name is a column like others."""
    names = ("answer", "responses", "n", "prompt", "completion", *GIVEN)
    (everything,) = loaded("my_rewards", "everything")
    assert called(everything, **{name: [0, 0, 0] for name in names}) == [1.0] * 3


def test_names_and_kinds_of_functions(module: Path) -> None:
    """The function's own name, as TRL's; of an object that is called, its class's."""

    class Later:
        async def __call__(self, completions: list[str], **kwargs: object) -> list[float]:
            return [1.0] * len(completions)

    plain, score, judge, asks = loaded("my_rewards", "plain", "judge.score", "judge", "asks")
    part = functools.partial(lambda completions, scale: [], scale=1)
    made = [RewardFunction("m:f", f) for f in (part, Later(), functools.partial(Later()))]
    signatures = [function.signature for function in (plain, score, judge, asks, *made)]
    names = ["plain", "score", "Judge", "asks", "<lambda>", "Later", "Later"]
    assert [signature.short_name for signature in signatures] == names
    assert [s.is_async for s in signatures] == [False, False, False, True, False, True, True]
    line = SOURCE.splitlines().index("def plain(completions):") + 1
    assert signatures[0].place == f"{module}/my_rewards.py:{line}"
    assert functions("right", "short").names == ["right", "Short"]
    both = loaded("tests.unit.grpo_rewards", "right") + loaded("tests.unit.more_rewards", "right")
    long = ["tests.unit.grpo_rewards:right", "tests.unit.more_rewards:right"]
    assert in_process(both).names == long


def test_a_missing_column_is_named(module: Path) -> None:
    """Also where a function is written to be called by place, as TRL's are not."""
    wants, by_place = loaded("my_rewards", "wants", "by_place_and_name")
    wants.signature.check_columns(["n", "answer"])
    assert refusal(lambda: wants.signature.check_columns(["n", "prompts"])) == (
        "reward.function=my_rewards:wants: needs 'answer', which is neither an argument"
        " of all functions (prompts, completions, completion_ids, trainer_state, log_extra,"
        " log_metric) nor a column beside the prompts (n); rename it, add the column to"
        " data.train, or give the argument a default"
    )
    with pytest.raises(ValueError, match="needs 'responses', which is neither an argument of all"):
        by_place.signature.check_columns(["answer"])
    by_place.signature.check_columns(["responses"])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("my_rewards", "no module:function; write module:function"),
        (":f", "no module:function"),
        ("no_such.thing:f", "no module 'no_such' installed or in FOLDER; write module:function"),
        ("my_rewards.sub:f", "no module 'my_rewards.sub' installed or in FOLDER"),
        ("my_rewards:nothing", "no 'nothing' in FOLDER/my_rewards.py; write"),
        ("my_rewards:judge.nothing", "no 'nothing' in my_rewards; write"),
        ("my_rewards:constant", "is int, not a function"),
        (
            "my_rewards:by_place",
            "takes neither completions nor completion_ids, and would see nothing of what was"
            " sampled; functions are called by keyword, as TRL calls them: write it as"
            " function(prompts, completions, **kwargs)",
        ),
        ("my_rewards:places", "takes 'completions' by place only; functions are called by key"),
        (
            "broken_rewards:f",
            "broken_rewards cannot be imported: ModuleNotFoundError: No module named"
            " 'not_there_at_all' (FOLDER/broken_rewards.py:2)",
        ),
        ("wrong_rewards:f", "wrong_rewards cannot be imported: SyntaxError: "),
        (  # raised in json
            "parsing_rewards:f",
            "parsing_rewards cannot be imported: JSONDecodeError: Expecting property name enclosed"
            " in double quotes: line 1 co... (FOLDER/my_parser.py:3)",
        ),
    ],
)
def test_what_cannot_be_a_function_is_an_error(module: Path, name: str, what: str) -> None:
    line = refusal(lambda: load_reward_function(name)).replace(str(module), "FOLDER")
    assert line.startswith(f"reward.function={name}: {what}")


FAILING = {
    "fails": ("    return [1 / len(c) for c in completions]", ZeroDivisionError),
    "fails_inside": ("    return torch.zeros(2) @ torch.zeros(3)", RuntimeError),  # raised in torch
    "fails_late": ("    return (1 / len(c) for c in completions)", ZeroDivisionError),
    "leaves": ("    sys.exit(3)", SystemExit),
    "cancelled": ("    raise asyncio.CancelledError", asyncio.CancelledError),
    "fails_async": ("    return [1 / len(c) for c in completions]", ZeroDivisionError),
}


@pytest.mark.parametrize("name", FAILING)
def test_an_error_inside_names_the_users_line(module: Path, name: str) -> None:
    source, cause = FAILING[name]
    (function,) = loaded("my_rewards", name)
    with pytest.raises(CannotGoOn) as error:
        called(function)
    line = SOURCE.splitlines().index(source) + 1
    message = str(error.value)
    assert message.endswith(f" ({module}/my_rewards.py:{line})") and "\n" not in message
    assert message.startswith(f"reward.function=my_rewards:{name}: {cause.__name__}: ")
    assert f'File "{module}/my_rewards.py", line {line}, in ' in error.value.details


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
def test_numbers_of_every_kind(result: object) -> None:
    assert called(returning(result)) == [1.0, 0.5, 1.0]


def test_the_largest_numbers_and_none_are_rewards() -> None:
    most = float(np.finfo(np.float32).max)
    np.testing.assert_array_equal(called(returning([most, -most, None])), [most, -most, math.nan])


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
        (np.array([1, 2j, 3]), "returned (1+0j) for completion 0"),
        (np.array(["1", "2", "3"]), "returned '1' for completion 0"),
    ],
)
def test_what_is_no_reward_is_an_error(result: object, what: str) -> None:
    line = refusal(lambda: called(returning(result)))
    assert line.startswith(f"reward.function=m:f: {what}")
    cure = "return a list with a finite float32 number, or None, for every completion"
    assert re.search(rf"; {cure} \({re.escape(__file__)}:\d+\)$", line)


def test_a_function_cannot_change_what_others_are_given() -> None:
    popping = RewardFunction("m:f", lambda completions: [len(completions.pop()) for _ in range(3)])
    assert called(popping) == called(popping) == [99.0, 0.0, 1.0]


def test_asynchronous_functions_run_at_once_and_in_one_loop() -> None:
    """Each waits for the other; what one made of the loop in a call can be used in the next."""
    pair = in_process(loaded("tests.unit.more_rewards", "first", "second"))
    assert pair.call is not None
    for _ in range(2):
        results = pair.call(completions(False), STATE)
        assert [result.rewards.tolist() for result in results] == [[1.0] * 3, [2.0] * 3]
    assert len(more_rewards.LOOPS) == 4 and len(set(more_rewards.LOOPS)) == 1


def test_where_one_asynchronous_function_fails_the_others_end() -> None:
    both = in_process(loaded("tests.unit.more_rewards", "fails", "waits"))
    assert both.call is not None
    with pytest.raises(ValueError, match=r"^reward.function=tests.unit.more_rewards:fails: KeyEr"):
        both.call(completions(False), STATE)
    assert more_rewards.ENDED == ["waits"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("logs_too_little", "log_extra was given 1 values of 'x' for 3 completions"),
        ("asks_for_history", "'TrainerState' object has no attribute 'log_history'"),
    ],
)
def test_misuse_of_what_is_given_is_an_error(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        called(*loaded("tests.unit.more_rewards", name))
