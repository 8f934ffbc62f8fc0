#!/usr/bin/env python3
"""Measure what a switch of plans adds to the optimizer's step that it runs beside. Prints JSON.

On two gloo ranks a random model takes AdamW steps under one plan and is moved to another, three
ways in turns: the step alone, the switch alone, and the switch beside the step (each round goes
when what it sends is updated). "added_over_switch" is the median over the repeats of

    (step with the switch beside it - step alone) / switch alone

On CPUs, transfers are the processors' work: they can go beside a step only where one is idle.

    python tools/bench_reshard_beside.py
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist  # noqa: TID251 - barriers around what is timed
from local_ranks import run_ranks

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.model import ModelOptions, ModelSpec, num_parameters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.hf_weights import RandomSource, load_weights
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import routing_table
from puzzle_align.runtime.context import Context, build_context, make_trainable
from puzzle_align.runtime.groups import World, build_communicators
from puzzle_align.runtime.optimizer import Optimizer
from puzzle_align.runtime.reshard import reshard
from puzzle_align.runtime.reshard_beside import reshard_beside

SWITCHES = {
    "P2 to T2": ((ParallelPlan(pipeline=2), (0, 1)), (ParallelPlan(tensor=2), (0, 1))),
    "T2 to D2": ((ParallelPlan(tensor=2), (0, 1)), (ParallelPlan(data=2), (0, 1))),
    "rank 0 to rank 1": ((ParallelPlan(), (0,)), (ParallelPlan(), (1,))),
}
RATE = 1e-6


def measured(world: World, options: dict[str, Any]) -> list[dict[str, Any]]:
    """All switches in both precisions. Collective over the world."""
    model = _model(options["hidden"], options["layers"])
    return [
        _measure(model, name, dtype, world, options)
        for name in SWITCHES
        for dtype in ("fp32", "bf16")
    ]


def _model(hidden: int, num_layers: int) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
    }
    return from_hf_config(config, "")


def _measure(
    model: ModelSpec, name: str, dtype: str, world: World, options: dict[str, Any]
) -> dict[str, Any]:
    source, destination = (Holdings(model, *each) for each in SWITCHES[name])
    trained, copy = (
        _open(each, world, dtype, train=each is source) for each in (source, destination)
    )
    given, taken = (
        None if each is None else Shards(each.chunks, model) for each in (trained, copy)
    )
    optimizer = None if trained is None else _optimizer(trained)
    table = routing_table(source, destination, max_size=options["bucket"])
    schedule = rounds(table.routes, options["bucket"])
    how: dict[str, Any] = {"dtype": DTYPES[dtype], "device": world.device}

    def step() -> None:
        if optimizer is not None:
            optimizer.step(RATE)

    def switch() -> None:
        reshard(table, schedule, given, taken, **how)

    def both() -> None:
        def beside(update: Any) -> None:
            reshard_beside(table, schedule, given, taken, **how, update=update)

        if optimizer is not None:
            optimizer.step(RATE, beside)
        else:
            beside(lambda _: None)

    ways = {"step": step, "switch": switch, "both": both}
    seconds = _in_turns(ways, options["repeats"])
    added = [
        (both - step) / switch
        for both, step, switch in zip(
            seconds["both"], seconds["step"], seconds["switch"], strict=True
        )
    ]
    return {
        "switch": name,
        "dtype": dtype,
        "parameters": num_parameters(model),
        "rounds": len(schedule),
        "seconds": {way: statistics.median(taken) for way, taken in seconds.items()},
        "added_over_switch": statistics.median(added),
    }


def _in_turns(ways: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every way, from when all ranks begin to when the last is done."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats + 1):
        first = repeat % len(names)  # none is always the first
        for name in names[first:] + names[:first]:
            dist.barrier()
            started = time.perf_counter()
            ways[name]()
            dist.barrier()
            if repeat:  # the first makes connections and optimizer state
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _open(holdings: Holdings, world: World, dtype: str, *, train: bool) -> Context | None:
    communicators = build_communicators(holdings.plan, world, holdings.ranks, trained=train)
    if communicators is None:
        return None
    source = RandomSource(holdings.model, 0)
    return build_context(
        "actor",
        holdings.model,
        ModelOptions(dtype=dtype),
        holdings.plan,
        world,
        communicators=communicators,
        fill=lambda chunk: load_weights(chunk, holdings.model, source),
        seed=0,
    )


def _optimizer(context: Context) -> Optimizer:
    config = OptimizerConfig(lr=RATE)
    make_trainable(context, config)
    optimizer = Optimizer(context, config)
    optimizer.zero_grad()
    for chunk in context.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.normal_()
    return optimizer


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket", type=int, default=2**21, help="numbers a round (2097152)")
    parser.add_argument("--repeats", type=int, default=10, help="measured steps of each way (10)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    options = parse_arguments(arguments)
    json.dump(run_ranks(measured, 2, vars(options)), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
