"""CUDA graphs of decode steps, which are padded to a few sizes so that graphs are reused.

A step that is launched kernel by kernel takes as long as its launches; a graph of it is one launch.
It reads and writes at the addresses of its capture, so a step's inputs and outputs are in fixed
tensors (``DecodeState``, the cache). Nothing in the graphs' own memory outlives a step, so all
graphs share that memory.
"""

from collections.abc import Callable, Hashable

import torch

_SMALLEST_LENGTH = 128


class StepGraphs:
    """Graphs of steps that have run more than once, by key."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._pool = None

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """Run the step: the first time eagerly, which loads its kernels, then as a graph.

        Args:
            key: the same for steps that do the same work on the same tensors.
            step: uses fixed tensors, and never waits.

        Raises:
            RuntimeError: with the cure, if the step cannot be captured.
        """
        if key not in self._graphs:
            step()
            self._graphs[key] = None
            return
        graph = self._graphs[key]
        if graph is None:
            try:
                graph = self._graphs[key] = self._captured(step)
            except RuntimeError as error:  # as CUDA's errors are, out-of-memory too
                first = (
                    error.__context__ or error
                )  # a failed step also fails the end of its capture
                reason, *_ = str(first).splitlines() or [type(first).__name__]
                cure = "set generation.enforce_eager=true"
                raise RuntimeError(f"no CUDA graph of a decode step: {cure} ({reason})") from error
        graph.replay()

    def clear(self) -> None:
        """Drop all graphs: a tensor that they use has moved."""
        self._graphs.clear()
        self._pool = None  # memory of dropped graphs cannot be shared any more

    def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads meanwhile (as of NCCL's watchdog) do not belong to the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph


def graph_batch_size(num_sequences: int, capacity: int) -> int:
    """Padded number of a batch's sequences: a power of two, or a slot group's capacity."""
    return min(1 << (num_sequences - 1).bit_length(), capacity)


def graph_length(length: int, longest: int) -> int:
    """Tokens of a slot that a step reads: the next of 128, 192, 256, 384, ..., or ``longest``."""
    power = max(_SMALLEST_LENGTH, 1 << (length - 1).bit_length())
    shorter = power // 4 * 3
    return min(shorter if _SMALLEST_LENGTH < length <= shorter else power, longest)
