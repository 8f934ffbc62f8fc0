"""Log of a command on stderr: this package's lines, without libraries' idle warnings."""

import logging
import warnings

from puzzle_align.runtime.liveness.failure import rank

# (module, message) of warnings by Megatron-core, or by torch for it, when it is imported or built.
IDLE_WARNINGS = (
    (r"megatron\.core", r"(Transformer Engine and )?Apex (is|are) not installed"),
    (r"megatron\.core", r"full scope is deprecated"),
    (r"megatron\.core", r"When using .* CUDA_DEVICE_MAX_CONNECTIONS"),  # see groups.limits
    (r"megatron\.core", r"The \.grad attribute of a Tensor that is not a leaf"),
    (r"torch\.distributed", r"`torch\.distributed\.\w+` is deprecated"),
)


def quiet_libraries() -> None:
    """Ignore libraries' warnings that no user can act on; PYTHONWARNINGS takes precedence."""
    for module, message in IDLE_WARNINGS:
        warnings.filterwarnings("ignore", message, Warning, module, append=True)


def show_log() -> None:
    """Show this package's log on rank 0, and other warnings on every rank, as lines on stderr."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("puzzle_align").setLevel(logging.INFO if rank() == 0 else logging.WARNING)
