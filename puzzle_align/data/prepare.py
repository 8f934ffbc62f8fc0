"""Prepare a config's data from its sources, packed files or the synthetic task."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from puzzle_align.config.sections.data import AddEos, DataConfig, PackingConfig
from puzzle_align.data import synthetic
from puzzle_align.data.blocks import GivenRecords
from puzzle_align.data.build import Preparation, columns_of
from puzzle_align.data.dataset import ExampleDataset, contiguous, split
from puzzle_align.data.errors import ReadReport
from puzzle_align.data.packed_files import load_packed
from puzzle_align.data.packing import Rows
from puzzle_align.data.pairs import Budget, BuildOptions, Limits, PairRecipe
from puzzle_align.data.prompts import PromptDataset, PromptOptions, load_prompts
from puzzle_align.data.sources import COLUMNS
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.files.messages import shown

D = TypeVar("D", ExampleDataset, PromptDataset)


@dataclass(frozen=True)
class Prepared(Generic[D]):
    """Training and held-out data of a job."""

    train: D
    report: ReadReport  # of the training source
    eval: D | None = None
    eval_report: ReadReport | None = None  # of data.eval
    rows: Rows | None = None  # ready-made rows of packed files, for ExampleLoader

    def datasets(self) -> dict[str, D]:
        """Training data and, if any, held-out data, by config key."""
        held_out = {} if self.eval is None else {"data.eval": self.eval}
        return {"data.train": self.train, **held_out}

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the data, by config key."""
        return {key: data.fingerprint for key, data in self.datasets().items()}

    @property
    def summary(self) -> str:
        """One line for the log."""
        line = f"data: {self.report.summary()}"
        if self.eval_report is not None:
            return f"{line}; held out: {self.eval_report.summary()}"
        return line if self.eval is None else f"{line}; {len(self.eval)} of them held out"


def prepare_data(
    config: DataConfig,
    packing: PackingConfig,
    tokenizer: Tokenizer,
    how: Preparation,
    *,
    add_eos: AddEos,
    seed: int,
    margins: bool = False,
    unpaired: bool = False,
) -> Prepared[ExampleDataset]:
    """Prepare the data of a preference stage; several processes may call it at once.

    Args:
        margins: read the column ``margin``.
        unpaired: read single responses, and split pairs.

    Raises:
        ValueError: one line, for bad data or settings.
    """
    for name in config.columns or ():
        if name not in COLUMNS:
            raise ValueError(
                f"data.columns.{shown(name)}: this stage reads no such column; it reads "
                f"{', '.join(COLUMNS)}"
            )
    if config.format == "packed":
        settings = packed_settings(config, packing, add_eos)
        if margins:  # another stage may read files with them
            settings["margins"] = True
        return _prepare_packed(config, settings, tokenizer, unpaired, how.verify)
    options = BuildOptions(
        add_eos,
        Limits(config.max_length, config.max_prompt_length, config.truncation_mode),
        Budget(packing.row_tokens, packing.row_layout, packing.is_packed),
        config.on_error == "skip",
        margins,
        unpaired,
        config.columns or {},
        config.comparisons,
        config.apply_chat_template,
    )
    source = _train_source(config, seed, ("prompt", "chosen", "rejected"))
    train, report = load_pairs(source, tokenizer, options, how)
    if config.eval is not None:
        held_out, eval_report = load_pairs(config.eval, tokenizer, options, how)
        return Prepared(train, report, held_out, eval_report)
    if config.eval_fraction > 0:
        train, held_out = split(train, config.eval_fraction, seed)
        return Prepared(train, report, held_out)
    return Prepared(train, report)


def packed_settings(config: DataConfig, packing: PackingConfig, add_eos: AddEos) -> dict[str, Any]:
    """The settings that packed files must share with the job, by key."""
    names = ("max_length", "max_prompt_length", "truncation_mode", "apply_chat_template")
    return {
        "packing.row_tokens": packing.row_tokens,
        "packing.layout": packing.row_layout,
        **{f"data.{name}": getattr(config, name) for name in names},
        "tokenizer.add_eos": add_eos,
        "data.comparisons": config.comparisons,
    }


def prepare_prompts(
    config: DataConfig, tokenizer: Tokenizer, how: Preparation, *, max_new_tokens: int, seed: int
) -> Prepared[PromptDataset]:
    """Prepare the prompts of a sampling stage; several processes may call it at once.

    Args:
        max_new_tokens: tokens of ``data.max_length`` reserved for the response.

    Raises:
        ValueError: one line, for bad data or settings.
    """
    if config.format == "packed":
        raise ValueError(
            "data.format=packed holds rows of preference pairs, not prompts: set it to auto"
        )
    limit = config.longest_prompt(max_new_tokens)
    skips = config.on_error == "skip"
    names, is_chat = config.columns or {}, config.apply_chat_template
    options = PromptOptions(limit, config.truncation_mode, skips, names, is_chat)
    source = _train_source(config, seed, ("prompt", "answer"))
    return Prepared(*load_prompts(source, tokenizer, options, how))


def load_pairs(
    source: str | GivenRecords, tokenizer: Tokenizer, options: BuildOptions, how: Preparation
) -> tuple[ExampleDataset, ReadReport]:
    """The tokenized pairs of a source, memory-mapped."""
    key = [tokenizer.fingerprint, tokenizer.pad_id, asdict(options)]
    names = dict.fromkeys((*COLUMNS, *options.columns.values()))
    recipe = PairRecipe(tokenizer, options)
    columns = columns_of(source, [*names], key, recipe, how)
    arrays, fingerprint = columns.arrays, columns.fingerprint
    lengths, levels = recipe.rectangles(arrays)
    labels, pad_id = arrays.get("labels"), tokenizer.pad_id
    dataset = contiguous(arrays["tokens"], lengths, pad_id, fingerprint, labels, levels)
    return dataset, columns.report


def _train_source(config: DataConfig, seed: int, names: tuple[str, ...]) -> str | GivenRecords:
    """The configured source, or generated records with their texts in columns ``names``."""
    if config.format == "synthetic":
        length, lengths = config.synthetic_length, config.synthetic_lengths
        pairs = synthetic.generate(config.num_synthetic, seed, length, lengths)
        records = (
            (f"synthetic:{number}", dict[str, Any](zip(names, texts, strict=False)))
            for number, texts in enumerate(pairs)
        )
        return GivenRecords("synthetic", records)
    if config.train is None:
        raise ValueError("data.train is not set; name a file, or set data.format=synthetic")
    return config.train


def _prepare_packed(
    config: DataConfig,
    settings: Mapping[str, Any],
    tokenizer: Tokenizer,
    unpaired: bool,
    verify: bool,
) -> Prepared[ExampleDataset]:
    """Open rows packed offline; held-out data must be other packed files."""
    if config.train is None:
        raise ValueError("data.train is not set; name a directory of packed files")
    if config.eval is None and config.eval_fraction > 0:
        raise ValueError(
            f"data.eval_fraction={config.eval_fraction} cannot split packed rows; "
            "pack the held-out pairs into a directory of their own and name it in data.eval"
        )
    packed = []
    for path in (Path(path) for path in (config.train, config.eval) if path is not None):
        files = load_packed(path, tokenizer, settings, check_tokens=verify)
        if (files.dataset.num_responses == 1) != unpaired:
            held = "pairs" if unpaired else "single responses"
            raise ValueError(f"{path} holds {held}; prepare the data with this job's config")
        packed.append(files)
    train, *others = packed
    held_out = (others[0].dataset, others[0].report) if others else (None, None)
    return Prepared(train.dataset, train.report, *held_out, rows=train.rows)
