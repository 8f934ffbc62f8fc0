"""What a command shows on stderr: this package's log, without libraries' idle warnings."""

import logging
import warnings

from puzzle_align.runtime.liveness.failure import rank

# (module, message): what Megatron-core says when it is imported or built, or makes torch say.
IDLE_WARNINGS = (
    (r"megatron\.core", r"(Transformer Engine and )?Apex (is|are) not installed"),
    (r"megatron\.core", r"full scope is deprecated"),
    (r"megatron\.core", r"When using .* CUDA_DEVICE_MAX_CONNECTIONS"),  # see groups.limits
    (r"megatron\.core", r"The \.grad attribute of a Tensor that is not a leaf"),
    (r"torch\.distributed", r"`torch\.distributed\.\w+` is deprecated"),
)


def quiet_libraries() -> None:
    """Pass over what libraries warn of and no user can act on; PYTHONWARNINGS comes first."""
    for module, message in IDLE_WARNINGS:
        warnings.filterwarnings("ignore", message, Warning, module, append=True)


def show_log() -> None:
    """This package's log on rank 0, other warnings on every rank, as plain lines on stderr."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("puzzle_align").setLevel(logging.INFO if rank() == 0 else logging.WARNING)
