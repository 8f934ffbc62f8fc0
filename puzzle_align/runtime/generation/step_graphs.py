"""CUDA graphs of decode steps, and the few sizes that steps are padded to so that they repeat.

A step that is launched kernel by kernel takes as long as its launches; a graph of it is one launch.
It reads and writes at the addresses that it was captured with, so whatever a step takes and gives
lies in tensors that stay (``DecodeState``, the cache): nothing inside of the graphs' own memory
outlives a step, which is why all of them share that memory.
"""

from collections.abc import Callable, Hashable

import torch

_SMALLEST_LENGTH = 128


class StepGraphs:
    """Graphs of the steps that have come more than once, by what tells steps apart."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._pool = None

    def run(self, key: Hashable, step: Callable[[], object]) -> None:
        """Run the step: as it is where it comes first, which readies its kernels, then as a graph.

        Args:
            key: the same for steps that do the same to the same tensors.
            step: works on tensors that stay, and waits for nothing.

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
            except RuntimeError as error:  # CUDA's errors are, and those of its memory
                first = error.__context__ or error  # where a step fails, its capture cannot end
                reason, *_ = str(first).splitlines() or [type(first).__name__]
                cure = "set generation.enforce_eager=true"
                raise RuntimeError(f"no CUDA graph of a decode step: {cure} ({reason})") from error
        graph.replay()

    def clear(self) -> None:
        """Forget all graphs: something that they use has moved."""
        self._graphs.clear()
        self._pool = None  # memory of graphs that are gone cannot be shared any more

    def _captured(self, step: Callable[[], object]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of CUDA meanwhile (NCCL's watchdog does) is none of the graph's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph


def graph_batch_size(num_sequences: int, capacity: int) -> int:
    """Sequences that a batch is padded to: a power of two, or all that a slot group can hold."""
    return min(1 << (num_sequences - 1).bit_length(), capacity)


def graph_length(length: int, longest: int) -> int:
    """Tokens a slot that a step reads: the next of 128, 192, 256, 384, ..., or ``longest``."""
    power = max(_SMALLEST_LENGTH, 1 << (length - 1).bit_length())
    shorter = power // 4 * 3
    return min(shorter if _SMALLEST_LENGTH < length <= shorter else power, longest)
