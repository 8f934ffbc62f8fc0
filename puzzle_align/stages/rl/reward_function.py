"""A reward from a user's Python function: found before training, checked at every call.

``reward.function`` names it as ``module:function`` (or ``module:object.method``). The folder that
the job was started in is searched last, so a ``rewards.py`` there is ``rewards:function``.

It is called as TRL's GRPOTrainer calls it, but in a process of its own (``reward_process``): by
keyword alone, with lists of n values (``GIVEN`` and the prompts' columns). TRL gives every function
everything; here one gets what it names, or all with ``**kwargs``. It returns for every completion a
number that float32 can hold, or None where it does not apply. Nothing it does wrong passes: every
fault is a one-line ValueError.
"""

import asyncio
import functools
import importlib
import inspect
import math
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from puzzle_align.files.messages import shown
from puzzle_align.files.typed import LARGEST_FP32

# What a function may name besides columns; columns of these names, and of those that TRL keeps for
# itself, are not passed.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NO_COLUMNS = (*GIVEN, "prompt", "completion")
_SAMPLED = {"completions", "completion_ids"}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHORT = 60  # characters of a value in a line of three
_FEW = 1000  # more rewards than completions than which no result is read any further
_FORM = "write module:function, of a module that can be imported here"
_CALL = (
    "functions are called by keyword, as TRL calls them: write it as"
    " function(prompts, completions, **kwargs)"
)
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_NOT_THE_USERS = (__file__, "<frozen", *_LIBRARIES)  # how files begin that a user did not write
_CURE = "return a list with a finite float32 number, or None, for every completion"


@dataclass(frozen=True)
class Signature:
    """What a function is called, and what it takes: all that is to be known before its calls."""

    name: str  # in the config
    own_name: str  # its own, or, of an object that is called, its class's
    is_async: bool
    takes_all: bool
    names: tuple[str, ...]  # of its arguments
    needed: tuple[str, ...]  # of those without a default

    def check_columns(self, columns: Sequence[str]) -> None:
        """ValueError, one line, if the function needs what is neither given nor a column."""
        available = [name for name in columns if name not in _NO_COLUMNS]
        for needed in self.needed:
            if needed not in (*GIVEN, *available):
                beside = shown(", ".join(available), 300) or "there is none"
                raise ValueError(
                    f"{_key(self.name)}: needs '{needed}', which is neither of what all"
                    f" functions are given ({', '.join(GIVEN)}) nor a column beside the prompts"
                    f" ({beside}); rename it, add the column to"
                    " data.train, or give the argument a default"
                )

    def takes(self, name: str) -> bool:
        """Whether the function is passed an argument, or a column, of that name."""
        return self.takes_all or name in self.names


