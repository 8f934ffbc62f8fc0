"""From a source to a tokenized dataset: strict or skipping, cached by content hash."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from puzzle_align.config.sections.data import AddEos, DataConfig, PackingConfig
from puzzle_align.data import synthetic
from puzzle_align.data.blocks import GivenRecords, RawRecord
from puzzle_align.data.build import Columns, Part, Preparation, columns_of, gathered
from puzzle_align.data.cache import Kept
from puzzle_align.data.dataset import (
    Buffer,
    ExampleDataset,
    TokenizedExample,
    content_fingerprint,
    contiguous,
    labelled_fingerprint,
    split,
)
from puzzle_align.data.packed_files import load_packed
from puzzle_align.data.packing import Rows
from puzzle_align.data.pairs import Limits, RenderedPair, example_tokens, render, separate, truncate
from puzzle_align.data.reading import tokenize_together
from puzzle_align.data.records import DataError, ReadReport, to_margin, to_record
from puzzle_align.data.sources import COLUMNS, hash_source
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.data.unpaired import BLOCK, taken_apart, to_response


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
    verify: bool = True,
    hash_of: Callable[[str], str] = hash_source,
) -> PreparedData:
    """Training and held-out data as the config asks for; ValueError, one line, where it cannot be.

    ``margins``: read those of the data. ``unpaired``: single responses. The rest is
    ``Preparation``'s. Several processes may call it.
    """
    how = Preparation(cache_dir, config.num_proc, progress, verify, hash_of)
    options = BuildOptions(
        add_eos,
        Limits(config.max_length, config.max_prompt_length, config.truncation_mode),
        Budget(packing.row_tokens, packing.row_layout, packing.is_packed),
        config.on_error == "skip",
        margins,
        unpaired,
    )
    if config.format == "packed":
        return _prepare_packed(config, packing, tokenizer, unpaired=unpaired, verify=verify)
    if config.format == "synthetic":
        records = _synthetic_records(config, seed)
        train, report = build(records, tokenizer, options, progress=progress)
    elif config.train is None:
        raise ValueError("data.train is not set; name a file, or set data.format=synthetic")
    else:
        train, report = load(config.train, tokenizer, options, how)
    if config.eval is not None:
        held_out, eval_report = load(config.eval, tokenizer, options, how)
        return PreparedData(train, held_out, report, eval_report)
    if config.eval_fraction > 0:
        return PreparedData(*split(train, config.eval_fraction, seed), report)
    return PreparedData(train, None, report)


def load(
    source: str, tokenizer: Tokenizer, options: BuildOptions, how: Preparation
) -> tuple[ExampleDataset, ReadReport]:
    """The tokenized pairs of a source, from the cache where it has them, memory-mapped."""
    key = [tokenizer.fingerprint, tokenizer.pad_id, asdict(options)]
    columns = columns_of(source, COLUMNS, key, PairRecipe(tokenizer, options), how)
    return _dataset(columns, tokenizer), columns.report


def build(
    records: Iterable[RawRecord],
    tokenizer: Tokenizer,
    options: BuildOptions,
    *,
    name: str = "synthetic",
    progress: bool = False,
) -> tuple[ExampleDataset, ReadReport]:
    """Tokenize raw records. A bad one raises its DataError, or is counted where ``skip_errors``."""
    recipe, how = PairRecipe(tokenizer, options), Preparation(num_workers=1, progress=progress)
    columns = gathered(GivenRecords(iter(records)), recipe, name, how)
    return _dataset(columns, tokenizer), columns.report


def _dataset(columns: Columns, tokenizer: Tokenizer) -> ExampleDataset:
    arrays = columns.arrays
    dataset = contiguous(
        arrays["tokens"], arrays["part_lengths"], tokenizer.pad_id, columns.fingerprint
    )
    return replace(dataset, labels=arrays.get("labels"))


@dataclass(frozen=True)
class PairRecipe:
    """Pairs, or single responses, as columns. See ``Recipe``."""

    tokenizer: Tokenizer
    options: BuildOptions
    optional = ("labels",)

    @property
    def skip_errors(self) -> bool:
        """As the options have it."""
        return self.options.skip_errors

    @property
    def together(self) -> int:
        """Pairs are taken apart in groups."""
        return BLOCK if self.options.unpaired else 1

    @property
    def _num_parts(self) -> int:
        return 2 if self.options.unpaired else 3

    def new_report(self) -> ReadReport:
        """Of responses or pairs."""
        if self.options.unpaired:
            return ReadReport(unit="responses", num_desirable=0)
        return ReadReport()

    def records(self, raw: Iterator[RawRecord]) -> Iterator[RawRecord]:
        """Pairs taken apart where single responses are wanted."""
        return taken_apart(raw) if self.options.unpaired else raw

    def convert(self, chunk: list[RawRecord]) -> list[Tokenized | DataError]:
        """The pair or the error of every record."""
        given = {"tokenizer": self.tokenizer, "options": self.options}
        return tokenize_together(
            chunk,
            self.tokenizer,
            render=partial(_render_record, **given),
            texts=lambda rendered: [rendered.prompt, *rendered.wholes],
            finish=partial(_finish, **given),
            skip_errors=self.skip_errors,
        )

    def part(self, items: Iterator[Tokenized], report: ReadReport) -> Part:
        """``tokens``, ``part_lengths`` (int32 [n, 1 + K]) and ``labels``."""
        tokens, lengths, labels = array("i"), array("i"), array("d")
        for item in items:
            prompt, responses = item.pair
            for part in (prompt, *responses):
                tokens.extend(part)
                lengths.append(len(part))
            labels.append(item.label)
            report.num_truncated += item.was_cut
            report.num_cut_responses += item.cut_response
            chosen, *others = responses
            report.num_equal += bool(others) and all(other == chosen for other in others)
        if self.options.unpaired:
            report.num_desirable = int(sum(labels))
        arrays = {
            "tokens": np.array(tokens, np.int32),
            "part_lengths": np.array(lengths, np.int32).reshape(-1, self._num_parts),
            "labels": np.array(labels, np.float64),
        }
        return Part(arrays, report)

    def fingerprint(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str], Iterable[Buffer]],
    ) -> str:
        """As ``ExampleDataset`` has it."""
        content = (block for name in ("part_lengths", "tokens") for block in read(name))
        own = content_fingerprint(shapes["part_lengths"], self.tokenizer.pad_id, content)
        return labelled_fingerprint(own, read("labels")) if "labels" in shapes else own

    def problem(self, kept: Kept) -> str | None:
        """Tokens that are none, or lengths that are not theirs."""
        tokens, lengths = kept.columns["tokens"], kept.columns["part_lengths"]
        if not tokens.is_within(0, self.tokenizer.vocab_size):
            return f"tokens are from {tokens.least} to {tokens.most}"
        total = int(kept.arrays["part_lengths"].sum(dtype=np.int64))
        if not lengths.is_within(0, total + 1) or total != tokens.shape[0]:
            return f"lengths from {lengths.least}, in all {total}, of {tokens.shape[0]} tokens"
        return None


def _render_record(
    raw: dict[str, object], origin: str, tokenizer: Tokenizer, options: BuildOptions
) -> RenderedPair:
    if options.unpaired:
        record, label = to_response(raw, origin)
        return replace(render(record, tokenizer), label=float(label))
    rendered = render(to_record(raw, origin), tokenizer)
    return replace(rendered, label=to_margin(raw, origin)) if options.margins else rendered


def _finish(
    rendered: RenderedPair, ids: list[array], tokenizer: Tokenizer, options: BuildOptions
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
    config: DataConfig,
    packing: PackingConfig,
    tokenizer: Tokenizer,
    *,
    unpaired: bool,
    verify: bool,
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
        load_packed(path, tokenizer, packing.row_tokens, packing.row_layout, check_tokens=verify)
        for path in paths
    ]
    for path, files in zip(paths, packed, strict=True):
        if files.dataset.num_responses != (1 if unpaired else 2):
            held, option = ("pairs", "with") if unpaired else ("single responses", "without")
            raise ValueError(f"{path} holds {held}; pack the data {option} --unpaired")
    train, *others = packed
    if not others:
        return PreparedData(train.dataset, None, train.report, rows=train.rows)
    return PreparedData(
        train.dataset, others[0].dataset, train.report, others[0].report, train.rows
    )
