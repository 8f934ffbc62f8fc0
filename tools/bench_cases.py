"""Cases of `bench_dpo.py`: model shapes, preference pairs, and ways to make rows of them."""

import argparse
import sys
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS
from puzzle_align.config.sections.engine import EngineConfig
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset, from_examples
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.data.packing import slot_lengths
from puzzle_align.data.pairs import Budget, BuildOptions, Limits
from puzzle_align.data.prepare import load_pairs
from puzzle_align.data.synthetic import draw_lengths
from puzzle_align.data.tokenize import load_tokenizer
from puzzle_align.layout.model import AttentionBackend, ModelSpec
from puzzle_align.layout.rows import SLOT_MULTIPLE
from puzzle_align.stages.engine import Engine, resolve_engine
from puzzle_align.stages.tokenizer import check_vocabulary

LAYOUTS, PACKINGS = ("shared", "paired"), ("packed", "padded")
COMPARED = ("shared+packed", "paired+packed", "paired+padded")
SEED = 1


@dataclass(frozen=True)
class Shape:
    """A model, with the default row size and data to measure it with."""

    spec: ModelSpec
    tokens: int
    data: str


@dataclass(frozen=True)
class Variant:
    """A way to make rows of the pairs, and an attention backend."""

    name: str
    layout: str
    packed: bool
    attention: AttentionBackend


_TINY = ModelSpec(
    model_type="llama",
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=32768,
)
_LLAMA_3_2_1B = replace(
    _TINY,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
)
_MISTRAL_7B = replace(
    _TINY,
    model_type="mistral",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
)
_LONG = "lengths:prompt=1024,response=256"
SHAPES = {
    "tiny": Shape(_TINY, 2048, "lengths:prompt=256,response=64"),
    "1b": Shape(_LLAMA_3_2_1B, 8192, _LONG),
    "mistral7b": Shape(_MISTRAL_7B, 8192, _LONG),
}


def choose_engine(options: argparse.Namespace, attention: str) -> Engine:
    """Device, precision and layers from the options; ValueError if this machine lacks one."""
    return resolve_engine(
        EngineConfig(
            device=options.device,
            dtype=options.dtype,
            attention=attention,
            transformer_impl=options.transformer_impl,
        )
    )


def choose_variants(options: argparse.Namespace) -> list[Variant]:
    """The variants to compare, ``auto`` attention resolved; ValueError for an unknown one."""
    variants = []
    for name, backend in product(options.compare, options.attention):
        layout, _, packing = name.partition("+")
        if layout not in LAYOUTS or packing not in PACKINGS:
            raise ValueError(f"--compare {name}: write a layout and a packing, as {COMPARED[0]}")
        attention = choose_engine(options, backend).options.attention
        full_name = name if len(options.attention) == 1 else f"{name}+{attention}"
        variants.append(Variant(full_name, layout, packing == "packed", attention))
    if len({variant.name for variant in variants}) < len(variants):
        raise ValueError("the same variant is asked for twice: name each once")
    return variants


def open_pairs(options: argparse.Namespace, spec: ModelSpec) -> ExampleDataset:
    """The pairs of ``--data``; ValueError, one line, if they cannot be read."""
    kind, _, rest = options.data.partition(":")
    num_batches = options.warmup + options.steps
    if kind == "hh":
        return _read_pairs(rest, options.max_length, spec)
    if options.data in SYNTHETIC_LENGTHS:
        num_pairs = num_batches * options.pairs
        return named_pairs(num_pairs, options.data, options.tokens, spec.vocab_size)
    settings = dict(part.partition("=")[::2] for part in rest.split(","))
    known = {"prompt", "response"} <= set(settings) <= {"prompt", "response", "spread"}
    try:
        prompt, response = int(settings["prompt"]), int(settings["response"])
        spread = float(settings.get("spread", 0.5))
    except (KeyError, ValueError):
        known = False
    if kind != "lengths" or not known or min(prompt, response) < 1 or not 0 <= spread <= 1:
        raise ValueError(
            f"--data {options.data}: write hh:PATH, {_LONG}[,spread=0.5] or one of "
            + ", ".join(SYNTHETIC_LENGTHS)
        )
    return random_pairs(num_batches, options.pairs, (prompt, response), spread, spec.vocab_size)


def _read_pairs(path: str, max_length: int, spec: ModelSpec) -> ExampleDataset:
    tokenizer = load_tokenizer("byte")
    check_vocabulary(tokenizer, {"--model": spec})
    budget = Budget(sys.maxsize, "shared", packed=True)  # every variant's loader checks its own
    build_options = BuildOptions(True, Limits(max_length, None, "keep_end"), budget, True)
    dataset, report = load_pairs(path, tokenizer, build_options, Preparation())
    print(report.summary(), file=sys.stderr)
    return dataset


def random_pairs(
    num_batches: int, batch_size: int, means: tuple[int, int], spread: float, vocab_size: int
) -> ExampleDataset:
    """Random tokens; lengths of prompts and responses are uniform in mean * (1 +- spread).

    The first pair of every batch has the greatest lengths, so that padded rows have the same width
    in all steps and FlexAttention compiles once.
    """
    generator = np.random.default_rng(SEED)
    longest = [round(mean * (1 + spread)) for mean in means]
    shortest = [max(1, round(mean * (1 - spread))) for mean in means]

    def part(kind: int, is_longest: bool) -> list[int]:
        length = longest[kind]
        if not is_longest:
            length = int(generator.integers(shortest[kind], longest[kind] + 1))
        return generator.integers(0, vocab_size, length).tolist()

    firsts = (number % batch_size == 0 for number in range(num_batches * batch_size))
    pairs = ((part(0, first), [part(1, first), part(1, first)]) for first in firsts)
    return from_examples(pairs, pad_id=0)


def named_lengths(num_pairs: int, name: str, row_tokens: int) -> np.ndarray:
    """Lengths of ``named_pairs``: prompt, chosen and rejected response, int64 [num_pairs, 3]."""
    drawn = draw_lengths(np.random.default_rng(SEED), num_pairs, row_tokens // 2, name)
    return np.maximum(drawn, 1)


def named_pairs(num_pairs: int, name: str, row_tokens: int, vocab_size: int) -> ExampleDataset:
    """Random tokens in the lengths of a data set, cut if a row cannot hold a pair."""
    generator = np.random.default_rng([SEED, 0])
    tokens = [
        [generator.integers(0, vocab_size, length).tolist() for length in pair]
        for pair in named_lengths(num_pairs, name, row_tokens)
    ]
    return from_examples(((prompt, responses) for prompt, *responses in tokens), pad_id=0)


def make_loader(
    dataset: ExampleDataset,
    layout: str,
    packed: bool,
    row_tokens: int,
    pairs: int,
    view: DataView,
) -> ExampleLoader:
    """Loader of a view's rows, pairs in order; a padded row holds at least one pair."""
    if not packed:
        prompts, responses = dataset.prompt_lengths, dataset.response_lengths
        longest = slot_lengths(prompts, responses, layout, SLOT_MULTIPLE).max()
        slots = 1 if layout == "shared" else dataset.num_responses
        row_tokens = max(row_tokens, slots * int(longest))
    return ExampleLoader(
        dataset,
        global_batch_size=pairs,
        row_tokens=row_tokens,
        layout=layout,
        packed=packed,
        scope="batch",
        seed=SEED,
        shuffle=False,
        view=view,
    )
