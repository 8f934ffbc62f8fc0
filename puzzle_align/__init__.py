"""puzzle_align: a Megatron-style runtime that aligns large language models."""

import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from puzzle_align.api import generate, load_config, train

__version__ = "0.1.0"
__all__ = ["generate", "load_config", "train"]

# (module, message) of warnings that no user can act on, by Megatron-core, or by torch for it, when
# it is imported or built. They go last: the user's own filters, and PYTHONWARNINGS, come first.
for _module, _message in (
    (r"megatron\.core", r"(Transformer Engine and )?Apex (is|are) not installed"),
    (r"megatron\.core", r"full scope is deprecated"),
    (r"megatron\.core", r"MimoModelConfig is experimental"),
    (r"megatron\.core", r"When using .* CUDA_DEVICE_MAX_CONNECTIONS"),  # see groups.limits
    (r"megatron\.core", r"The \.grad attribute of a Tensor that is not a leaf"),
    (r"megatron\.core", r"If you are using transformer_engine"),  # whose core attention is ours
    (r"megatron\.core", r"TypedStorage is deprecated"),
    (r".*megatron.core", r"invalid escape sequence"),  # when it is compiled: the module is a path
    (r"torch\.distributed", r"`torch\.distributed\.\w+` is deprecated"),
):
    warnings.filterwarnings("ignore", _message, Warning, _module, append=True)
# Loggers of notes that no user can act on.
for _name in (
    "torch.distributed.elastic.multiprocessing.redirects",  # macOS has none
    "torch.utils.cpp_extension",  # CUDA's compiler is there, and no GPU
    "megatron.core.distributed.distributed_data_parallel",  # it lays out its buffers by itself
):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import the API when it is first asked for: ``puzzle-align --help`` does without it."""
    if name not in __all__:
        raise AttributeError(f"module 'puzzle_align' has no attribute '{name}'")
    from puzzle_align import api

    return getattr(api, name)
