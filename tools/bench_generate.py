#!/usr/bin/env python3
"""Measure generation against transformers' ``generate``, with one model. Prints JSON.

Both answer the same prompts greedily; prompts and responses have different lengths. They take
turns, so that a machine's drift affects them alike. transformers gets one left-padded batch with
its KV cache, and continues until the last response has ended. Weights are random. Stop tokens are
tokens of responses sampled without any, at positions spread from 1 to --max-new-tokens.

    python tools/bench_generate.py --threads 2
    python tools/bench_generate.py --threads 1 --clock cpu    # on a machine that others use
    python tools/bench_generate.py --device cuda --dtype bf16 --prompts 1 32 64 --hidden 2048
    python tools/bench_generate.py --device cuda --dtype bf16 --prompts 1 32 64 --hidden 2048 \\
        --num-scheduler-steps 1 --enforce-eager    # token by token, kernel by kernel

Rates are medians over --repeats, and count the tokens of responses, stop tokens included.
"ratio" is the median over the repeats of transformers' seconds over ours. "same_responses" counts
the prompts that both answer with the same tokens.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_run import parser_of, show

from puzzle_align.layout.hf_config import from_hf_config, read_hf_config
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models.hf.sources import SafetensorsSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.models.inputs import DTYPES
from puzzle_align.runtime.context import Context, build_context, freeze
from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Sampling
from puzzle_align.runtime.groups.world import (
    build_communicators,
    init_distributed,
    shutdown_distributed,
)

SEED = 1
Tokens = list[list[int]]


@dataclass(frozen=True)
class Run:
    """One measured run over all prompts."""

    seconds: float
    responses: Tokens


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--prompts", type=int, nargs="+", default=[32], help="numbers of prompts, in turn (32)")
    add("--prompt-length", type=int, default=128, help="tokens of the longest prompt (128)")
    add("--max-new-tokens", type=int, default=128, help="tokens of the longest response (128)")
    add("--layers", type=int, default=8, help="layers (8)")
    add("--hidden", type=int, default=512, help="hidden size, a multiple of the head size 64 (512)")
    add("--vocabulary", type=int, default=8192, help="tokens of the vocabulary (8192)")
    add("--prefill-tokens", type=int, default=1024, help="tokens of our prompt microbatches (1024)")
    add("--decode-batch-size", type=int, help="sequences of our decode microbatches (all)")
    add("--num-scheduler-steps", type=int, help="key of generation (the engine's default)")
    add("--enforce-eager", action="store_true", help="our steps without CUDA graphs")
    add("--repeats", type=int, default=3, help="measured runs of each (3)")
    add("--threads", type=int, help="CPU threads (torch's default)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=tuple(DTYPES), default="fp32")
    add("--clock", choices=("wall", "cpu"), default="wall", help="cpu: this process's CPU seconds")
    options = parser.parse_args(arguments)
    if options.hidden < 64 or options.hidden % 64:
        parser.error(f"--hidden {options.hidden}: give a multiple of 64")
    return options


def make_model(options: argparse.Namespace) -> Any:
    """A random model of transformers, on the device."""
    import transformers

    heads = options.hidden // 64
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=32768,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    return transformers.LlamaForCausalLM(config).eval()


def make_prompts(number: int, options: argparse.Namespace) -> list[np.ndarray]:
    """Prompts of lengths spread evenly from an eighth of the longest, in random order."""
    generator = np.random.default_rng(SEED)
    shortest = max(1, options.prompt_length // 8)
    lengths = np.linspace(shortest, options.prompt_length, number).astype(int)
    generator.shuffle(lengths)
    return [generator.integers(0, options.vocabulary, length) for length in lengths]


def by_transformers(
    model: Any,
    prompts: Sequence[np.ndarray],
    stop_tokens: Sequence[int],
    max_new_tokens: int,
    **sampling: Any,
) -> Tokens:
    """Responses from one left-padded batch, cut after their first stop token; by default greedy."""
    longest = max(map(len, prompts))
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = (np.arange(longest) >= longest - lengths[:, None]).astype(np.int64)
    made = model.generate(
        torch.from_numpy(padded).to(model.device),
        attention_mask=torch.from_numpy(mask).to(model.device),
        max_new_tokens=max_new_tokens,
        **(sampling or {"do_sample": False}),
        eos_token_id=list(stop_tokens) or None,
        pad_token_id=0,
    )[:, longest:].cpu()
    responses = []
    for tokens in made.numpy():
        ends = np.flatnonzero(np.isin(tokens, stop_tokens))
        responses.append(tokens[: ends[0] + 1 if len(ends) else None].tolist())
    return responses


def choose_stop_tokens(responses: Tokens) -> tuple[int, ...]:
    """Tokens that end the responses at places spread evenly over their length."""
    places = np.linspace(0, len(responses[0]) - 1, len(responses)).astype(int)
    chosen = {tokens[place] for tokens, place in zip(responses, places[::-1], strict=True)}
    return tuple(sorted(chosen))


def by_puzzle_align(
    context: Context, prompts: Sequence[np.ndarray], stop_tokens: Sequence[int], options: Any
) -> Tokens:
    """Greedy responses from this project's engine."""
    sampling = Sampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=0,
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=tuple(stop_tokens),
        seed=SEED,
    )
    responses = generate(
        context,
        [Request(number, prompt) for number, prompt in enumerate(prompts)],
        sampling,
        prefill_tokens=options.prefill_tokens,
        decode_batch_size=options.decode_batch_size or len(prompts),
        num_scheduler_steps=options.num_scheduler_steps,
        enforce_eager=options.enforce_eager,
    )
    return [response.tokens.tolist() for response in responses]


