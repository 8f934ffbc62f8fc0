"""Rewards from a user's Python function: found before training, checked at every call.

``reward.function`` names it as ``module:function`` (or ``module:object.method``). The folder that
the job was started in is searched last, so a ``rewards.py`` there is ``rewards:function``.

The function is called as ``function(prompts, responses, **columns)``: lists of texts and, of the
prompts' other columns, those that it takes (all, if it has ``**columns``). It returns a finite
number for every response. Nothing it does wrong passes: every fault is a one-line ValueError.
"""

import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHOWN = 60  # characters of a text in an error
_FORM = "write module:function, of a module that can be imported here"


class RewardFunction:
    """A user's function with its name and what it takes."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """ValueError, one line, where ``function`` cannot take prompts and responses."""
        self.name = name
        self._function = function
        self._file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        try:
            parameters = [*inspect.signature(function).parameters.values()]
        except (TypeError, ValueError):  # some built-ins do not say what they take
            parameters = []
        kinds = [parameter.kind for parameter in parameters]
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        texts = [p for p in parameters if p.kind in _BY_PLACE][:2]
        if parameters and len(texts) < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ValueError(
                f"reward.function={name}: takes no prompts and responses;"
                " write it as function(prompts, responses, **columns)"
            )
        named = [p for p in parameters if p not in texts and p.kind in _BY_NAME]
        self._texts = {"prompts", "responses", *(parameter.name for parameter in texts)}
        self._optional = {p.name for p in named if p.default is not p.empty}
        self._needed = [p.name for p in named if p.default is p.empty]

    def check_columns(self, names: Sequence[str]) -> None:
        """ValueError, one line, if the function needs a column that is not among ``names``."""
        available = [name for name in names if name not in self._texts]
        for needed in self._needed:
            if needed not in available:
                raise ValueError(
                    f"reward.function={self.name}: needs column '{needed}', and the prompts have"
                    f" {', '.join(available) or 'no other columns'}; add it to data.train, or give"
                    " the argument a default"
                )

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, list[Any]]
    ) -> np.ndarray:
        """The responses' rewards, float64 [n]; ``columns`` has n values a name.

        Columns called prompts or responses, or as the function calls its first two arguments, are
        not passed. No responses: the function is not called.

        Raises:
            ValueError: one line, if the function raises (the cause is chained) or returns anything
                but n finite numbers.
        """
        if not responses:
            return np.zeros(0)
        self.check_columns([*columns])
        passed = {key: value for key, value in columns.items() if self._takes(key)}
        try:
            result = self._function(list(prompts), list(responses), **passed)
        except Exception as error:
            what = _one_line(f"{type(error).__name__}: {error}")
            where = _line_in(self._file, error)
            raise ValueError(f"reward.function={self.name}: {what} ({where})") from error
        return self._numbers(result, prompts, responses)

    def _takes(self, column: str) -> bool:
        if column in self._texts:
            return False
        return self._takes_all or column in self._optional or column in self._needed

    def _numbers(
        self, result: object, prompts: Sequence[str], responses: Sequence[str]
    ) -> np.ndarray:
        """The checked rewards, float64 [n]."""
        values = result.tolist() if hasattr(result, "tolist") else result  # type: ignore
        cure = "return a list with a finite number for every response"
        if not isinstance(values, list | tuple):
            kind = type(result).__name__
            raise ValueError(f"reward.function={self.name}: returned {kind}, not a list; {cure}")
        if len(values) != len(responses):
            raise ValueError(
                f"reward.function={self.name}: returned {len(values)} rewards for"
                f" {len(responses)} responses; {cure}"
            )
        rewards = np.array([_number(value) for value in values])
        for index in np.flatnonzero(~np.isfinite(rewards))[:1].tolist():
            raise ValueError(
                f"reward.function={self.name}: returned {_short(values[index])} for response"
                f" {index} (prompt {_short(prompts[index])}, response {_short(responses[index])});"
                f" {cure}"
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


def _number(value: Any) -> float:
    """The value as a float; NaN for what is no number."""
    if isinstance(value, str | bytes):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def _short(value: object) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
