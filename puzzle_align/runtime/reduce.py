"""Small values that every rank of the job must agree on."""

import datetime
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from puzzle_align.runtime.progress import unhurried, waiting
from puzzle_align.runtime.watch import current, unwatch

T = TypeVar("T")
_PATIENCE = datetime.timedelta(days=1)
_SIGN_OF_LIFE_S = 1.0  # well below any time-out of the process group


def sum_over_world(values: torch.Tensor) -> torch.Tensor:
    """``values`` (any shape, the same on all ranks) summed over all ranks, in place."""
    dist.all_reduce(values)
    return values


def sum_on_host(values: torch.Tensor) -> torch.Tensor:
    """``values`` (on the host; of one shape on all ranks) summed over all ranks, in place.

    Ranks may come to it a whole training step apart (``patient_group``).
    """
    dist.all_reduce(values, group=patient_group())
    return values


def wait_for_all(device: torch.device) -> None:
    """Wait until all ranks are here and done with what they launched. Collective over the world.

    Ranks may come to it a whole training step apart (``patient_group``).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    sum_on_host(torch.zeros(1))


@cache
def patient_group() -> dist.ProcessGroup:
    """All ranks, on the host, with a time-out that no step reaches. Collective at first.

    Ranks may come to what it does a whole training step apart: that is no sign of a failure, which
    ``runtime.watch`` notices.
    """
    with waiting():
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    return group


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def from_rank_zero(make: Callable[[], T]) -> T:
    """What ``make`` returns on rank 0, on every rank; what it raises there is raised everywhere.

    ``make`` may take longer than the process group's time-out: it runs in a thread, while rank 0
    tells the waiting ranks every second that it is at work.
    """
    answer = _start(make) if dist.get_rank() == 0 else None
    box: list[Any] = [False, None, None]  # whether it is there, the value, the error
    while not box[0]:
        if answer is not None and wait([answer], _SIGN_OF_LIFE_S).done:
            box = _outcome(answer)
        dist.broadcast_object_list(box, src=0)
    if box[2] is not None:
        raise box[2]
    return box[1]


def on_other_nodes(make: Callable[[], T]) -> list[T]:
    """What ``make`` returns on the first rank of every node but rank 0's, on every rank.

    It is for what nodes have on disks of their own, once rank 0 has done as much; it may take as
    long as it likes. What is raised on one of them is a ValueError everywhere, with the node.
    """
    box = None  # the value, or what is wrong
    if dist.get_rank() and os.environ["LOCAL_RANK"] == "0":
        with unhurried():
            try:
                box = (make(), None)
            except (OSError, ValueError) as error:
                box = (None, f"on node {platform.node()}: {error}")
    boxes: list[Any] = [None] * dist.get_world_size()
    with waiting():
        dist.all_gather_object(boxes, box, group=patient_group())
    answers = [box for box in boxes if box is not None]
    for _, wrong in answers:
        if wrong is not None:
            raise ValueError(wrong)
    return [value for value, _ in answers]


def _start(make: Callable[[], T]) -> Future[T]:
    """Run ``make`` in a thread that does not outlive the process."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(make())
        except BaseException as error:  # noqa: BLE001 - the failure is the answer
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def _outcome(answer: Future[Any]) -> list[Any]:
    try:
        return [True, answer.result(), None]
    except (OSError, ValueError) as error:
        return [True, None, error]


def shutdown_distributed() -> None:
    """End this process's part in the job. Where ranks watch one another, collective: all do so
    until the last one is done.
    """
    if current() is not None:
        sum_on_host(torch.zeros(1))
    unwatch()
    dist.destroy_process_group()
    patient_group.cache_clear()
