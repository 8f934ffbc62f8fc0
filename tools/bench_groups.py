#!/usr/bin/env python3
"""Score and learn from groups whose prompt is computed once, and once a response. Prints JSON.

Stage grpo with random weights on two CPU ranks, data parallel. Nothing is sampled: all responses
are random tokens of one length. The two row layouts take turns (shared paired, shared paired, ...),
so that a machine's drift affects them alike. All rows are full: a row has as many whole groups as
fit --row-tokens.

    python tools/bench_groups.py                  # 8 responses of 64 tokens to prompts of 512
    python tools/bench_groups.py --clock cpu      # on a shared machine

"responses_per_second" is the job's rate in the phases score (the reference's forward, rewards,
advantages) and learn (the policy's forward and backward, the optimizer's step), a median over
--steps; "extremes" are minimum and maximum. "ratio" is the median over the steps of the shared
layout's rate over the paired one's, "token_ratio" how many times the tokens the paired layout has,
"ratio_over_token_ratio" their quotient. "flop_ratio" counts attention and the head, too: both have
less to share than the layers' matrices, the smaller the model the more. "load_average" is the
machine's, before and after, over a minute: about 2 is this tool's own.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_run import parser_of, run_ranks, show

from puzzle_align.config.load import load_job
from puzzle_align.config.resolve import resolve
from puzzle_align.layout.flops import attention_flops, flops_per_token, head_flops_per_token
from puzzle_align.layout.model import ModelSpec
from puzzle_align.runtime.generation.sampling import Response
from puzzle_align.runtime.groups.collectives import wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages import ppo
from puzzle_align.stages.engine import resolve_engine

NUM_RANKS = 2
LAYOUTS = ("shared", "paired")
PHASES = ("score", "learn")
JOB = """
stage: grpo
engine: {device: cpu}
actor: {model: {random_weights: true}}
tokenizer: {path: byte}
reward: {function: "puzzle_align.data.synthetic:vowel_share"}
telemetry: {progress: false, tensorboard: false}
"""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments; exits with one line if the rows would not be full."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--prompt", type=int, default=512, help="tokens of a prompt (512)")
    add("--response", type=int, default=64, help="tokens of a response (64)")
    add("--generations", type=int, default=8, help="responses to a prompt (8)")
    add("--prompts", type=int, default=8, help="prompts of an iteration (8)")
    add("--row-tokens", type=int, default=4608, help="tokens of a row, at most (4608)")
    add("--hidden", type=int, default=768, help="hidden size, a multiple of 128 (768)")
    add("--layers", type=int, default=2, help="number of layers (2)")
    add("--steps", type=int, default=3, help="measured iterations of each layout (3)")
    add(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: rank 0's CPU seconds, for a shared machine (wall)",
    )
    options = parser.parse_args(arguments)
    for layout in LAYOUTS:
        groups = options.row_tokens // group_tokens(options, layout)
        if groups == 0 or options.prompts % (NUM_RANKS * groups):
            parser.error(
                f"--prompts {options.prompts}: {NUM_RANKS} ranks with {groups} prompts in a row of "
                f"--row-tokens {options.row_tokens}, {layout}, are not full; take a multiple of "
                f"{NUM_RANKS * max(1, groups)}, or other rows"
            )
    return options


def group_tokens(options: argparse.Namespace, layout: str) -> int:
    """Tokens of a prompt with its responses in a row."""
    copies = 1 if layout == "shared" else options.generations
    return copies * options.prompt + options.generations * options.response


def group_flops(options: argparse.Namespace, spec: ModelSpec, layout: str) -> int:
    """Forward FLOPs of a group."""
    prompt, response, number = options.prompt, options.response, options.generations
    of_prompt = prompt * (prompt + 1) // 2
    pairs = number * (prompt * response + response * (response + 1) // 2)
    pairs += of_prompt * (1 if layout == "shared" else number)
    matrices = flops_per_token(spec) * group_tokens(options, layout)
    head = head_flops_per_token(spec) * number * response
    return matrices + attention_flops(spec, pairs) + head


def bench(world: World, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Rates of score and learn under each layout, by turns. Collective."""
    load_before = os.getloadavg()[0]
    ppo.sample = _random_responses
    trainers = {layout: _trainer(world, options, folder, layout) for layout in LAYOUTS}
    spec = trainers["shared"].plan.models["actor"].model
    number = options.prompts * options.generations
    rates: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    phases: dict[str, list[Mapping[str, float]]] = {layout: [] for layout in LAYOUTS}
    for step in range(options.steps + 1):
        for layout, trainer in trainers.items():
            _, stats = trainer.train_step(step)
            seconds = sum(stats.phases[name] for name in PHASES)
            if step:  # the first allocates
                rates[layout].append(number / seconds)
                phases[layout].append(stats.phases)
            if world.rank == 0:
                print(f"iteration {step} {layout} {seconds:.3f} s", file=sys.stderr)
    ratio = median(a / b for a, b in zip(rates["shared"], rates["paired"], strict=True))
    tokens, flops = (
        {layout: count(layout) for layout in LAYOUTS}
        for count in (
            lambda layout: group_tokens(options, layout),
            lambda layout: group_flops(options, spec, layout),
        )
    )
    token_ratio = tokens["paired"] / tokens["shared"]
    return {
        "responses_per_second": {layout: median(of_steps) for layout, of_steps in rates.items()},
        "extremes": {layout: [min(each), max(each)] for layout, each in rates.items()},
        "phase_seconds": {
            layout: {name: median(each[name] for each in of_steps) for name in PHASES}
            for layout, of_steps in phases.items()
        },
        "ratio": ratio,
        "token_ratio": token_ratio,
        "ratio_over_token_ratio": ratio / token_ratio,
        "flop_ratio": flops["paired"] / flops["shared"],
        "load_average": [load_before, os.getloadavg()[0]],
    }


