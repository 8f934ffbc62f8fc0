"""A switch of plans beside the step of the optimizer whose weights it moves (PUZZLE, 5.2).

Weights are on their way as soon as they are updated: the step is taken in parts, one for each round
of the table, and a round goes on a second stream (CUDA), or in a thread (CPU), while the next part
is updated.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue

import torch
import torch.distributed as dist

from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import Message
from puzzle_align.resharding.routing import RoutingTable
from puzzle_align.runtime.partial_step import Update
from puzzle_align.runtime.reshard import keep, move


def reshard_beside(
    table: RoutingTable,
    schedule: Sequence[Sequence[Message]],
    source: Shards | None,
    destination: Shards | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    update: Update,
) -> None:
    """As ``reshard``, of weights that are updated only now. Ends when all have arrived.

    Args:
        update: brings some of the source's parameters up to date, where they are not yet; with
            None, all that are left. It must not communicate: the transfers have the default group.
    """
    rank = dist.get_rank()
    with _second_lane(device) as run:
        for messages in schedule:
            if source is not None:
                sent = [route for one in messages if one.source == rank for route in one.routes]
                update(source.parameters(route.tensor for route in sent if not route.relayed))
            run(lambda now=messages: move(now, source, destination, dtype=dtype, device=device))
        update(None)
        run(lambda: keep(table.kept, source, destination))


Run = Callable[[Callable[[], None]], None]


def _second_lane(device: torch.device) -> AbstractContextManager[Run]:
    """What does one thing after the other beside its user; leaving it waits for the last."""
    return _stream(device) if device.type == "cuda" else _thread()


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all switches: memory that was freed on a stream is used again on that one alone."""
    return torch.cuda.Stream(device)


@contextmanager
def _stream(device: torch.device) -> Iterator[Run]:
    first, second = torch.cuda.current_stream(device), _second_stream(device)

    def run(work: Callable[[], None]) -> None:
        second.wait_stream(first)  # for the part of the step that was taken last
        with torch.cuda.stream(second):
            work()

    yield run
    first.wait_stream(second)


@contextmanager
def _thread() -> Iterator[Run]:
    given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    errors: list[BaseException] = []
    ended = threading.Event()

    def work_off() -> None:
        try:
            while (work := given.get()) is not None and not ended.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised below, where somebody sees it
            errors.append(error)

    # A daemon: one that waits for a rank that has failed does not keep this one from ending.
    thread = threading.Thread(target=work_off, daemon=True)
    thread.start()
    try:
        yield given.put
    except BaseException:
        ended.set()  # what is left would be sent while this rank tells of its failure
        raise
    finally:
        given.put(None)
    thread.join()
    for error in errors:
        raise error
