#!/usr/bin/env python3
"""Measure what verifying a checkpoint adds to loading it. Prints JSON.

Gloo ranks save a random model with its optimizer's state, and load it with its files verified and
not, in turns: "warm" from the page cache, "cold" once the files were dropped from it (where the
file system does that). "verified_over_unverified" is the median of the turns' ratios, of seconds
and of rank 0's processor time.

    python tools/bench_checkpoint.py --ranks 1 --folder /a/disk
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist  # noqa: TID251 - barriers around what is timed
from bench_run import parser_of, run_ranks, show
from reshard_cases import llama, random_part

from puzzle_align.config.saved import Saved, open_checkpoint
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import num_parameters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.checkpoint.models import Trained, load_checkpoint, save_checkpoint
from puzzle_align.runtime.context import make_trainable
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.optimizer import Optimizer


def measured(world: World, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every way to load. Collective over the world."""
    hidden = options["hidden"]
    spec = llama(hidden, 4 * hidden, options["layers"], hidden // 64, vocabulary=32000)
    context = random_part(
        Holdings(spec, ParallelPlan(tensor=world.size), tuple(range(world.size))),
        world,
        "bf16",
        train=True,
    )
    assert context is not None
    config = OptimizerConfig(use_distributed_optimizer=True)
    make_trainable(context, config)
    models = {"actor": Trained(context, Optimizer(context, config))}
    started = time.perf_counter()
    path = save_checkpoint(Path(folder), 1, {}, models)
    saved, save_s = open_checkpoint(path), time.perf_counter() - started
    seconds: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(options["repeats"] + 1):
        for heat in ("warm", "cold"):
            for verify in (True, False) if repeat % 2 else (False, True):
                taken = _load(saved, models, verify, is_cold=heat == "cold")
                if repeat:  # the first makes optimizer state
                    seconds.setdefault(f"{heat}_{verify}", []).append(taken)
    return {
        "ranks": world.size,
        "parameters": num_parameters(spec),
        "gigabytes": sum(file.stat().st_size for file in path.iterdir()) / 1e9,
        "save_seconds": save_s,
        **{heat: _compared(seconds, heat) for heat in ("warm", "cold")},
    }


def _compared(seconds: dict[str, list[tuple[float, float]]], heat: str) -> dict[str, Any]:
    found = {}
    for number, kind in enumerate(("seconds", "processor_seconds")):
        verified, unverified = (
            [turn[number] for turn in seconds[f"{heat}_{verify}"]] for verify in (True, False)
        )
        ratios = [ours / theirs for ours, theirs in zip(verified, unverified, strict=True)]
        found[kind] = {
            "verified": statistics.median(verified),
            "unverified": statistics.median(unverified),
            "verified_over_unverified": statistics.median(ratios),
        }
    return found


def _load(
    saved: Saved, models: dict[str, Trained], verify: bool, is_cold: bool
) -> tuple[float, float]:
    """Seconds from when all ranks begin to when the last is done; and of this one's processors."""
    if is_cold:
        for file in saved.path.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()
    started, used = time.perf_counter(), time.process_time()
    load_checkpoint(saved, models, verify=verify)
    used = time.process_time() - used
    dist.barrier()
    return time.perf_counter() - started, used


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (1024)")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5, help="measured loads of each way (5)")
    parser.add_argument("--folder", help="where the checkpoint is written (the temporary one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        show(run_ranks(measured, options.ranks, folder, vars(options)))


if __name__ == "__main__":
    main()