class RewardFunction:
    """A user's function with its signature."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """ValueError, one line, where ``function`` cannot be called by keyword with completions."""
        self._function = function
        self._file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        self.signature = signature = _signature_of(name, function)
        if not (signature.takes_all or _SAMPLED & {*signature.names}):
            raise ValueError(
                f"{_key(name)}: takes neither completions nor completion_ids, and would"
                f" see nothing of what was sampled; {_CALL}"
            )

    def __call__(self, given: Mapping[str, Any], columns: Mapping[str, list[Any]]) -> np.ndarray:
        """The completions' rewards, float64 [n]; NaN where the function does not apply.

        Args:
            given: ``GIVEN``, with at least one completion.
            columns: n values a name.

        Raises:
            ValueError: one line, if the function raises, or calls ``sys.exit`` (the cause is
                chained), or returns anything but n finite numbers or None.
        """
        arguments = self._arguments(given, columns)
        with self._faults():
            result = self._function(**arguments)
            values = _listed(result, len(given["completions"]))
        return self._numbers(result, values, given)

    async def later(self, given: Mapping[str, Any], columns: Mapping[str, list[Any]]) -> np.ndarray:
        """As a call, of a function that ``is_async``."""
        arguments = self._arguments(given, columns)
        with self._faults():
            result = await self._function(**arguments)
            values = _listed(result, len(given["completions"]))
        return self._numbers(result, values, given)

    def _arguments(
        self, given: Mapping[str, Any], columns: Mapping[str, list[Any]]
    ) -> dict[str, Any]:
        """What the function takes of both; lists are its own, another function has others."""
        self.signature.check_columns([*columns])
        allowed = {name: column for name, column in columns.items() if name not in _NO_COLUMNS}
        return {
            name: [*value] if isinstance(value, list) else value
            for name, value in {**allowed, **given}.items()
            if self.signature.takes(name)
        }

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # a user's code may leave by SystemExit, too
            if _is_cancelled():
                raise
            raise ValueError(f"{self}: {_what(error)} ({_line_in(self._file, error)})") from error

    def __str__(self) -> str:
        return _key(self.signature.name)

    def _numbers(
        self, result: object, values: list[Any] | None, given: Mapping[str, Any]
    ) -> np.ndarray:
        """The checked rewards, float64 [n]."""
        prompts, completions = given["prompts"], given["completions"]
        if values is None:
            kind = shown(type(result).__name__)
            raise ValueError(f"{self}: returned {kind}, not a list; {_CURE}")
        if len(values) != len(completions):
            or_more = " or more" if len(values) == len(completions) + _FEW else ""
            raise ValueError(
                f"{self}: returned {len(values)}{or_more} rewards for {len(completions)}"
                f" completions; {_CURE}"
            )
        rewards = np.array([_number(value) for value in values])
        applies = np.array([value is not None for value in values])
        for index in np.flatnonzero(applies & ~(np.abs(rewards) <= LARGEST_FP32))[:1].tolist():
            raise ValueError(
                f"{self}: returned {short(values[index])} for completion"
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
        raise ValueError(f"{_key(name)}: no module:function; {_FORM}")
    found: Any = _import(name, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            place = getattr(found, "__file__", None) or getattr(found, "__name__", module_name)
            raise ValueError(f"{_key(name)}: no '{shown(part)}' in {place}; {_FORM}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise ValueError(f"{_key(name)}: is {kind}, not a function; {_FORM}")
    return RewardFunction(name, found)


def short(value: object) -> str:
    """A value in a line of an error or a warning."""
    try:
        return shown(repr(value), _SHORT)
    except Exception:  # noqa: BLE001 - whatever a user's own __repr__ raises
        return shown(f"a {type(value).__name__}", _SHORT)


def _key(name: str) -> str:
    """The key and its value in an error's line."""
    return f"reward.function={shown(name)}"


def _signature_of(name: str, function: Callable[..., Any]) -> Signature:
    """ValueError, one line, where an argument cannot be given by keyword."""
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except Exception:  # noqa: BLE001 - some built-ins do not say, and an object may do anything
        parameters = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise ValueError(f"{_key(name)}: takes '{p.name}' by place only; {_CALL}")
    named = [p for p in parameters if p.kind in _BY_NAME]
    return Signature(
        name,
        own_name=str(getattr(plain, "__name__", type(plain).__name__)),
        is_async=any(map(inspect.iscoroutinefunction, (plain, plain.__call__))),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        names=tuple(p.name for p in named),
        needed=tuple(p.name for p in named if p.default is p.empty),
    )


def _import(name: str, module_name: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except BaseException as error:  # SystemExit, too
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module itself or a package it lies in, not what it imports in turn.
        if f"{module_name}.".startswith(f"{missing}."):
            what = f"no module '{shown(missing)}' installed or in {os.getcwd()}; {_FORM}"
            raise ValueError(f"{_key(name)}: {what}") from None
        raise ValueError(
            f"{_key(name)}: {shown(module_name)} cannot be imported: {_what(error)}"
            f" ({_line_in(None, error)})"
        ) from error


def _what(error: BaseException) -> str:
    """An exception's type and text, in a line."""
    try:
        return shown(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - whatever a user's own __str__ raises
        return shown(type(error).__name__)


def _is_cancelled() -> bool:
    """Whether this is in a task that is to end, because another one failed."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop is running
        return False
    return task is not None and task.cancelling() > 0


def _line_in(file: str | None, error: BaseException) -> str:
    """``file:line`` where the error left ``file``, else the user's code, else where it arose."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    own = [frame for frame in frames if frame.filename == file]
    users = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    frame = (own or users or frames)[0]
    return f"{frame.filename}:{frame.lineno}"


def _listed(result: Any, num_wanted: int) -> list[Any] | None:
    """What a function returned as a list, in order; None where it has none.

    Of a result without end, and of one that is far too long, as many as show that it is so.
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | Mapping | Set) or not isinstance(result, Iterable):
        return None
    return [*islice(result, num_wanted + _FEW)]


def _number(value: Any) -> float:
    """The value as a float; NaN for what is no real number."""
    try:
        if value is np.ma.masked:  # which takes itself for 0
            return math.nan
        if not isinstance(value, int | float) and hasattr(value, "item"):
            value = value.item()  # of an array: complex numbers and texts show themselves
        return float(value) if hasattr(value, "__float__") else math.nan
    except Exception:  # noqa: BLE001 - whatever a user's own number raises
        return math.nan
