"""What reward functions give back: numbers that are right, or one line."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from puzzle_align.stages.rl.reward_calls import CalledFunctions, Completions, TrainerState
from puzzle_align.stages.rl.reward_function import RewardFunction
from tests.fuzz.harness import Case

NUM = 3
GIVEN = Completions(["p", "q" * 99, "r\n"], ["a", "", "c" * 999], [[1], [2], [3]], {})
STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)
MOST = float(np.finfo(np.float32).max)


class Odd:
    """An object that raises, or lies, wherever it is asked to."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def _answer(self, name: str) -> Any:
        answer = self._answers.get(name, NotImplementedError(name))
        if isinstance(answer, BaseException) or (
            isinstance(answer, type) and issubclass(answer, BaseException)
        ):
            raise answer
        return answer

    def __float__(self) -> float:
        return self._answer("float")

    def __iter__(self) -> Iterator[Any]:
        return self._answer("iter")

    def __len__(self) -> int:
        return self._answer("len")

    def __repr__(self) -> str:
        return self._answer("repr")

    def __bool__(self) -> bool:
        return self._answer("bool")

    def __eq__(self, other: object) -> bool:
        return self._answer("eq")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._answer(name)


class Text(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise LookupError("no text")


ERRORS: tuple[Any, ...] = (
    KeyError("x"),
    ValueError("two\nlines\x00" * 500),
    RecursionError,
    MemoryError,
    SystemExit(0),
    KeyboardInterrupt,
    StopIteration,
    GeneratorExit,
    Text(),
)
# Numbers, and what they are as rewards; None: no reward, NaN: the function does not apply.
NUMBERS: tuple[tuple[Any, float | None], ...] = (
    (0, 0.0),
    (-7, -7.0),
    (True, 1.0),
    (0.1, 0.1),
    (-0.0, -0.0),
    (5e-324, 5e-324),
    (MOST, MOST),
    (-MOST, -MOST),
    (3.41e38, None),
    (1e39, None),
    (-1e300, None),
    (10**38, 1e38),
    (10**39, None),
    (10**400, None),
    (10**5000, None),
    (math.inf, None),
    (-math.inf, None),
    (math.nan, None),
    (None, math.nan),
    ("1", None),
    (b"1", None),
    ("", None),
    ("x" * 10**6, None),
    ([1.0], None),
    ((), None),
    ({}, None),
    (1j, None),
    (complex(1, 0), None),
    (object(), None),
    (Ellipsis, None),
    (NotImplemented, None),
    (float, None),
    (Decimal("0.25"), 0.25),
    (Decimal("1e39"), None),
    (Decimal("nan"), None),
    (Decimal("sNaN"), None),
    (Fraction(1, 4), 0.25),
    (Fraction(10**400), None),
    (np.float16(0.5), 0.5),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.float64(1e300), None),
    (np.longdouble("1e39"), None),
    (np.int8(-3), -3.0),
    (np.uint64(2**63), 2.0**63),
    (np.bool_(True), 1.0),
    (np.complex64(2), None),
    (np.complex128(2 + 1j), None),
    (np.str_("1"), None),
    (np.array("1"), None),
    (np.array(2.5), 2.5),
    (np.array([2.5]), 2.5),
    (np.array([1.0, 2.0]), None),
    (np.array([]), None),
    (np.array(None), None),
    (np.array(np.nan), None),
    (np.datetime64("2020-01-01"), None),
    (np.timedelta64(1, "s"), None),
    (np.ma.masked, None),
    (torch.tensor(1.5), 1.5),
    (torch.tensor([1.5], requires_grad=True), 1.5),
    (torch.tensor([1.5, 2.0]), None),
    (torch.tensor(math.nan), None),
    (torch.tensor(1e39, dtype=torch.float64), None),
    (torch.tensor(True), 1.0),
    (torch.tensor(3, dtype=torch.int8), 3.0),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor(1 + 0j), None),
    (torch.tensor(1.0).to_sparse(), 1.0),
    (torch.empty(1, device="meta"), None),
    (Odd(float=2.5, item=AttributeError, repr="odd"), 2.5),
    (Odd(float="2.5", item=AttributeError), None),
    (Odd(float=math.nan, item=AttributeError, repr="a\nb" * 999), None),
    *((Odd(float=error, item=AttributeError, repr=error), None) for error in ERRORS[:4]),
    *((Odd(item=error, repr=7), None) for error in ERRORS[:4]),
)


class Kind:
    """See ``harness.Kind``."""

    limit_s = 2.0
    imports = ()

    def __init__(self, folder: Path) -> None:
        pass

    def case(self, draw: random.Random) -> Case:
        """A function whose result, or whose way to end, is the case."""
        make = draw.choice((_numbers, _numbers, _numbers, _of_another_length, _no_list, _raising))
        what, function, expected = make(draw)
        called = CalledFunctions([RewardFunction("m:f", function)])
        return Case(what, lambda: called(GIVEN, STATE).rewards, lambda r: _wrong(r, expected))


