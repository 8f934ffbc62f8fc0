"""Import, calls and checks of users' reward functions.

``reward.function`` names one as ``module:function`` (or ``module:object.method``). The job's
current folder is searched last: a function in its ``rewards.py`` is ``rewards:function``.

Functions are called by keyword with lists of n values (``GIVEN`` and the prompts' columns), as by
TRL's GRPOTrainer. TRL passes every argument to every function; here a function gets the arguments
that it names, or all with ``**kwargs``. For every completion it returns a number that is finite in
float32, or None if it does not apply. Any error in a function ends the job with one line.

Shapes: n completions.
"""

import asyncio
import functools
import importlib
import inspect
import json
import math
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from puzzle_align.config.sections.models import is_url
from puzzle_align.data.records import Content
from puzzle_align.files.messages import shown
from puzzle_align.files.typed import LARGEST_FP32
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rewards.http import HttpReward

# Arguments of functions besides columns. Columns with these names, or names that TRL reserves, are
# not passed.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NO_COLUMNS = (*GIVEN, "prompt", "completion")
_SAMPLED = {"completions", "completion_ids"}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHORT = 60  # characters of a value in a line that shows three
_KEY = "reward.function"
_FORM = "write module:function, of a module that can be imported here"
_CALL = (
    "functions are called by keyword, as TRL calls them: write it as"
    " function(prompts, completions, **kwargs)"
)
_CURE = "return a list with a finite float32 number, or None, for every completion"
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
)
_NOT_THE_USERS = (__file__, "<frozen", *_LIBRARIES)  # prefixes of paths that are not users' code


@dataclass(frozen=True)
class TrainerState:
    """The part of TRL's ``trainer_state`` that exists here; a step is an iteration."""

    global_step: int  # iterations done
    max_steps: int  # iterations of the job
    epoch: float  # passes over the prompts done


@dataclass(frozen=True)
class Completions:
    """Responses and their prompts as functions' arguments: lists of n values."""

    prompts: list[Content]
    completions: list[Content]  # if the prompt is a list of messages: a list of one message
    completion_ids: list[list[int]]  # a stop token included
    columns: Mapping[str, list[Any]]

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class Result:
    """Result of one function's call."""

    rewards: np.ndarray  # float64 [n]; NaN where the function does not apply
    extra: dict[str, list[Any]] = field(default_factory=dict)  # by ``log_extra``: n values each
    metrics: dict[str, list[float]] = field(default_factory=dict)  # by ``log_metric``


