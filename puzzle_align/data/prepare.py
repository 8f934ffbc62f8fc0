"""Training and held-out data of a config: tokenized sources, packed files, the generated task."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from puzzle_align.config.sections.data import AddEos, DataConfig, PackingConfig
from puzzle_align.data import synthetic
from puzzle_align.data.blocks import GivenRecords, RawRecord
from puzzle_align.data.build import Columns, Preparation, columns_of, gathered
from puzzle_align.data.dataset import (
    ExampleDataset,
    contiguous,
    split,
)
from puzzle_align.data.errors import ReadReport
from puzzle_align.data.packed_files import load_packed
from puzzle_align.data.packing import Rows
from puzzle_align.data.pairs import Budget, BuildOptions, Limits, PairRecipe
from puzzle_align.data.sources import COLUMNS, hash_source
from puzzle_align.data.tokenize import Tokenizer


@dataclass(frozen=True)
class PreparedData:
    """Training and held-out data of a preference stage."""

    train: ExampleDataset
    eval: ExampleDataset | None
    report: ReadReport  # of the training source
    eval_report: ReadReport | None = None  # of data.eval
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
    """Make the training and held-out data of a config. Several processes may call it.

    Args:
        margins: read the column ``margin``.
        unpaired: read single responses, and split pairs.
        cache_dir, progress, verify, hash_of: see ``Preparation``.

    Raises:
        ValueError: one line, for bad data or settings.
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
    """The tokenized pairs of a source, memory-mapped from the cache, which is filled if need be."""
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


def _synthetic_records(config: DataConfig, seed: int) -> Iterator[RawRecord]:
    """Raw records of the generated task."""
    pairs = synthetic.generate(
        config.num_synthetic, seed, config.synthetic_length, config.synthetic_lengths
    )
    for number, (prompt, chosen, rejected) in enumerate(pairs):
        raw = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        yield f"synthetic:{number}", raw


def _prepare_packed(
    config: DataConfig,
    packing: PackingConfig,
    tokenizer: Tokenizer,
    *,
    unpaired: bool,
    verify: bool,
) -> PreparedData:
    """Open rows packed offline; held-out data must be other packed files."""
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
