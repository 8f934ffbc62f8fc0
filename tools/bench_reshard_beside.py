#!/usr/bin/env python3
"""Measure what a switch of plans adds to the optimizer's step that it runs beside. Prints JSON.

On gloo ranks a random model takes AdamW steps under one plan and is moved to another, three ways in
turns: the step alone, the switch alone, and the switch beside the step (each round goes when what
it sends is updated). "added_over_switch" is the median over the repeats of

    (step with the switch beside it - step alone) / switch alone

and "step_over_switch" that of step alone / switch alone: below 1 there is more to send than a step
can hide. Where a case is "sharded" the optimizer is distributed, and weights go from its shards.
What its ranks gather in the step is not sent to them: there is a third rank to send to.

On CPUs, transfers are the processors' work: they can go beside a step only where one is idle.

    python tools/bench_reshard_beside.py
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

from bench_run import parser_of, run_ranks, show
from reshard_cases import in_turns, llama, random_part

from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.main_weights import MainWeightHoldings
from puzzle_align.layout.model import Dtype, ModelSpec, num_parameters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.megatron_config import DTYPES
from puzzle_align.models.shards import Shards
from puzzle_align.resharding.rounds import rounds
from puzzle_align.resharding.routing import routing_table
from puzzle_align.runtime.context import Context, make_trainable
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.optimizer.main_shards import MainShards
from puzzle_align.runtime.optimizer.optimizer import Optimizer, Update
from puzzle_align.runtime.reshard import Endpoints, keep, reshard, reshard_beside


@dataclass(frozen=True)
class Switch:
    """A change of plan, each plan on its ranks; ``sharded``: with the distributed optimizer."""

    name: str
    before: tuple[ParallelPlan, tuple[int, ...]]
    after: tuple[ParallelPlan, tuple[int, ...]]
    sharded: bool = False


P2, D2, T2 = ParallelPlan(pipeline=2), ParallelPlan(data=2), ParallelPlan(tensor=2)
SWITCHES = {  # by number of ranks
    2: (
        Switch("P2 to T2", (P2, (0, 1)), (T2, (0, 1))),
        Switch("T2 to D2", (T2, (0, 1)), (D2, (0, 1))),
        Switch("rank 0 to rank 1", (ParallelPlan(), (0,)), (ParallelPlan(), (1,))),
    ),
    3: (Switch("D2 sharded to T2", (D2, (0, 1)), (T2, (1, 2)), sharded=True),),
}
RATE = 1e-6


def measured(world: World, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The switches on this many ranks, in both precisions. Collective over the world."""
    hidden = options["hidden"]
    model = llama(hidden, 4 * hidden, options["layers"], 16, vocabulary=2048)
    dtypes: tuple[Dtype, ...] = ("fp32", "bf16")
    return [
        _measure(model, case, dtype, world, options)
        for case in SWITCHES[world.size]
        for dtype in dtypes
    ]


def _measure(
    model: ModelSpec, case: Switch, dtype: Dtype, world: World, options: dict[str, Any]
) -> dict[str, Any]:
    source, destination = (Holdings(model, *each) for each in (case.before, case.after))
    trained = random_part(source, world, dtype, train=True)
    copy = random_part(destination, world, dtype)
    given, taken = (
        None if each is None else Shards(each.chunks, model) for each in (trained, copy)
    )
    optimizer = None if trained is None else _optimizer(trained, sharded=case.sharded)
    sender, sent, late = source, given, ()  # late: what is copied once the step has gathered it
    if case.sharded:
        sender = main = MainWeightHoldings(model, *case.before)
        sent = None if optimizer is None else MainShards(optimizer, main)
    table = routing_table(sender, destination, max_size=options["bucket"], resident=source)
    if case.sharded:
        table, late = replace(table, kept=()), table.kept
    schedule = rounds(table.routes, options["bucket"])
    ends, whole = (Endpoints(part, taken, DTYPES[dtype], world.device) for part in (sent, given))

    def step() -> None:
        if optimizer is not None:
            optimizer.step(RATE)

    def switch() -> None:
        reshard(table, schedule, ends)
        keep(late, whole)

    def both() -> None:
        def beside(update: Update) -> None:
            reshard_beside(table, schedule, ends, update)

        if optimizer is not None:
            optimizer.step(RATE, beside)
        else:
            beside(lambda _: None)
        keep(late, whole)

    ways = {"step": step, "switch": switch, "both": both}
    in_turns(ways, 1)  # makes connections and optimizer state
    seconds = in_turns(ways, options["repeats"])
    turns = list(zip(seconds["step"], seconds["switch"], seconds["both"], strict=True))
    return {
        "switch": case.name,
        "sharded": case.sharded,
        "dtype": dtype,
        "parameters": num_parameters(model),
        "rounds": len(schedule),
        "seconds": {way: statistics.median(taken) for way, taken in seconds.items()},
        "added_over_switch": statistics.median(
            (both - step) / switch for step, switch, both in turns
        ),
        "step_over_switch": statistics.median(step / switch for step, switch, _ in turns),
    }


def _optimizer(context: Context, *, sharded: bool) -> Optimizer:
    config = OptimizerConfig(lr=RATE, use_distributed_optimizer=sharded)
    make_trainable(context, config)
    optimizer = Optimizer(context, config)
    optimizer.zero_grad()
    for chunk in context.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.normal_()
    return optimizer


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket", type=int, default=2**21, help="numbers a round (2097152)")
    parser.add_argument("--repeats", type=int, default=10, help="measured steps of each way (10)")
    options = vars(parser.parse_args(arguments))
    show([each for size in SWITCHES for each in run_ranks(measured, size, options)])


if __name__ == "__main__":
    main()
