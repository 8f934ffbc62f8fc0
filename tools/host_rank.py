"""Server of one rank's commands, for ``bench_hosts``: a fork of it has imported everything.

It reads a line of JSON for each command: its arguments, its environment, and the file of its
output; it writes the command's exit code. ``python tools/host_rank.py GFLOPS``: a process sleeps
for every matrix product, as long as a device of that speed would compute, and the product is 0; a
copy of a weight between two plans' memory takes as long as in that device's. So ranks do not
compete for processors and for this machine's memory, and do not wait for each other's shares.
"""

import importlib
import json
import os
import pkgutil
import sys
import time
from typing import Any

import torch
from torch import Tensor

import puzzle_align
from puzzle_align.cli.main import main, process
from puzzle_align.layout.rules import Box
from puzzle_align.models.shards import Shards
from puzzle_align.runtime.profiler import links

_FLOPS_A_BYTE = 20  # of the device's memory: products of few rows take the time of their weights
_BETWEEN_S = 0.003


def serve(gflops: float) -> None:
    """Run commands until the input ends."""
    torch.set_num_threads(1)
    # A product of some 3 ms between two messages, as where ranks compute.
    links._BETWEEN = round((_BETWEEN_S * gflops * 1e9 / 2) ** (1 / 3))
    library = torch.library.Library("aten", "IMPL")  # its products, while this lives

    def product(left: Tensor, right: Tensor) -> Tensor:
        rows, columns = left.shape[0], right.shape[1]
        elements = left.numel() + right.numel() + rows * columns
        flops = max(2 * left.numel() * columns, _FLOPS_A_BYTE * 4 * elements)
        time.sleep(flops / gflops / 1e9)
        return left.new_zeros(rows, columns)

    library.impl("mm", product, "CPU")
    _slow_down_copies(gflops)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _slow_down_copies(gflops: float) -> None:
    """Let a copy of weights within this rank take the time of the device's memory."""
    copy_from, read = Shards.copy_from, Shards.read
    copied = 0  # numbers

    def counted_read(self: Shards, tensor: str, box: Box, into: Tensor) -> None:
        nonlocal copied
        copied += into.numel()
        read(self, tensor, box, into)

    def slow_copy(self: Shards, other: Shards, tensor: str, box: Box) -> None:
        before, begun = copied, time.perf_counter()
        copy_from(self, other, tensor, box)
        num_bytes = 2 * 4 * (copied - before)  # read and written
        ends = begun + _FLOPS_A_BYTE * num_bytes / gflops / 1e9
        time.sleep(max(0.0, ends - time.perf_counter()))

    Shards.read, Shards.copy_from = counted_read, slow_copy


def _run(command: dict[str, Any]) -> None:
    os.environ.update(command["environment"])
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    with process():
        main(command["arguments"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    for found in pkgutil.walk_packages(puzzle_align.__path__, "puzzle_align."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    serve(float(sys.argv[1]))
