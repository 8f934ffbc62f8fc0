"""What CUDA reads from the environment when it starts: set in time, and checked against the job.

Streams that share one of a device's hardware queues run in the order of their issue: a receive that
waits for its sender holds up the computations behind it, for ever where the sender waits for these.
Megatron-LM and what is built on it have its users set one queue, so a job may inherit that.
"""

import logging
import os
import sys

MOST_QUEUES = 32  # that there can be
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's name, and its older one

_logger = logging.getLogger(__name__)


def set_defaults() -> None:
    """Set what is not set yet: as early as can be, and before CUDA starts.

    As many queues as there can be; segments of memory that grow, where allocations of other sizes
    would leave gaps; fp32 that is not multiplied in TF32, as Transformer Engine does whatever
    torch's settings say.
    """
    os.environ.setdefault(_QUEUES, str(MOST_QUEUES))
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def check_started() -> None:
    """ValueError where the defaults are not set and would come too late, as CUDA is at work."""
    torch = sys.modules.get("torch")
    if _QUEUES not in os.environ and torch is not None and torch.cuda.is_initialized():
        raise ValueError(
            f"CUDA has started without {_QUEUES}={MOST_QUEUES}, so that transfers hold up "
            "computations: set it before anything uses the GPU, or start with launch/*.py"
        )


def check_queues(num_streams: int) -> None:
    """ValueError, one line, where a device has fewer queues than a rank's streams need.

    Where they need more than there can be, a warning: some hold each other up for a time, none for
    ever, since no transfer waits for its own rank's later work (``schedules.validate``).

    Args:
        num_streams: of ``layout.groups.num_streams``.
    """
    if num_streams > MOST_QUEUES:
        _logger.warning(
            "a rank of this job has %d streams at work, and a GPU %d hardware queues: streams that "
            "share one wait for each other; fewer models or pipeline ranks need fewer",
            num_streams,
            MOST_QUEUES,
        )
    needed, text = min(num_streams, MOST_QUEUES), os.environ.get(_QUEUES, "")
    if not text.isdecimal() or int(text) < needed:
        raise ValueError(
            f"{_QUEUES}={text or 'unset'}: a rank of this job has {num_streams} streams at work, "
            "and those that share a hardware queue hold each other up, maybe for ever: unset it, "
            f"or set {MOST_QUEUES} (Megatron-LM's advice of 1 is for jobs of one model)"
        )
