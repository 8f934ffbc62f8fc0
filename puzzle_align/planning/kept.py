"""Results of methods that an object keeps for when they are asked for again.

``functools.cache`` of a bound method would hold the object that holds it: a cycle, which is there
until garbage is looked for, and a search leaves a hundred thousand results behind.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = object()


def kept(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """The method, run once for each of its arguments, which are hashable and given by position."""
    name = f"_kept_by_{method.__name__}"

    @wraps(method)
    def asked(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "arguments are kept by their position"
        known: dict[tuple, Any] = self.__dict__.setdefault(name, {})
        found = known.get(args, _NOTHING)  # not ``in``: to hash a plan takes its time
        if found is _NOTHING:
            found = known[args] = method(self, *args, **kwargs)
        return found

    return asked