def _trainer(world: World, options: argparse.Namespace, folder: str, layout: str) -> ppo.PPOTrainer:
    """Make the trainer of a layout. Collective."""
    heads, tokens = options.hidden // 64, group_tokens(options, layout)
    model = {
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "vocab_size": 260,
        "max_position_embeddings": options.prompt + options.response,
    }
    config = load_job(
        JOB,
        [
            f"output_dir={folder}/{layout}",
            f"actor.model.config={json.dumps(model)}",
            f"data.train={folder}/prompts.jsonl",
            f"data.max_length={options.prompt + options.response}",
            f"generation.max_new_tokens={options.response}",
            f"generation.num_generations={options.generations}",
            f"global_batch_size={options.prompts}",
            f"max_steps={options.steps + 1}",
            f"packing.layout={layout}",
            f"packing.row_tokens={options.row_tokens // tokens * tokens}",
        ],
    )
    job = resolve(config, resolve_engine(config.engine), world.size)
    trainer = ppo.open_trainer(job, world)

    def now(read: Callable[[], float]) -> float:
        wait_for_all(world.device)
        return read()

    reads = {"wall": time.monotonic, "cpu": time.process_time}
    trainer._now = lambda: now(reads[options.clock])  # type: ignore[method-assign]
    return trainer


def _random_responses(
    context: Any,
    dataset: Any,
    prompts: np.ndarray,
    replicas: np.ndarray,
    iteration: int,
    sampling: Any,
    config: Any,
) -> dict[int, Response]:
    """Responses of random tokens, all of the greatest length, in place of sampled ones."""
    generator = np.random.default_rng(iteration)
    tokens = generator.integers(0, 256, (len(replicas), config.max_new_tokens))
    log_probs = np.full(config.max_new_tokens, -np.log(256), dtype=np.float32)
    samples = np.flatnonzero(replicas == context.data_rank).tolist()
    return {s: Response(s, tokens[s], log_probs, stopped=False) for s in samples}


def main(arguments: list[str] | None = None) -> int:
    """Run the tool."""
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        letters = np.random.default_rng(0).integers(97, 123, (options.prompts, options.prompt - 1))
        lines = [json.dumps({"prompt": "".join(map(chr, row))}) + "\n" for row in letters]
        (Path(folder) / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        found = run_ranks(bench, NUM_RANKS, options, folder)
    show({"settings": vars(options), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
