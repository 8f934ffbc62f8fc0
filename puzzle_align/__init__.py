"""puzzle_align: a Megatron-style runtime that aligns large language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from puzzle_align.api import generate, load_config, train

__version__ = "0.1.0"
__all__ = ["generate", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """Import the API when it is first asked for: ``puzzle-align --help`` does without it."""
    if name not in __all__:
        raise AttributeError(f"module 'puzzle_align' has no attribute '{name}'")
    from puzzle_align import api

    return getattr(api, name)
