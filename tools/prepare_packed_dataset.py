#!/usr/bin/env python3
"""Pack a preference data set once, offline, into memory-mapped NPY files for data.format=packed.

Prints the histogram of lengths and the fill of the rows. Training on the files has the same batches
as packing.scope=dataset on the same data and seed. Tokens are kept beside the output (.NAME.cache)
until the output is written, so that a repeated command does not tokenize again.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data.build import Preparation, show_nothing
from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.errors import ReadReport
from puzzle_align.data.packed_files import write_packed
from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.data.pairs import Budget, BuildOptions, Limits
from puzzle_align.data.prepare import load_pairs
from puzzle_align.data.tokenize import load_tokenizer
from puzzle_align.telemetry.progress import show_preparation

NUM_BINS = 16
BAR_WIDTH = 40


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command-line arguments; defaults are the config's."""
    data, packing = DataConfig(), PackingConfig()
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("input", help="JSONL(.gz) or Parquet file, datasets directory or hub name (NAME#split)")
    add("output", type=Path, help="directory to write; must not exist")
    add("--tokenizer", default="byte", help="directory of a Hugging Face tokenizer, or byte (byte)")
    add("--chat-template", default=None, help="Jinja template, or a file of one (the tokenizer's)")
    add(
        "--add-eos",
        choices=("auto", "true", "false"),
        default="auto",
        help="EOS token after responses; auto: after texts, not messages (auto)",
    )
    add("--row-tokens", type=int, default=packing.row_tokens, help="tokens in a row (%(default)s)")
    add("--layout", choices=("shared", "paired"), default=packing.layout, help="(%(default)s)")
    add(
        "--max-length",
        type=int,
        default=data.max_length,
        help="longest prompt plus response, in tokens (%(default)s)",
    )
    add("--max-prompt-length", type=int, default=None, help="longest prompt (no separate limit)")
    add(
        "--truncation-mode",
        choices=("keep_end", "keep_start", "drop", "error"),
        default=data.truncation_mode,
        help="treatment of pairs that are too long (%(default)s)",
    )
    add(
        "--num-proc",
        type=int,
        default=data.num_proc,
        help="processes (one for little data, else the CPUs, at most 32)",
    )
    add(
        "--on-error",
        choices=("raise", "skip"),
        default=data.on_error,
        help="bad records (%(default)s)",
    )
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--margins", action="store_true", help="keep the pairs' margins, for stage reward")
    kind("--unpaired", action="store_true", help="single responses with labels, for stage kto")
    return parser.parse_args(arguments)


def histogram(lengths: np.ndarray) -> str:
    """The distribution of examples' lengths (int [n], tokens) as lines of text."""
    counts, edges = np.histogram(lengths, bins=NUM_BINS, range=(0, int(lengths.max()) + 1))
    lines = [f"lengths, tokens: mean {lengths.mean():.1f}, longest {lengths.max()}"]
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "#" * round(BAR_WIDTH * count / counts.max())
        lines.append(f"{int(low):7d} - {int(high):7d} {count:9d} {bar}".rstrip())
    return "\n".join(lines)


def pack(
    dataset: ExampleDataset,
    report: ReadReport,
    options: argparse.Namespace,
    tokenizer_fingerprint: str,
) -> None:
    """Pack, write and report."""
    lengths = example_lengths(dataset.prompt_lengths, dataset.response_lengths, options.layout)
    print(histogram(lengths))
    start = time.perf_counter()
    rows = first_fit_decreasing(lengths, options.row_tokens)
    seconds = time.perf_counter() - start
    write_packed(
        options.output,
        dataset,
        rows,
        row_tokens=options.row_tokens,
        layout=options.layout,
        tokenizer_fingerprint=tokenizer_fingerprint,
        report=report,
    )
    fill = lengths.sum() / (len(rows) * options.row_tokens)
    print(
        f"{len(dataset)} {report.unit} in {len(rows)} rows of {options.row_tokens} tokens: "
        f"fill {fill:.2%}, packed in {seconds:.2f} s; wrote {options.output}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; 1 and one line on stderr where the input cannot be used."""
    options = parse_arguments(arguments)
    build_options = BuildOptions(
        add_eos={"true": True, "false": False}.get(options.add_eos, "auto"),
        limits=Limits(options.max_length, options.max_prompt_length, options.truncation_mode),
        budget=Budget(options.row_tokens, options.layout, packed=True),
        skip_errors=options.on_error == "skip",
        margins=options.margins,
        unpaired=options.unpaired,
    )
    try:
        if options.output.exists():
            raise ValueError(
                f"{options.output} exists already; remove it or name another directory"
            )
        tokenizer = load_tokenizer(options.tokenizer, options.chat_template)
        cache = options.output.with_name(f".{options.output.name}.cache")
        display = show_preparation if sys.stderr.isatty() else show_nothing
        how = Preparation(cache, options.num_proc, display)
        dataset, report = load_pairs(options.input, tokenizer, build_options, how)
        print(report.summary())
        pack(dataset, report, options, tokenizer.fingerprint)
        shutil.rmtree(cache, ignore_errors=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
