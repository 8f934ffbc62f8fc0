"""From a source to a tokenized dataset: strict or skipping, cached by content hash."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.config.sections.data import AddEos, DataConfig, PackingConfig
from puzzle_align.data import synthetic
from puzzle_align.data.cache import Arrays, cached
from puzzle_align.data.dataset import (
    ExampleDataset,
    TokenizedExample,
    contiguous,
    from_examples,
    split,
)
from puzzle_align.data.packed_files import load_packed, packed_report
from puzzle_align.data.packing import Rows
from puzzle_align.data.pairs import Limits, RenderedPair, example_tokens, render, separate, truncate
from puzzle_align.data.reading import check_not_empty, tokenize_together, usable_items
from puzzle_align.data.records import DataError, ReadReport, to_margin, to_record
from puzzle_align.data.sources import RawRecord, hash_source, read_records
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.data.unpaired import taken_apart, to_response

CACHE_VERSION = 6


@dataclass(frozen=True)
class Budget:
    """What one pair may take of a row."""

    row_tokens: int
    layout: str
    packed: bool


@dataclass(frozen=True)
class BuildOptions:
    """Everything besides source and tokenizer that decides the token ids."""

    add_eos: AddEos
    limits: Limits
    budget: Budget
    skip_errors: bool
    margins: bool = False  # read those of pairs, else they may be anything
    unpaired: bool = False  # single responses, and pairs taken apart


@dataclass(frozen=True)
class Tokenized:
    """A record that can be used."""

    pair: TokenizedExample
    was_cut: bool
    cut_response: bool
    label: float  # see ``ExampleDataset``


@dataclass(frozen=True)
class PreparedData:
    """What a stage trains and evaluates on."""

    train: ExampleDataset
    eval: ExampleDataset | None
    report: ReadReport  # of the training source
    eval_report: ReadReport | None = None  # of the held-out source, where it is one of its own
    rows: Rows | None = None  # ready-made rows of packed files, for ExampleLoader


def prepare_data(
    config: DataConfig,
    packing: PackingConfig,
    tokenizer: Tokenizer,
    *,
    add_eos: AddEos,
    seed: int,
    cache_dir: Path | None,
    margins: bool = False,
    unpaired: bool = False,
    progress: bool = False,
    hash_of: Callable[[str], str] = hash_source,
) -> PreparedData:
    """Training and held-out data as the config asks for; ValueError, one line, where it cannot be.

    ``cache_dir`` None: tokenize anew. ``margins``: read those of the data. ``unpaired``: single
    responses. ``progress``: show a bar. ``hash_of``: a source's hash, where it is known. Several
    processes may call it.
    """
    options = BuildOptions(
        add_eos,
        Limits(config.max_length, config.max_prompt_length, config.truncation_mode),
        Budget(packing.row_tokens, packing.row_layout, packing.is_packed),
        config.on_error == "skip",
        margins,
        unpaired,
    )
    if config.format == "packed":
        return _prepare_packed(config, packing, tokenizer, unpaired)
    if config.format == "synthetic":
        records = _synthetic_records(config, seed)
        train, report = build(records, tokenizer, options, progress=progress)
    elif config.train is None:
        raise ValueError("data.train is not set; name a file, or set data.format=synthetic")
    else:
        train, report = load(
            config.train, tokenizer, options, cache_dir, progress=progress, hash_of=hash_of
        )
    if config.eval is not None:
        held_out, eval_report = load(
            config.eval, tokenizer, options, cache_dir, progress=progress, hash_of=hash_of
        )
        return PreparedData(train, held_out, report, eval_report)
    if config.eval_fraction > 0:
        return PreparedData(*split(train, config.eval_fraction, seed), report)
    return PreparedData(train, None, report)


def load(
    source: str,
    tokenizer: Tokenizer,
    options: BuildOptions,
    cache_dir: Path | None,
    *,
    progress: bool = False,
    hash_of: Callable[[str], str] = hash_source,
) -> tuple[ExampleDataset, ReadReport]:
    """The tokenized pairs of a source, from the cache where it has them, memory-mapped."""
    if cache_dir is None:
        return build(read_records(source), tokenizer, options, name=source, progress=progress)
    key = [CACHE_VERSION, hash_of(source), tokenizer.fingerprint, tokenizer.pad_id]

    def make() -> tuple[Arrays, dict[str, Any]]:
        records = read_records(source)
        dataset, report = build(records, tokenizer, options, name=source, progress=progress)
        arrays = {
            "tokens": dataset.tokens,
            "part_lengths": np.column_stack([dataset.prompt_lengths, dataset.response_lengths]),
        }
        if dataset.labels is not None:
            arrays["labels"] = dataset.labels
        meta = {"fingerprint": dataset.fingerprint, "source": source, "report": asdict(report)}
        return arrays, meta

    path, meta = cached(cache_dir, [*key, asdict(options)], make)
    tokens = np.load(path / "tokens.npy", mmap_mode="r")
    lengths = np.load(path / "part_lengths.npy")
    dataset = contiguous(tokens, lengths, tokenizer.pad_id, meta["fingerprint"])
    if (path / "labels.npy").is_file():
        dataset = replace(dataset, labels=np.load(path / "labels.npy"))
    return dataset, ReadReport(**meta["report"])


def build(
    records: Iterator[RawRecord],
    tokenizer: Tokenizer,
    options: BuildOptions,
    *,
    name: str = "synthetic",
    progress: bool = False,
) -> tuple[ExampleDataset, ReadReport]:
    """Tokenize raw records. A bad one raises its DataError, or is counted where ``skip_errors``."""
    report = ReadReport(unit="responses", num_desirable=0) if options.unpaired else ReadReport()
    labels = array("d")
    items = usable_items(
        taken_apart(records) if options.unpaired else records,
        partial(_tokenize_chunk, tokenizer=tokenizer, options=options),
        report,
        name=name,
        skip_errors=options.skip_errors,
        progress=progress,
    )

    def pairs() -> Iterator[TokenizedExample]:
        for item in items:
            labels.append(item.label)
            report.num_truncated += item.was_cut
            report.num_cut_responses += item.cut_response
            chosen, *others = item.pair[1]
            report.num_equal += bool(others) and all(other == chosen for other in others)
            yield item.pair

    dataset = from_examples(pairs(), tokenizer.pad_id).with_labels(np.array(labels))
    if options.unpaired:
        report.num_desirable = int(sum(labels))
    check_not_empty(report, name)
    return dataset, report


def _tokenize_chunk(
    chunk: list[RawRecord], tokenizer: Tokenizer, options: BuildOptions
) -> list[Tokenized | DataError]:
    """The pair or the error of every record."""
    return tokenize_together(
        chunk,
        tokenizer,
        render=partial(_render_record, tokenizer=tokenizer, options=options),
        texts=lambda rendered: [rendered.prompt, *rendered.wholes],
        finish=partial(_finish, tokenizer=tokenizer, options=options),
    )


def _render_record(
    raw: dict[str, object], origin: str, tokenizer: Tokenizer, options: BuildOptions
) -> RenderedPair:
    if options.unpaired:
        record, label = to_response(raw, origin)
        return replace(render(record, tokenizer), label=float(label))
    rendered = render(to_record(raw, origin), tokenizer)
    return replace(rendered, label=to_margin(raw, origin)) if options.margins else rendered


def _finish(
    rendered: RenderedPair, ids: list[list[int]], tokenizer: Tokenizer, options: BuildOptions
) -> Tokenized:
    """Separate, truncate, and check against the row budget."""
    whole = separate(rendered, ids, tokenizer, add_eos=options.add_eos)
    pair = truncate(whole, options.limits, rendered.origin)
    budget = options.budget
    needed = example_tokens(pair, budget.layout, budget.packed)
    if needed > budget.row_tokens:
        raise DataError(
            rendered.origin,
            "longer than the row budget",
            f"it needs {needed} tokens of a row, over packing.row_tokens={budget.row_tokens}",
            "raise packing.row_tokens or lower data.max_length",
        )
    return Tokenized(pair, pair is not whole, pair[1] != whole[1], rendered.label)


def _synthetic_records(config: DataConfig, seed: int) -> Iterator[RawRecord]:
    """The generated task as raw records."""
    pairs = synthetic.generate(
        config.num_synthetic, seed, config.synthetic_length, config.synthetic_lengths
    )
    for number, values in enumerate(pairs):
        yield (
            f"synthetic:{number}",
            dict(zip(("prompt", "chosen", "rejected"), values, strict=True)),
        )


def _prepare_packed(
    config: DataConfig, packing: PackingConfig, tokenizer: Tokenizer, unpaired: bool
) -> PreparedData:
    """Rows packed offline; held-out data must be packed files of their own."""
    if config.train is None:
        raise ValueError("data.train is not set; name a directory of packed files")
    if config.eval is None and config.eval_fraction > 0:
        raise ValueError(
            f"data.eval_fraction={config.eval_fraction} cannot split packed rows; "
            "pack the held-out pairs into a directory of their own and name it in data.eval"
        )
    paths = [Path(path) for path in (config.train, config.eval) if path is not None]
    packed = [
        load_packed(path, tokenizer.fingerprint, packing.row_tokens, packing.row_layout)
        for path in paths
    ]
    for path, (dataset, _) in zip(paths, packed, strict=True):
        if dataset.num_responses != (1 if unpaired else 2):
            held, option = ("pairs", "with") if unpaired else ("single responses", "without")
            raise ValueError(f"{path} holds {held}; pack the data {option} --unpaired")
    reports = [packed_report(path) for path in paths]
    dataset, rows = packed[0]
    if config.eval is None:
        return PreparedData(dataset, None, reports[0], rows=rows)
    return PreparedData(dataset, packed[1][0], reports[0], reports[1], rows)
