#!/usr/bin/env python3
"""Compare time-shared pipelines with models that run one after the other, and print JSON.

"simulated" needs no ranks: makespans of the real action lists at given costs, over a grid.
"two_trainings" are two models of equal microbatches whose costs differ by a ratio; their bound is
Equation (1) of PUZZLE (ATC '24), which better orders than the paper's exceed. "dpo_lookahead" is a
policy with its reference a batch ahead, in steady state, and at most the bound faster than with the
reference before each step. "speedup" is sequential over time-shared time.

"real" trains: DPO of one pair a microbatch, on a pipeline of CPU ranks of one thread each (give it
as many idle cores). Sequential and time-shared steps take turns; the costs that the simulated
speed-up is made from are medians of the sequential steps' actions.

"emulated" runs the real executor on real process groups, but every action sleeps for its cost in
place of computing: sleeping ranks do not compete for cores.

A measured step is all forwards and backwards, without reduction of gradients and optimizer. Times
are medians in seconds; "speedup" is the median over the steps of sequential over time-shared time.

    python tools/bench_timeshare.py simulated
    python tools/bench_timeshare.py real                      # 2 ranks on two cores
    python tools/bench_timeshare.py emulated --pipeline 4 8
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from bench_cases import SHAPES
from local_ranks import run_ranks
from timeshare_measured import (
    Sizes,
    measure_real_dpo,
    measure_sleeping_dpo,
    measure_sleeping_trainings,
)
from timeshare_schedules import (
    CRITIC,
    NUM_SETTLING,
    POLICY,
    REFERENCE,
    lookahead_bound,
    lookahead_steps,
    sequential_step,
    step_times,
    two_trainings,
    two_trainings_bound,
)

from puzzle_align.planning.simulate import simulate
from puzzle_align.schedules.costs import Costs, uniform

NUM_STEADY = 4  # steps that a simulated steady state is the mean of


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=raw)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")

    mode = modes.add_parser("simulated", help="makespans of the action lists, over a grid")
    _add_sizes(mode, [2, 4, 8, 16], "microbatches for each pipeline rank", [1, 2, 4])
    _add_ratios(mode, [1.0, 2.0, 4.0, 8.0], [2.0, 3.0])

    mode = modes.add_parser("real", help="DPO on CPU ranks of one thread each")
    for name, default, what in (
        ("--pipeline", 2, "ranks"),
        ("--microbatches", 4, "of a step"),
        ("--layers", 4, "of both models"),
        ("--prompt", 512, "tokens"),
        ("--response", 256, "tokens of each of two"),
    ):
        mode.add_argument(name, type=positive_int, default=default, help=f"{what} ({default})")
    _add_steps(mode, 10)

    mode = modes.add_parser("emulated", help="real executor, actions that sleep")
    _add_sizes(mode, [4, 8], "microbatches for each pipeline rank", [1])
    _add_ratios(mode, [2.0], [2.0])
    help_forward = "milliseconds of the smaller model's forward (30)"
    mode.add_argument("--forward-ms", type=positive_number, default=30.0, help=help_forward)
    _add_steps(mode, 5)
    options = parser.parse_args(arguments)
    if options.mode == "real" and options.layers % options.pipeline:
        modes.choices["real"].error(
            f"--layers {options.layers}: give a multiple of --pipeline {options.pipeline}"
        )
    return options


def _add_sizes(
    mode: argparse.ArgumentParser, ranks: list[int], what: str, multiples: list[int]
) -> None:
    for name, values, text in (("--pipeline", ranks, "ranks"), ("--multiples", multiples, what)):
        mode.add_argument(
            name, type=positive_int, nargs="+", default=values, help=f"{text} ({values})"
        )


def _add_ratios(mode: argparse.ArgumentParser, ratios: list[float], backwards: list[float]) -> None:
    for name, values, text in (
        ("--ratios", ratios, "of two trainings: cost of one model over the other's"),
        ("--backwards", backwards, "of DPO: backward over forward; two trainings have 2"),
    ):
        mode.add_argument(
            name, type=positive_number, nargs="+", default=values, help=f"{text} ({values})"
        )


def _add_steps(mode: argparse.ArgumentParser, steps: int) -> None:
    mode.add_argument("--steps", type=positive_int, default=steps, help=f"measured steps ({steps})")
    mode.add_argument("--warmup", type=positive_int, default=2, help="steps before them (2)")


def positive_int(text: str) -> int:
    """The type of arguments that count something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a positive number")
    return value


