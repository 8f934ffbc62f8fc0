"""Transformer Engine's import: where it fails, the package counts as not installed.

Megatron-core imports Transformer Engine in many modules, some of which catch no error but
ModuleNotFoundError. On a host without CUDA's driver or libraries the import raises OSError or
RuntimeError, for a package whose parts do not fit one another AssertionError or AttributeError.
These would end every command there, CPU jobs included.
"""

import importlib
import sys
from functools import cache
from typing import Any, cast

_NAME = "transformer_engine"
_MODULES = (_NAME, f"{_NAME}_torch")  # the package, and its extension for torch


@cache
def import_error() -> Exception | None:
    """Try once to import Transformer Engine; return the error, or None.

    After an error all other imports of it raise ModuleNotFoundError.
    """
    try:
        importlib.import_module(f"{_NAME}.pytorch")
    except Exception as error:  # noqa: BLE001 whatever it is, Transformer Engine cannot be used
        for name in [*sys.modules]:
            if name.partition(".")[0] in _MODULES:
                del sys.modules[name]
        cast(dict[str, Any], sys.modules)[_NAME] = None
        return error
    return None


def is_absent(error: Exception) -> bool:
    """Whether the error is that Transformer Engine is not installed."""
    return isinstance(error, ModuleNotFoundError) and error.name == _NAME
