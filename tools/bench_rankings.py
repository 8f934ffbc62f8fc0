#!/usr/bin/env python3
"""Measure DPO on rankings of K responses against the same comparisons as pairs. Prints JSON.

A step is that of tools/bench_dpo.py. A ranking is a prompt with K responses in one segment, and
trains C(K, 2) pairs; spelled out, each of these is a segment of its own, prompt included. Both are
in shared, packed rows, hold the same pairs in every step, and take turns.

    python tools/bench_rankings.py --threads 2      # two CPU cores

"token_ratio" is the tokens of the pairs over those of the rankings: 4.5 where a prompt is as long
as K = 4 responses (the default). "ratio" is the rankings' pairs a second over the pairs', a median
over the steps, and "share" is ratio over token ratio.
"""

import argparse
import sys
from math import comb, lcm
from typing import Any

import numpy as np
import torch
from bench_cases import SEED, SHAPES
from bench_run import parser_of, show
from dpo_steps import Step, make_bench, ratios, run_step, summarize

from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.data.dataset import ExampleDataset, contiguous
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.runtime.batches import DataBatches
from puzzle_align.runtime.groups.world import World, init_distributed, shutdown_distributed
from puzzle_align.stages.engine import resolve_engine


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--responses", type=int, default=4, help="K, responses of a ranking (4)")
    add("--prompt", type=int, default=256, help="tokens of a prompt (256)")
    add("--response", type=int, default=64, help="tokens of a response (64)")
    add("--rows", type=int, default=4, help="rows of rankings in a step (4: pairs fill 18)")
    add("--steps", type=int, default=5, help="measured steps of both (5)")
    add("--warmup", type=int, default=1, help="steps before the measured ones (1)")
    add("--threads", type=int, help="CPU threads of this process (torch's default)")
    options = parser.parse_args(arguments)
    for name in ("prompt", "response", "rows", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: give a positive number")
    if options.responses < 3:
        parser.error(f"--responses {options.responses}: give at least 3; two are a pair")
    return options


def datasets(options: argparse.Namespace, vocab_size: int) -> dict[str, ExampleDataset]:
    """A step's rankings, and their pairs in the same order."""
    number, prompt, response = options.responses, options.prompt, options.response
    num_rankings = options.rows * _row_tokens(options) // (prompt + number * response)
    generator = np.random.default_rng(SEED)
    size = num_rankings * (prompt + number * response)
    tokens = generator.integers(0, vocab_size, size).astype(np.int32)
    parts = np.tile(np.array([prompt, *(response,) * number], np.int32), (num_rankings, 1))
    levels = np.tile(np.arange(number, dtype=np.int32), (num_rankings, 1))
    rankings = contiguous(tokens, parts, 0, "rankings", levels=levels)
    pairs = [
        part
        for example, better, worse in rankings.comparisons(np.arange(num_rankings)).tolist()
        for part in (
            rankings.prompt(example),
            rankings.response(example, better),
            rankings.response(example, worse),
        )
    ]
    lengths = np.array([len(part) for part in pairs], np.int32).reshape(-1, 3)
    spelled_out = contiguous(np.concatenate(pairs), lengths, 0, "pairs")
    return {"rankings": rankings, "pairs": spelled_out}


def _row_tokens(options: argparse.Namespace) -> int:
    """Tokens of a row that both fill."""
    ranking = options.prompt + options.responses * options.response
    return lcm(ranking, options.prompt + 2 * options.response)


def measure(options: argparse.Namespace, world: World) -> dict[str, Any]:
    """Measure both; return the values to print."""
    spec = SHAPES["tiny"].spec
    engine = resolve_engine(EngineConfig(device="cpu"))
    bench = make_bench(spec, engine.options, ParallelPlan(), world)
    data = datasets(options, spec.vocab_size)
    rows: dict[str, DataBatches] = {}
    for name, dataset in data.items():
        loader = ExampleLoader(
            dataset,
            global_batch_size=len(dataset),
            row_tokens=_row_tokens(options),
            layout="shared",
            packed=True,
            scope="batch",
            seed=SEED,
            shuffle=False,
            view=DataView(),
        )
        rows[name] = DataBatches(loader, engine.options.attention, bench.device)
    measured: dict[str, list[Step]] = {name: [] for name in rows}
    for step in range(options.warmup + options.steps):
        for name, batches in rows.items():
            done = run_step(bench, batches, step)
            if step >= options.warmup:
                measured[name].append(done)
            print(f"step {step} {name} {done.seconds:.3f} s", file=sys.stderr)
    tokens = {name: steps[0].num_tokens for name, steps in measured.items()}
    token_ratio = tokens["pairs"] / tokens["rankings"]
    (ratio,) = ratios(measured).values()
    return {
        "pairs_per_step": len(data["pairs"]),
        "comparisons_of_a_ranking": comb(options.responses, 2),
        "attention": engine.options.attention,
        "threads": torch.get_num_threads(),
        "variants": {name: summarize(steps, spec, 1) for name, steps in measured.items()},
        "token_ratio": token_ratio,
        "ratio": ratio,
        "share": ratio / token_ratio,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the tool."""
    options = parse_arguments(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    world = init_distributed("cpu", timeout_s=600.0)
    show(measure(options, world))
    shutdown_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
