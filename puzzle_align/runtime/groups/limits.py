"""Machine limits that process groups need raised: open files, and CUDA's queues.

On every rank a host group (gloo) keeps a socket to each of its ranks, and a few more, so a job of
many ranks soon exceeds the usual soft limit of 1,024 open files.

CUDA streams that share one of a device's hardware queues run in the order of their issue: a receive
that waits for its sender blocks the computations behind it, forever if the sender waits for these.
CUDA reads the number of queues from the environment when it starts. Megatron-LM and its derivatives
let users set one queue, so a job may inherit that.
"""

import logging
import os
import resource
import sys
from collections.abc import Iterable

from puzzle_align.runtime.liveness.failure import rank

MOST_QUEUES = 32  # the most that CUDA allows
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULTS = {
    _QUEUES: str(MOST_QUEUES),
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    "NCCL_GRAPH_REGISTER": "0",
}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's name, and its older one
_BESIDE = 32  # files for libraries, logs, data, pipes
_OF_A_GROUP = 3  # files of a group, in addition to a socket for each rank

_logger = logging.getLogger(__name__)


def files_needed(world_size: int, near: int, group_sizes: Iterable[int] = ()) -> int:
    """Estimate how many files a rank has open.

    All ranks form two groups: torch's default, and ``collectives.patient_group``.

    Args:
        near: ranks on this machine, each of which watches the others (``liveness.watch``).
        group_sizes: sizes of the host groups that the rank joins for its models.
    """
    sizes = [world_size, world_size, *group_sizes]
    return _BESIDE + near + sum(size + _OF_A_GROUP for size in sizes)


def allow_open_files(needed: int) -> None:
    """Raise this process's limit of open files as far as the system allows.

    ValueError, one line, if the result is below ``needed``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"this job has about {needed} files open on a rank, but the limit is {hard}: raise the "
            "hard limit (ulimit -Hn; docker run --ulimit nofile=...; LimitNOFILE= of slurmd)"
        )
    if soft != resource.RLIM_INFINITY and soft < max(needed, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_cuda_defaults() -> None:
    """Set CUDA's environment variables where unset: as early as possible, before CUDA starts.

    - The most queues possible.
    - Memory segments that grow, to avoid gaps between allocations of different sizes.
    - No TF32 in fp32 products: Transformer Engine uses it regardless of torch's settings.
    - cuDNN last among torch's attention backends. On Hopper it would come first, and it plans every
      new shape for 0.05 to 1 s: most examples and decoding steps have a shape of their own.
    - No registration by NCCL of what CUDA graphs hold: it fails on segments that grow.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


def check_started() -> None:
    """Raise ValueError if CUDA has started without the defaults: it is too late to set them."""
    torch = sys.modules.get("torch")
    if _QUEUES not in os.environ and torch is not None and torch.cuda.is_initialized():
        raise ValueError(
            f"CUDA has started without {_QUEUES}={MOST_QUEUES}, so that transfers hold up "
            "computations: set it before anything uses the GPU, or start with launch/*.py"
        )


def check_queues(num_streams: int) -> None:
    """Raise a one-line ValueError if a device has fewer queues than a rank's streams need.

    Only warn if they need more than CUDA allows: some streams then delay each other, but none
    forever, since no transfer waits for later work of its rank (``schedules.validate``). Rank 0
    warns, and all ranks raise the same error.

    Args:
        num_streams: the count from ``layout.groups.num_streams``.
    """
    if num_streams > MOST_QUEUES and rank() == 0:
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
            "and those that share a hardware queue hold each other up, maybe forever: unset it, "
            f"or set {MOST_QUEUES} (Megatron-LM's advice of 1 is for jobs of one model)"
        )
