#!/usr/bin/env python3
"""Whether computations go on beside transfers that wait, and print JSON.

A transfer that waits for its other end occupies a stream, and some of the device's processors, as a
kernel does that spins. Kernels that spin for --spin-ms stand in here for transfers, on streams of
their own; a matrix product is launched after them, on another. "stretch" is the product's time
beside them over its time alone; "held_up" says that it ended when they did, and no sooner.

    CUDA_DEVICE_MAX_CONNECTIONS=8 python tools/report_streams.py
"""

import argparse
import json
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

STREAMS, BLOCKS = (4, 12), (1, 8)  # transfers that wait, and blocks (CTAs) of each


class _Cuda:
    """Spinning kernels on streams."""

    def __init__(self, spin_ms: float) -> None:
        from report_spin import launch_spin

        self._launch, self._nanoseconds = launch_spin, int(spin_ms * 1e6)
        self._streams = [torch.cuda.Stream() for _ in range(max(STREAMS))]

    def start(self, num_streams: int, blocks: int) -> None:
        for stream in self._streams[:num_streams]:
            with torch.cuda.stream(stream):
                self._launch(blocks, self._nanoseconds)

    def compute(self, matrix: torch.Tensor) -> float:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - start

    def finish(self) -> None:
        torch.cuda.synchronize()


class _Cpu:
    """Sleeping threads: to try the report where there is no GPU, and no measurement of one."""

    def __init__(self, spin_ms: float) -> None:
        self._seconds = spin_ms / 1e3
        self._pool = ThreadPoolExecutor(max(STREAMS))
        self._waiting: list[Future[None]] = []

    def start(self, num_streams: int, _blocks: int) -> None:
        sleeping = (self._pool.submit(time.sleep, self._seconds) for _ in range(num_streams))
        self._waiting = list(sleeping)

    def compute(self, matrix: torch.Tensor) -> float:
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        return time.perf_counter() - start

    def finish(self) -> None:
        for one in self._waiting:
            one.result()


def measure(device: str, size: int, spin_ms: float) -> list[dict[str, Any]]:
    """Every number of streams with every number of blocks."""
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16)
    machine = _Cuda(spin_ms) if device == "cuda" else _Cpu(spin_ms)
    machine.start(1, 1)  # compiles
    machine.finish()
    machine.compute(matrix)
    alone = min(machine.compute(matrix) for _ in range(3))
    found = []
    for num_streams in STREAMS:
        for blocks in BLOCKS:
            machine.start(num_streams, blocks)
            beside = machine.compute(matrix)
            machine.finish()
            found.append(
                {
                    "streams": num_streams,
                    "blocks": num_streams * blocks,
                    "alone_ms": alone * 1e3,
                    "stretch": beside / alone,
                    "held_up": beside > 0.8 * spin_ms / 1e3 + alone,
                }
            )
    return found


def main() -> int:
    """Run the tool."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--matrix", type=int, default=4096, help="rows of the product (4096)")
    parser.add_argument("--spin-ms", type=float, default=50.0, help="of the waiting kernels (50)")
    options = parser.parse_args()
    print(json.dumps(measure(options.device, options.matrix, options.spin_ms)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