def positive_number(text: str) -> float:
    """The type of costs and of their ratios."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: give a positive number")
    return value


def trainings_costs(num_ranks: int, ratio: float, forward: float = 1.0) -> Costs:
    """Actor ``ratio`` times as costly as the critic, backwards twice a forward."""
    return {
        POLICY: uniform(num_ranks, ratio * forward, 2 * ratio * forward),
        CRITIC: uniform(num_ranks, forward, 2 * forward),
    }


def dpo_costs(num_ranks: int, backward: float, forward: float = 1.0) -> Costs:
    """Policy and reference of one size, ``backward`` times a forward for its backward."""
    return {
        POLICY: uniform(num_ranks, forward, backward * forward),
        REFERENCE: uniform(num_ranks, forward),
    }


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Both grids."""
    return {
        "two_trainings": list(_simulated_trainings(options)),
        "dpo_lookahead": list(_simulated_lookahead(options)),
    }


def _simulated_trainings(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for num_ranks, multiple, ratio in product(options.pipeline, options.multiples, options.ratios):
        costs, count = trainings_costs(num_ranks, ratio), multiple * num_ranks
        made = two_trainings(num_ranks, count, costs)
        sequential = simulate(made.sequential, costs).makespan
        time_shared = simulate(made.time_shared, costs).makespan
        bound = two_trainings_bound(num_ranks, count, costs)
        case = {"pipeline": num_ranks, "microbatches": count, "cost_ratio": ratio}
        yield case | _gain(sequential, time_shared, bound)


def _simulated_lookahead(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    grid = product(options.pipeline, options.multiples, options.backwards)
    for num_ranks, multiple, backward in grid:
        costs, count = dpo_costs(num_ranks, backward), multiple * num_ranks
        steps = lookahead_steps(num_ranks, count, costs, NUM_SETTLING + NUM_STEADY)
        time_shared = sum(step_times(steps, costs)[NUM_SETTLING:]) / NUM_STEADY
        sequential = sequential_step(num_ranks, count, costs)
        bound = lookahead_bound(num_ranks, count, costs)
        case = {"pipeline": num_ranks, "microbatches": count, "backward_over_forward": backward}
        yield case | _gain(sequential, time_shared, bound)


def _gain(sequential: float, time_shared: float, bound: float) -> dict[str, float]:
    speedup = sequential / time_shared
    return {
        "sequential": sequential,
        "time_shared": time_shared,
        "speedup": speedup,
        "bound": bound,
        "speedup_over_bound": speedup / bound,
    }


def real(options: argparse.Namespace) -> dict[str, Any]:
    """DPO steps of real models."""
    spec = replace(SHAPES["tiny"].spec, num_hidden_layers=options.layers)
    sizes = Sizes(
        options.microbatches, options.prompt, options.response, options.steps, options.warmup
    )
    settings = {"pipeline": options.pipeline, "layers": options.layers, **asdict(sizes)}
    found = run_ranks(measure_real_dpo, options.pipeline, spec, sizes)
    return {"settings": settings, "dpo_lookahead": found}


def emulated(options: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of time-sharing, with actions that sleep."""
    spec, forward = SHAPES["tiny"].spec, options.forward_ms / 1000
    spec = replace(spec, hidden_size=8)
    result: dict[str, Any] = {
        "compute": "emulated: every action sleeps for its cost",
        "forward_seconds": forward,
        "two_trainings": [],
        "dpo_lookahead": [],
    }
    for num_ranks, multiple in product(options.pipeline, options.multiples):
        sizes = Sizes(multiple * num_ranks, 4, 2, options.steps, options.warmup)
        case = {"pipeline": num_ranks, "microbatches": sizes.num_microbatches}
        for ratio in options.ratios:
            costs = trainings_costs(num_ranks, ratio, forward)
            found = run_ranks(measure_sleeping_trainings, num_ranks, spec, sizes, costs)
            result["two_trainings"].append({**case, "cost_ratio": ratio, **found})
        for backward in options.backwards:
            costs = dpo_costs(num_ranks, backward, forward)
            found = run_ranks(measure_sleeping_dpo, num_ranks, spec, sizes, costs)
            result["dpo_lookahead"].append({**case, "backward_over_forward": backward, **found})
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the tool."""
    options = parse_arguments(arguments)
    result = {"simulated": simulated, "real": real, "emulated": emulated}[options.mode](options)
    print(json.dumps({"mode": options.mode, **result}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
