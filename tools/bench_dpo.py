#!/usr/bin/env python3
"""Measure DPO training steps of several packings side by side. Prints JSON.

A step loads rows, runs the reference's forward and the policy's forward and backward, and steps the
optimizer. All variants train one policy on the same global batches and take turns (A B C, A B C,
...), so that a machine's drift affects them alike. Defaults: a tiny model, prompts four times as
long as a response, shared and packed rows against paired rows, packed and padded.

    python tools/bench_dpo.py --threads 2                                 # two CPU cores
    python tools/bench_dpo.py --data hh:hh_rlhf.jsonl.gz --threads 2      # real pairs
    python tools/bench_dpo.py --model mistral7b --layers 8                # one 80 GB GPU
    python tools/bench_dpo.py --compare shared+packed --attention segments dense  # backends

Rates and times are medians over --steps; "extremes" are minimum and maximum. Tokens are counted
over the whole job: "used" without padding, "row" with it. linear_tflops is per device. It counts
only the layers' matrices (not attention, embedding and head), on used tokens: "policy" is their
forward and backward over the policy's time, "reference" their forward over the reference's time,
"step" both over the whole step. peak_memory is rank 0's, in bytes, models and optimizer included:
allocated on CUDA, resident on a CPU. The ratio "a/b" is the median over the steps of a's pairs a
second over b's.

Memory without activations and logits: in fp32, 4 bytes a parameter for the reference and 16 for the
policy; in bf16, 2 and 18. That is 25 GB for 1b and 145 GB for mistral7b: lower --layers to fit.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

import torch
from bench_cases import (
    COMPARED,
    SHAPES,
    Variant,
    choose_engine,
    choose_variants,
    make_loader,
    open_pairs,
)
from bench_run import parser_of, show
from dpo_steps import Bench, Step, make_bench, ratios, run_step, summarize

from puzzle_align.config.parallel import misfit, plan_on
from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS
from puzzle_align.config.sections.models import ParallelConfig
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.layout.flops import flops_per_token
from puzzle_align.layout.model import AttentionBackend, ModelSpec
from puzzle_align.layout.weights import num_parameters
from puzzle_align.runtime.batches import DataBatches, data_view
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.groups.world import World, init_distributed, shutdown_distributed


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments, with the model's defaults filled in."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", choices=tuple(SHAPES), default="tiny", help="shape; weights are random")
    add("--layers", type=int, help="number of layers (the model's)")
    add(
        "--data",
        metavar="SOURCE",
        help="hh:PATH: a preference file, tokenized as bytes; or random tokens: "
        "lengths:prompt=P,response=R[,spread=0.5], uniform in mean*(1+-spread) (tiny: P=256,R=64; "
        "else P=1024,R=256), or with the lengths of the prefix-sharing paper's data sets: "
        + ", ".join(SYNTHETIC_LENGTHS),
    )
    add("--max-length", type=int, default=1024, help="longest prompt plus response of hh (1024)")
    add("--tokens", type=int, help="of a packed row; at most of a padded (tiny 2048, else 8192)")
    add("--pairs", type=int, default=32, help="pairs of a global batch (32)")
    add("--steps", type=int, default=5, help="measured steps of every variant (5)")
    add("--warmup", type=int, default=1, help="steps before the measured ones (1)")
    add("--compare", nargs="+", default=COMPARED, metavar="LAYOUT+PACKING", help=" ".join(COMPARED))
    add(
        "--attention",
        nargs="+",
        choices=("auto", *get_args(AttentionBackend)),
        default=["auto"],
        help="several: every variant with each (auto: flex on cuda, segments on cpu)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    add("--transformer-impl", choices=("auto", "te", "local"), default="auto")
    add("--recompute", choices=("none", "selective", "full"), default="none")
    add("--threads", type=int, help="CPU threads of this process (torch's default)")
    add(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: this process's CPU seconds, for a shared machine (with --threads 1)",
    )
    add("--tensor", type=int, default=1, help="tensor ranks, under torchrun")
    add("--pipeline", type=int, default=1, help="pipeline ranks, under torchrun")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.model]
    options.tokens = shape.tokens if options.tokens is None else options.tokens
    options.data = options.data or shape.data
    for name in ("layers", "tokens", "pairs", "steps", "threads", "max_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: give a positive number")
    return options


def measure(
    options: argparse.Namespace,
    spec: ModelSpec,
    variants: Sequence[Variant],
    dataset: ExampleDataset,
    world: World,
) -> dict[str, Any]:
    """Measure all variants; return the values to print. Collective.

    Raises:
        ValueError: one line, if a pair does not fit a row, or the plan the ranks.
    """
    sizes = ParallelConfig(
        tensor_model_parallel_size=options.tensor, pipeline_model_parallel_size=options.pipeline
    )
    plan = plan_on(sizes, world.size)
    if plan is None:
        raise ValueError(f"--tensor and --pipeline: {misfit(sizes, f'{world.size} ranks')}")
    engine = choose_engine(options, options.attention[0])
    settings = replace(engine.options, recompute=options.recompute)
    bench = make_bench(spec, settings, plan, world, clock=options.clock)
    rows = {v.name: _rows_of(v, dataset, options, bench.policy) for v in variants}
    measured: dict[str, list[Step]] = {variant.name: [] for variant in variants}
    for step in range(options.warmup + options.steps):
        for variant in variants:
            done = run_step(bench, rows[variant.name], step)
            if step >= options.warmup:
                measured[variant.name].append(done)
            if world.rank == 0:
                print(f"step {step} {variant.name} {done.seconds:.3f} s", file=sys.stderr)
    return {
        "model": {
            "name": options.model,
            "layers": spec.num_hidden_layers,
            "parameters": num_parameters(spec),
            "linear_flops_per_token": flops_per_token(spec),
        },
        "data": {
            "source": options.data,
            "pairs_per_step": options.pairs,
            "mean_prompt": float(dataset.prompt_lengths.mean()),
            "mean_response": float(dataset.response_lengths.mean()),
        },
        "settings": _describe_settings(options, bench),
        "variants": {
            variant.name: {"attention": variant.attention}
            | summarize(measured[variant.name], spec, world.size)
            for variant in variants
        },
        "ratios": ratios(measured),
    }


def _rows_of(
    variant: Variant, dataset: ExampleDataset, options: argparse.Namespace, policy: Context
) -> DataBatches:
    layout, packed = variant.layout, variant.packed
    view = data_view(policy)
    loader = make_loader(dataset, layout, packed, options.tokens, options.pairs, view)
    return DataBatches(loader, variant.attention, policy.device)


def _describe_settings(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    return {
        "device": str(bench.policy.device),
        "dtype": str(bench.policy.dtype).removeprefix("torch."),
        "transformer_impl": bench.options.transformer_impl,
        "recompute": options.recompute,
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "plan": asdict(bench.policy.plan),
        "tokens": options.tokens,
        "steps": options.steps,
        "warmup": options.warmup,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 1 and one line on stderr if the arguments cannot be measured."""
    options = parse_arguments(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    spec = SHAPES[options.model].spec
    spec = replace(spec, num_hidden_layers=options.layers or spec.num_hidden_layers)
    try:
        variants = choose_variants(options)
        dataset = open_pairs(options, spec)
        device = choose_engine(options, options.attention[0]).device
        world = init_distributed(device, timeout_s=600.0)
        result = measure(options, spec, variants, dataset, world)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if world.rank == 0:
        show(result)
    shutdown_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