@dataclass(frozen=True)
class Signature:
    """Names of a function and of its arguments."""

    name: str  # in the config
    short_name: str  # the function's ``__name__``; of a callable object, its class's
    place: str  # file:line of its code; empty without Python code
    is_async: bool
    takes_all: bool
    names: tuple[str, ...]  # arguments
    needed: tuple[str, ...]  # arguments without a default

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise ``CannotGoOn`` if a required argument is neither in ``GIVEN`` nor a column."""
        available = [name for name in columns if name not in _NO_COLUMNS]
        for needed in self.needed:
            if needed not in (*GIVEN, *available):
                beside = shown(", ".join(available), 300) or "there is none"
                raise _fault(
                    self.name,
                    f"needs '{needed}', which is neither an argument of all functions"
                    f" ({', '.join(GIVEN)}) nor a column beside the prompts ({beside}); rename it,"
                    " add the column to data.train, or give the argument a default",
                )

    def takes(self, name: str) -> bool:
        """Whether the function is passed an argument or a column of that name."""
        return self.takes_all or name in self.names


class RewardFunction:
    """A user's function with its signature."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Raise ``CannotGoOn`` if the function cannot be called by keyword with completions."""
        self._function = function
        self._file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        self.signature = _signature(name, function)
        if not (self.signature.takes_all or _SAMPLED & {*self.signature.names}):
            what = "takes neither completions nor completion_ids, and would see nothing of what was"
            raise _fault(name, f"{what} sampled; {_CALL}")

    def __call__(self, completions: Completions, state: TrainerState) -> Result:
        """Call a plain function on one or more completions; its errors become ``CannotGoOn``."""
        arguments, result = self._arguments(completions, state)
        with self._faults():
            values = _as_list(self._function(**arguments))
        return self._checked(values, completions, result)

    async def later(self, completions: Completions, state: TrainerState) -> Result:
        """Call an asynchronous function on one or more completions."""
        arguments, result = self._arguments(completions, state)
        with self._faults():
            values = _as_list(await self._function(**arguments))
        return self._checked(values, completions, result)

    def _arguments(
        self, completions: Completions, state: TrainerState
    ) -> tuple[dict[str, Any], Result]:
        """Arguments for the function, lists copied, and the result that its logging writes to."""
        result = Result(np.zeros(len(completions)))

        def log_extra(column: str, values: Iterable[Any]) -> None:
            kept = [json_value(value) for value in values]
            if len(kept) != len(completions):
                raise ValueError(
                    f"log_extra was given {len(kept)} values of '{column}' for"
                    f" {len(completions)} completions"
                )
            result.extra[str(column)] = kept

        def log_metric(name: str, value: float) -> None:
            result.metrics.setdefault(str(name), []).append(float(value))

        columns = completions.columns.items()
        arguments = {
            **{name: column for name, column in columns if name not in _NO_COLUMNS},
            "prompts": completions.prompts,
            "completions": completions.completions,
            "completion_ids": completions.completion_ids,
            "trainer_state": state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        taken = {name: value for name, value in arguments.items() if self.signature.takes(name)}
        return {k: [*v] if isinstance(v, list) else v for k, v in taken.items()}, result

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except CannotGoOn:  # of a server
            raise
        except BaseException as error:  # also SystemExit
            what = f"{_message(error)} ({_place_of(error, self._file)})"
            raise _fault(self.signature.name, what, error) from error

    def _checked(self, values: Any, completions: Completions, result: Result) -> Result:
        """Check a function's return value and store it in the result."""
        if not isinstance(values, list):
            raise self._wrong_result(f"{shown(type(values).__name__)}, not a list")
        if len(values) != len(completions):
            raise self._wrong_result(f"{len(values)} rewards for {len(completions)} completions")
        result.rewards[:] = [_number(value) for value in values]
        applies = np.array([value is not None for value in values])
        wrong = np.flatnonzero(applies & ~(np.abs(result.rewards) <= LARGEST_FP32))  # NaN, too
        for index in wrong[:1].tolist():
            prompt, completion = completions.prompts[index], completions.completions[index]
            raise self._wrong_result(
                f"{short(values[index])} for completion {index} (prompt {short(prompt)},"
                f" completion {short(completion)})"
            )
        return result

    def _wrong_result(self, what: str) -> CannotGoOn:
        place = f" ({self.signature.place})" if self.signature.place else ""
        return _fault(self.signature.name, f"returned {what}; {_CURE}{place}")


def load_reward_function(name: str, timeout: float | None = None) -> RewardFunction:
    """Import a reward function by its ``name``, or one that asks the server of that address.

    ``timeout``: of a call, in seconds, which limits a server's requests; None: no limit. CannotGoOn
    as ``import_function``.
    """
    function = HttpReward(name, timeout) if is_url(name) else import_function(name)
    return RewardFunction(name, function)


def import_function(name: str, key: str = _KEY) -> Callable[..., Any]:
    """Import the function that a config key names as module:function.

    The current folder is added to the end of ``sys.path`` if it is not in it.

    Raises:
        CannotGoOn: if the module or attribute does not exist, the import fails, or the attribute
            is not callable.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise _fault(name, f"no module:function; {_FORM}", key=key)
    function: Any = _import(name, module_name, key)
    for part in path.split("."):
        if not hasattr(function, part):
            place = getattr(function, "__file__", None) or module_name
            raise _fault(name, f"no '{shown(part)}' in {place}; {_FORM}", key=key)
        function = getattr(function, part)
    if not callable(function):
        raise _fault(name, f"is {type(function).__name__}, not a function; {_FORM}", key=key)
    return function


def call_functions(
    functions: Sequence[RewardFunction],
    completions: Completions,
    state: TrainerState,
    loop: asyncio.AbstractEventLoop,
) -> Iterator[tuple[int, Result]]:
    """Call every function; yield its number and result as soon as it is done.

    Asynchronous functions run concurrently in ``loop``, after the others. Use one loop for the
    whole job: objects that a function keeps between calls (a client's connections) belong to it.
    """
    for number, function in enumerate(functions):
        if not function.signature.is_async:
            yield number, function(completions, state)
    tasks = {
        loop.create_task(function.later(completions, state)): number
        for number, function in enumerate(functions)
        if function.signature.is_async
    }
    try:
        while tasks:
            first = asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in loop.run_until_complete(first)[0]:
                yield tasks.pop(task), task.result()
    finally:  # if one failed, cancel the others
        for task in tasks:
            task.cancel()
        loop.run_until_complete(_ended(tasks))


async def _ended(tasks: Iterable[asyncio.Task[Result]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def short(value: object) -> str:
    """Text of a value for a line with several values."""
    return shown(repr(value) if isinstance(value, str) else value, _SHORT)


def json_value(value: Any) -> Any:
    """Convert a value to JSON types; to its text if that is impossible."""
    if hasattr(value, "tolist"):  # an array
        value = value.tolist()
    try:  # round trip: instances of users' classes must not reach the rank
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)


def _signature(name: str, function: Callable[..., Any]) -> Signature:
    """Read a function's signature; ``CannotGoOn`` if a required argument is positional-only."""
    plain = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # some built-ins have no signature
        parameters = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise _fault(name, f"takes '{p.name}' by place only; {_CALL}")
    named = [p for p in parameters if p.kind in _BY_NAME]
    code = getattr(inspect.unwrap(plain), "__code__", getattr(plain.__call__, "__code__", None))
    return Signature(
        name,
        short_name=str(getattr(plain, "__name__", type(plain).__name__)),
        place="" if code is None or is_url(name) else f"{code.co_filename}:{code.co_firstlineno}",
        is_async=any(map(inspect.iscoroutinefunction, (plain, plain.__call__))),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
        names=tuple(p.name for p in named),
        needed=tuple(p.name for p in named if p.default is p.empty),
    )


def _import(name: str, module_name: str, key: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except BaseException as error:  # also SystemExit
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module or one of its parent packages is missing, not one of its imports.
        if f"{module_name}.".startswith(f"{missing}."):
            what = f"no module '{shown(missing)}' installed or in {os.getcwd()}; {_FORM}"
            raise _fault(name, what, key=key) from None
        what = f"{shown(module_name)} cannot be imported: {_message(error)} ({_place_of(error)})"
        raise _fault(name, what, error, key) from error


def _fault(name: str, what: str, error: BaseException | None = None, key: str = _KEY) -> CannotGoOn:
    """Error for function ``name``; ``error`` is the exception of its code, if any."""
    trace = [] if error is None else traceback.format_exception(error)
    key = "reward.url" if key == _KEY and is_url(name) else key
    return CannotGoOn(f"{key}={shown(name)}: {what}", "".join(trace))


def raised_fault(name: str, error: BaseException, key: str) -> CannotGoOn:
    """Error for a function that has raised: its line names the place in the user's code."""
    return _fault(name, f"raised {_message(error)} ({_place_of(error)})", error, key)


def _message(error: BaseException) -> str:
    """Line with an exception's type and text."""
    return shown(f"{type(error).__name__}: {error}")


def _place_of(error: BaseException, file: str | None = None) -> str:
    """``file:line`` of an error's innermost frame in ``file``, else in user code, else of all."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    in_file = [frame for frame in frames if frame.filename == file]
    users = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    frame = (in_file or users or frames)[0]
    return f"{frame.filename}:{frame.lineno}"


def _as_list(result: Any) -> Any:
    """Convert an ordered iterable to a list; return other results unchanged."""
    values = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        return result
    return [*values]


def _number(value: Any) -> float:
    """Convert a value to float; NaN if it is not a real number."""
    try:
        return float(value) if hasattr(value, "__float__") else math.nan
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return math.nan