def load_context(model: Any, options: argparse.Namespace) -> Context:
    """The same weights as a context of one rank."""
    world = init_distributed(options.device, timeout_s=600.0)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        spec = from_hf_config(read_hf_config(folder), folder)
        plan = ParallelPlan()
        context = build_context(
            "actor",
            spec,
            ModelOptions(dtype=options.dtype),
            plan,
            world,
            communicators=build_communicators(plan, world, trained=False),
            fill=lambda chunk: load_weights(chunk, spec, SafetensorsSource(folder)),
        )
    freeze(context)
    return context


def measure(answer: Callable[[], Tokens], clock: str) -> Run:
    """Answer all prompts once; responses on the host mean that the device is done."""
    now = time.perf_counter if clock == "wall" else time.process_time
    start = now()
    responses = answer()
    return Run(now() - start, responses)


def summarize(number: int, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Figures for one number of prompts."""
    ours, theirs = runs["puzzle_align"], runs["transformers"]
    lengths = [len(tokens) for tokens in ours[0].responses]
    same = [a == b for a, b in zip(ours[0].responses, theirs[0].responses, strict=True)]
    return {
        "prompts": number,
        "response_lengths": sorted(lengths),
        "response_tokens": sum(lengths),
        "same_responses": sum(same),
        "tokens_per_second": {
            name: statistics.median(sum(map(len, run.responses)) / run.seconds for run in done)
            for name, done in runs.items()
        },
        "seconds": {name: [run.seconds for run in done] for name, done in runs.items()},
        "ratio": statistics.median(
            other.seconds / our.seconds for our, other in zip(ours, theirs, strict=True)
        ),
    }


def compare(
    context: Context, model: Any, number: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Run both in turns on ``number`` prompts."""
    prompts = make_prompts(number, options)
    endless = by_transformers(model, prompts, (), options.max_new_tokens)
    stop_tokens = choose_stop_tokens(endless)
    answers: dict[str, Callable[[], Tokens]] = {
        "puzzle_align": lambda: by_puzzle_align(context, prompts, stop_tokens, options),
        "transformers": lambda: by_transformers(
            model, prompts, stop_tokens, options.max_new_tokens
        ),
    }
    runs: dict[str, list[Run]] = {name: [] for name in answers}
    for repeat in range(options.repeats + 1):
        for name, answer in answers.items():
            run = measure(answer, options.clock)
            if repeat:  # the first warms up
                runs[name].append(run)
            print(f"{number} prompts: {name} {run.seconds:.3f} s", file=sys.stderr)
    return summarize(number, runs)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool."""
    options = parse_arguments(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = make_model(options)
    context = load_context(model, options)
    model.to(options.device, DTYPES[options.dtype])
    runs = [compare(context, model, number, options) for number in options.prompts]
    settings = vars(options) | {"threads": torch.get_num_threads()}
    show({"settings": settings, "runs": runs})
    shutdown_distributed()
    return 0


if __name__ == "__main__":
    sys.exit(main())
