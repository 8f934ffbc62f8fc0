"""How many files a process may have open: the sockets of its process groups are most of them.

A group on the host (gloo) keeps a socket to each of its ranks on every rank, and a few more; so a
job of many ranks is over the usual soft limit of 1,024 soon.
"""

import resource
from collections.abc import Iterable

_BESIDE = 32  # libraries, logs, data, pipes
_OF_A_GROUP = 3  # beside a socket a rank


def files_needed(world_size: int, near: int, group_sizes: Iterable[int] = ()) -> int:
    """Open files of a rank, about.

    All ranks are a group twice: one is torch's own, the other waits longer (``runtime.reduce``).

    Args:
        near: ranks on this machine, each of which the others watch (``runtime.watch``).
        group_sizes: ranks of the groups on the host that it joins for its models.
    """
    sizes = [world_size, world_size, *group_sizes]
    return _BESIDE + near + sum(size + _OF_A_GROUP for size in sizes)


def allow_open_files(needed: int) -> None:
    """Raise this process's limit to where it may be raised to.

    Raises:
        ValueError: one line, if that is below ``needed``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"this job has about {needed} files open on a rank, and may have {hard}: raise the "
            "hard limit (ulimit -Hn; docker run --ulimit nofile=...; LimitNOFILE= of slurmd)"
        )
    if soft != resource.RLIM_INFINITY and soft < max(needed, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