_Made = tuple[str, Callable[..., Any], list[float | None] | None]


def _wrong(rewards: np.ndarray, expected: list[float | None] | None) -> str | None:
    if expected is None or None in expected:
        return f"taken for {rewards.tolist()}"
    right = np.array(expected, dtype=np.float64)[:, None]
    same = rewards.dtype == np.float64 and np.array_equal(rewards, right, equal_nan=True)
    return None if same else f"taken for {rewards.tolist()}, not {expected}"


def _drawn(draw: random.Random, number: int) -> tuple[list[Any], list[float | None]]:
    """Values, mostly good ones, and what they are as rewards."""
    good = [pair for pair in NUMBERS if pair[1] is not None]
    pairs = [draw.choice(good if draw.random() < 0.6 else NUMBERS) for _ in range(number)]
    return [value for value, _ in pairs], [reward for _, reward in pairs]


def _numbers(draw: random.Random) -> _Made:
    """As many values as there are completions, in whatever holds some."""
    values, expected = _drawn(draw, NUM)
    holders: dict[str, Callable[[], Any]] = {
        "list": lambda: values,
        "tuple": lambda: tuple(values),
        "iterator": lambda: iter(values),
        "generator": lambda: (value for value in values),
        "chain": lambda: itertools.chain(values[:1], values[1:]),
        "dict's values": lambda: dict(enumerate(values)).values(),
        "object with __iter__": lambda: Odd(iter=iter(values), tolist=AttributeError),
        "object with __iter__ and a false length": lambda: Odd(
            iter=iter(values), len=10**9, tolist=AttributeError
        ),
        "object with tolist": lambda: Odd(tolist=lambda: values),
    }
    name = draw.choice([*holders])
    shown = ", ".join(f"{type(v).__name__} -> {e}" for v, e in zip(values, expected, strict=True))
    return f"{name} of {shown}", lambda completions: holders[name](), expected


def _of_another_length(draw: random.Random) -> _Made:
    values, _ = _drawn(draw, draw.choice((0, 1, 2, 4, 50)))
    endless = (itertools.count, lambda: itertools.repeat(1.0), lambda: range(10**12))
    long: tuple[Callable[[], Any], ...] = (
        *endless,
        lambda: [1.0] * 10**6,
        lambda: np.zeros(10**6),
        lambda: torch.zeros(NUM, 2),
    )
    make = draw.choice((lambda: values, lambda: iter(values), *long))
    what = f"another length: {len(values)} values, or many"
    if make in long[-1:]:
        return what, lambda completions: make(), [None]
    return what, lambda completions: make(), None


def _no_list(draw: random.Random) -> _Made:
    results: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: 1.0,
        lambda: "abc",
        lambda: b"abc",
        lambda: bytearray(b"ab"),
        lambda: {1, 2, 3},
        lambda: frozenset({1, 2, 3}),
        lambda: {"a": 1, "b": 2, "c": 3},
        lambda: object(),
        lambda: Kind,
        lambda: np.float64(1.0),
        lambda: np.array(1.0),
        lambda: torch.tensor(1.0),
        lambda: torch.empty(NUM, device="meta"),
        lambda: Odd(tolist=lambda: 5),
        lambda: Odd(tolist=7),
        lambda: Odd(iter=5, tolist=AttributeError),
    )
    number = draw.randrange(len(results))
    return f"no list, {number}", lambda completions: results[number](), None


def _raising(draw: random.Random) -> _Made:
    error = draw.choice(ERRORS)
    values, _ = _drawn(draw, NUM)

    def inside(completions: list[str]) -> Any:
        raise error

    def late(completions: list[str]) -> Any:
        yield values[0]
        raise error

    def in_iter(completions: list[str]) -> Any:
        return Odd(iter=error, tolist=AttributeError)

    def in_tolist(completions: list[str]) -> Any:
        return Odd(tolist=error)

    def in_log(completions: list[str], log_metric: Any, log_extra: Any) -> Any:
        log_metric("x", Odd(float=error))
        return [1.0] * NUM

    def in_extra(completions: list[str], log_extra: Any) -> Any:
        log_extra("x", [Odd(tolist=AttributeError, repr=error)] * NUM)
        return [1.0] * NUM

    async def later(completions: list[str]) -> Any:
        raise error

    ways = (inside, late, in_iter, in_tolist, in_log, in_extra, later)
    way = draw.choice(ways)
    return f"{error!r:.40} {way.__name__}", way, None
