"""A reward from a user's Python function: found before training, checked at every call.

``reward.function`` names it as ``module:function`` (or ``module:object.method``). The folder that
the job was started in is searched last, so a ``rewards.py`` there is ``rewards:function``.

It is called as TRL's GRPOTrainer calls it: by keyword alone, with lists of n values (``GIVEN`` and
the prompts' columns). TRL gives every function everything; here one gets what it names, or all with
``**kwargs``. It returns a finite number for every completion, or None where it does not apply.
Nothing it does wrong passes: every fault is a one-line ValueError.
"""

import functools
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np

# What a function may name besides columns; columns of these names, and of those that TRL keeps for
# itself, are not passed.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NO_COLUMNS = (*GIVEN, "prompt", "completion")
_SAMPLED = {"completions", "completion_ids"}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHOWN = 60  # characters of a text in an error
_FORM = "write module:function, of a module that can be imported here"
_CALL = (
    "functions are called by keyword, as TRL calls them: write it as"
    " function(prompts, completions, **kwargs)"
)
_CURE = "return a list with a finite number, or None, for every completion"


class RewardFunction:
    """A user's function with its names and what it takes."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """ValueError, one line, where ``function`` cannot be called by keyword with completions."""
        self.name = name
        plain = function
        while isinstance(plain, functools.partial):
            plain = plain.func
        self.own_name: str = getattr(plain, "__name__", type(plain).__name__)
        self.is_async = any(map(inspect.iscoroutinefunction, (plain, plain.__call__)))
        self._function = function
        self._file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        try:
            parameters = [*inspect.signature(function).parameters.values()]
        except (TypeError, ValueError):  # some built-ins do not say what they take
            parameters = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in _BY_NAME]
        self._names = {p.name for p in named}
        self._needed = [p.name for p in named if p.default is p.empty]
        for p in parameters:
            if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
                raise ValueError(f"reward.function={name}: takes '{p.name}' by place only; {_CALL}")
        if not (self._takes_all or self._names & _SAMPLED):
            raise ValueError(
                f"reward.function={name}: takes neither completions nor completion_ids, and would"
                f" see nothing of what was sampled; {_CALL}"
            )

    def check_columns(self, columns: Sequence[str]) -> None:
        """ValueError, one line, if the function needs what is neither given nor a column."""
        available = [name for name in columns if name not in _NO_COLUMNS]
        for needed in self._needed:
            if needed not in (*GIVEN, *available):
                raise ValueError(
                    f"reward.function={self.name}: needs '{needed}', which is neither of what all"
                    f" functions are given ({', '.join(GIVEN)}) nor a column beside the prompts"
                    f" ({', '.join(available) or 'there is none'}); rename it, add the column to"
                    " data.train, or give the argument a default"
                )

    def takes(self, name: str) -> bool:
        """Whether the function is passed an argument, or a column, of that name."""
        return self._takes_all or name in self._names

    def __call__(self, given: Mapping[str, Any], columns: Mapping[str, list[Any]]) -> np.ndarray:
        """The completions' rewards, float64 [n]; NaN where the function does not apply.

        Args:
            given: ``GIVEN``, with at least one completion.
            columns: n values a name.

        Raises:
            ValueError: one line, if the function raises (the cause is chained) or returns anything
                but n finite numbers or None.
        """
        arguments = self._arguments(given, columns)
        with self._faults():
            result = self._function(**arguments)
            values = _listed(result)
        return self._numbers(result, values, given)

    async def later(self, given: Mapping[str, Any], columns: Mapping[str, list[Any]]) -> np.ndarray:
        """As a call, of a function that ``is_async``."""
        arguments = self._arguments(given, columns)
        with self._faults():
            result = await self._function(**arguments)
            values = _listed(result)
        return self._numbers(result, values, given)

    def _arguments(
        self, given: Mapping[str, Any], columns: Mapping[str, list[Any]]
    ) -> dict[str, Any]:
        """What the function takes of both; lists are its own, another function has others."""
        self.check_columns([*columns])
        allowed = {name: column for name, column in columns.items() if name not in _NO_COLUMNS}
        return {
            name: [*value] if isinstance(value, list) else value
            for name, value in {**allowed, **given}.items()
            if self.takes(name)
        }

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            what = _one_line(f"{type(error).__name__}: {error}")
            where = _line_in(self._file, error)
            raise ValueError(f"reward.function={self.name}: {what} ({where})") from error

    def _numbers(
        self, result: object, values: list[Any] | None, given: Mapping[str, Any]
    ) -> np.ndarray:
        """The checked rewards, float64 [n]."""
        prompts, completions = given["prompts"], given["completions"]
        if values is None:
            kind = type(result).__name__
            raise ValueError(f"reward.function={self.name}: returned {kind}, not a list; {_CURE}")
        if len(values) != len(completions):
            raise ValueError(
                f"reward.function={self.name}: returned {len(values)} rewards for"
                f" {len(completions)} completions; {_CURE}"
            )
        rewards = np.array([_number(value) for value in values])
        applies = np.array([value is not None for value in values])
        for index in np.flatnonzero(applies & ~np.isfinite(rewards))[:1].tolist():
            raise ValueError(
                f"reward.function={self.name}: returned {short(values[index])} for completion"
                f" {index} (prompt {short(prompts[index])}, completion"
                f" {short(completions[index])}); {_CURE}"
            )
        return rewards


def load_reward_function(name: str) -> RewardFunction:
    """The function that ``name``, as module:function, names; imports its module.

    The current folder is added to the end of ``sys.path`` if it is not in it.

    Raises:
        ValueError: one line, if there is no such module or attribute, if importing the module
            fails, or if what it names cannot be called.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise ValueError(f"reward.function={name}: no module:function; {_FORM}")
    found: Any = _import(name, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            place = getattr(found, "__file__", None) or getattr(found, "__name__", module_name)
            raise ValueError(f"reward.function={name}: no '{part}' in {place}; {_FORM}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"reward.function={name}: is {kind}, not a function; {_FORM}")
    return RewardFunction(name, found)


def short(value: object) -> str:
    """A value in a line of an error or a warning."""
    text = _one_line(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _import(name: str, module_name: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module itself or a package it lies in, not what it imports in turn.
        if f"{module_name}.".startswith(f"{missing}."):
            what = f"no module '{missing}' installed or in {os.getcwd()}; {_FORM}"
            raise ValueError(f"reward.function={name}: {what}") from None
        what = _one_line(f"{type(error).__name__}: {error}")
        where = _line_in(None, error)
        raise ValueError(
            f"reward.function={name}: {module_name} cannot be imported: {what} ({where})"
        ) from error


def _line_in(file: str | None, error: Exception) -> str:
    """``file:line`` where the error left ``file``; else where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{frame.filename}:{frame.lineno}"


def _listed(result: Any) -> list[Any] | None:
    """What a function returned as a list, in order; None where it has none."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | Mapping | Set) or not isinstance(result, Iterable):
        return None
    return [*result]


def _number(value: Any) -> float:
    """The value as a float; NaN for what is no number."""
    if isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def _one_line(text: str) -> str:
    return " ".join(text.split())
