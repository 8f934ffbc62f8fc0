"""CUDA graphs of decode steps, which are padded to a few sizes so that graphs are reused.

A step launched kernel by kernel takes as long as its launches; a graph of it is one launch. A graph
reads and writes the addresses of its capture, so a step's inputs and outputs are in fixed tensors
(``DecodeState``, the cache). Nothing in a graph's memory pool outlives a step, so all graphs share
one pool.

Under tensor parallelism a graph holds its step's NCCL collectives: NCCL asks that all ranks of a
tensor group capture and replay the same steps in the same order. They do, since they decide by the
same requests and outcomes. NCCL also destroys no communicator as long as a graph holds a collective
of it: graphs end with their generation (the tests assert it).
"""

from collections.abc import Callable, Hashable

import torch
from megatron.core.parallel_state import get_global_memory_buffer

from puzzle_align.runtime.liveness.activity import waiting

_SMALLEST_LENGTH = 128


class StepGraphs:
    """Graphs of steps that have run more than once, by key."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._pool = None
        self._buffers: set[torch.Tensor] = set()

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """Run the step: the first time eagerly, which loads its kernels, then as a graph.

        Args:
            key: the same for steps that do the same work on the same tensors.
            step: uses fixed tensors, and never waits for the device.

        RuntimeError, with the cure, if the step cannot be captured.
        """
        if key not in self._graphs:
            step()
            self._graphs[key] = None
            return
        graph = self._graphs[key]
        if graph is None:
            self._wait()  # outside of the try: an earlier kernel's error is not the capture's
            try:
                graph = self._graphs[key] = self._captured(step)
            except RuntimeError as error:  # includes CUDA's errors, out-of-memory too
                # A failed step also fails the end of its capture: report the first error.
                first = error.__context__ or error
                reason, *_ = str(first).splitlines() or [type(first).__name__]
                cure = "set generation.enforce_eager=true"
                raise RuntimeError(f"no CUDA graph of a decode step: {cure} ({reason})") from error
            # Megatron gathers rows of sequence parallelism in a buffer, and takes a larger one for
            # a longer row. A graph goes on using the old one, whose memory must stay its own.
            self._buffers.update(get_global_memory_buffer().buffer.values())
        graph.replay()

    def _wait(self) -> None:
        """Wait for all launched work, as each capture does.

        It may be a wait for other ranks' ends of transfers, which the watch does not see, since
        they are not in the default stream.
        """
        with waiting():
            torch.cuda.synchronize()

    def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads meanwhile (such as NCCL's watchdog) stay out of the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph


def graph_batch_size(num_sequences: int, capacity: int) -> int:
    """Padded number of sequences of a batch: a power of two, or the slot group's capacity."""
    return min(1 << (num_sequences - 1).bit_length(), capacity)


def graph_length(length: int, longest: int) -> int:
    """Padded cache length of a step: the next of 128, 192, 256, 384, ..., at most ``longest``."""
    power = max(_SMALLEST_LENGTH, 1 << (length - 1).bit_length())
    shorter = power // 4 * 3
    return min(shorter if _SMALLEST_LENGTH < length <= shorter else power, longest)
