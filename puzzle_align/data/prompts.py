"""Prompts to sample responses to: how they are stored, drawn, and made from a source.

A record's column ``data.prompt_key`` is the prompt: text, or a list of messages that the chat
template ends where the answer begins, as TRL's ``apply_chat_template`` does. Reward functions get
texts, messages and the other columns: they are JSON lines in one byte array (dates and decimals
become text), which may be as large as the disk and are parsed one by one.

Shapes: n prompts.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.config.sections.data import DataConfig
from puzzle_align.data import synthetic
from puzzle_align.data.blocks import GivenRecords, RawRecord
from puzzle_align.data.build import (
    BlockColumns,
    Columns,
    Preparation,
    columns_of,
    gathered,
)
from puzzle_align.data.cache import Kept
from puzzle_align.data.dataset import Buffer
from puzzle_align.data.errors import DataError, ReadReport, TooLong
from puzzle_align.data.records import Message, Part, checked_text, template_kwargs, to_prompt
from puzzle_align.data.sources import hash_source
from puzzle_align.data.tokenize import Tokenizer, rendering

_END = "END_OF_WHAT_IS_BEGUN "  # marks the end of an assistant's unfinished message


@dataclass(frozen=True)
class PromptDataset:
    """Prompts as tokens, texts and messages, and their columns. Arrays may be memory-mapped."""

    tokens: np.ndarray  # int32 [total]
    prompt_starts: np.ndarray  # int64 [n], index into tokens
    prompt_lengths: np.ndarray  # int32 [n]
    # uint8 [bytes], JSON a prompt: [text, columns], of messages [text, columns, messages]
    lines: np.ndarray
    line_starts: np.ndarray  # int64 [n], index into lines
    line_lengths: np.ndarray  # int64 [n]
    column_names: tuple[str, ...]  # of all records
    pad_id: int
    fingerprint: str  # hash of the content, the same wherever it was built

    def __len__(self) -> int:
        return len(self.prompt_starts)

    def prompt(self, index: int) -> np.ndarray:
        """Tokens of prompt ``index``, int32."""
        start = self.prompt_starts[index]
        return self.tokens[start : start + self.prompt_lengths[index]]

    def text(self, index: int) -> str:
        """Prompt ``index`` as text, chat template included; whole, even if its tokens were cut."""
        return self._line(index)[0]

    def as_given(self, index: int) -> Part:
        """Prompt ``index`` as in its record: text, or a list of messages."""
        text, _, *messages = self._line(index)
        return messages[0] if messages else text

    def columns(self, indices: Sequence[int] | np.ndarray) -> dict[str, list[Any]]:
        """Other columns of prompts, in order; None if a record lacks one."""
        values = [self._line(index)[1] for index in indices]
        return {name: [value.get(name) for value in values] for name in self.column_names}

    def _line(self, index: int) -> list[Any]:
        start = self.line_starts[index]
        return json.loads(self.lines[start : start + self.line_lengths[index]].tobytes())


def contiguous_prompts(
    tokens: np.ndarray,
    prompt_lengths: np.ndarray,
    lines: np.ndarray,
    line_lengths: np.ndarray,
    column_names: tuple[str, ...],
    pad_id: int,
    fingerprint: str,
) -> PromptDataset:
    """Make a dataset whose prompts, and lines, lie one after the other."""
    return PromptDataset(
        tokens,
        np.cumsum(prompt_lengths, dtype=np.int64) - prompt_lengths,
        prompt_lengths,
        lines,
        np.cumsum(line_lengths) - line_lengths,
        line_lengths,
        column_names,
        pad_id,
        fingerprint,
    )


def prompts_fingerprint(number: int, pad_id: int, content: Iterable[bytes | memoryview]) -> str:
    """Hash a dataset; ``content`` is its prompts' lengths, then tokens, then lines."""
    digest = hashlib.sha256(f"prompts {number} {pad_id}".encode())
    for block in content:
        digest.update(block)
    return digest.hexdigest()


def prompt_indices(
    num_prompts: int, batch_size: int, step: int, seed: int, shuffle: bool
) -> np.ndarray:
    """Prompts of iteration ``step`` >= 0, int64 [batch_size], each below ``num_prompts``.

    Epochs follow each other without a gap: every iteration is full, and every prompt comes once an
    epoch, in a new order each epoch (``shuffle``) or in the data's.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64)
    epochs, offsets = np.divmod(places, num_prompts)
    if not shuffle:
        return offsets
    indices = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        order = np.random.default_rng([seed, epoch]).permutation(num_prompts)
        indices[epochs == epoch] = order[offsets[epochs == epoch]]
    return indices


@dataclass(frozen=True)
class PreparedPrompts:
    """Prompts of stage ppo, and the report of reading them."""

    train: PromptDataset
    report: ReadReport

    @property
    def summary(self) -> str:
        """One line for the log."""
        return f"data: {self.report.summary()}"

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint of the prompts, by the key that names their source."""
        return {"data.train": self.train.fingerprint}


@dataclass(frozen=True)
class PromptOptions:
    """Everything besides source and tokenizer that decides what a dataset of prompts holds."""

    prompt_key: str
    max_length: int  # of a prompt, in tokens
    truncation_mode: str  # keep_end, keep_start, drop or error
    skip_errors: bool


@dataclass(frozen=True)
class _Rendered:
    """A record before tokenization."""

    text: str
    prompt: Part
    columns: dict[str, Any]
    origin: str


@dataclass(frozen=True)
class _Tokenized:
    """A record that can be used."""

    ids: array
    was_cut: bool
    line: list[Any]  # of ``PromptDataset.lines``
    columns: dict[str, Any]


def prepare_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    seed: int,
    cache_dir: Path | None,
    progress: bool = False,
    verify: bool = True,
    hash_of: Callable[[str], str] = hash_source,
) -> PreparedPrompts:
    """Make the prompts that the config asks for. Several processes may call it.

    Args:
        max_new_tokens: tokens of ``data.max_length`` that are a response's.
        cache_dir, progress, verify, hash_of: see ``Preparation``.

    Raises:
        ValueError: one line, for bad data or settings.
    """
    key = "prompt" if config.format == "synthetic" else config.prompt_key
    limit = config.longest_prompt(max_new_tokens)
    options = PromptOptions(key, limit, config.truncation_mode, config.on_error == "skip")
    if config.format == "packed":
        raise ValueError(
            "data.format=packed holds rows of preference pairs, not prompts: set it to auto"
        )
    if config.format == "synthetic":
        records = _synthetic_records(config, seed)
        train, report = build_prompts(records, tokenizer, options, progress=progress)
    elif config.train is None:
        raise ValueError("data.train is not set; name a file, or set data.format=synthetic")
    else:
        how = Preparation(cache_dir, config.num_proc, progress, verify, hash_of)
        train, report = load_prompts(config.train, tokenizer, options, how)
    return PreparedPrompts(train, report)


def load_prompts(
    source: str, tokenizer: Tokenizer, options: PromptOptions, how: Preparation
) -> tuple[PromptDataset, ReadReport]:
    """The prompts of a source, memory-mapped from the cache, which is filled if need be."""
    key = ["prompts", tokenizer.fingerprint, tokenizer.pad_id, asdict(options)]
    columns = columns_of(source, None, key, PromptRecipe(tokenizer, options), how)
    return _dataset(columns, tokenizer), columns.report


def build_prompts(
    records: Iterable[RawRecord],
    tokenizer: Tokenizer,
    options: PromptOptions,
    *,
    name: str = "synthetic",
    progress: bool = False,
) -> tuple[PromptDataset, ReadReport]:
    """Tokenize raw records. A bad one raises its DataError, or is counted where ``skip_errors``."""
    recipe, how = PromptRecipe(tokenizer, options), Preparation(num_workers=1, progress=progress)
    columns = gathered(GivenRecords(iter(records)), recipe, name, how)
    return _dataset(columns, tokenizer), columns.report


def _dataset(columns: Columns, tokenizer: Tokenizer) -> PromptDataset:
    return contiguous_prompts(
        **columns.arrays,
        column_names=columns.column_names,
        pad_id=tokenizer.pad_id,
        fingerprint=columns.fingerprint,
    )


@dataclass(frozen=True)
class PromptRecipe:
    """``Recipe`` of prompts."""

    tokenizer: Tokenizer
    options: PromptOptions
    optional = ()
    together = 1

    @property
    def skip_errors(self) -> bool:
        """Whether bad records are counted, by the options."""
        return self.options.skip_errors

    def new_report(self) -> ReadReport:
        """Empty report of prompts."""
        return ReadReport(unit="prompts")

    def records(self, raw: Iterator[RawRecord]) -> Iterator[RawRecord]:
        """The raw records."""
        return raw

    def render(self, raw: dict[str, Any], origin: str) -> _Rendered:
        """A raw record as the text of its prompt."""
        key = self.options.prompt_key
        prompt = to_prompt(raw, key, origin)
        columns = {name: value for name, value in raw.items() if name != key}
        if isinstance(prompt, str):
            return _Rendered(prompt, prompt, columns, origin)
        variables = template_kwargs(raw, origin)
        variables["tools"] = variables["tools"] or None  # Llama's templates announce an empty list
        with rendering(origin):
            text = _text(prompt, variables, self.tokenizer)
        text = checked_text(text, "what the chat template writes", origin)
        return _Rendered(text, prompt, columns, origin)

    def texts(self, rendered: _Rendered) -> list[str]:
        """The prompt's text."""
        return [rendered.text]

    def finish(self, rendered: _Rendered, ids: list[array]) -> _Tokenized:
        """Add the tokenizer's BOS to plain text, and cut to the limit."""
        (tokens,), bos = ids, array("i", self.tokenizer.bos_ids)
        is_chat = not isinstance(rendered.prompt, str)  # templates write special tokens themselves
        if not is_chat and tokens[: len(bos)] != bos:
            tokens = bos + tokens
        if not tokens:
            what = "the prompt has no tokens"
            raise DataError(rendered.origin, "empty prompt", what, "fill it in")
        line = [rendered.text, rendered.columns, *([rendered.prompt] if is_chat else [])]
        limit, mode = self.options.max_length, self.options.truncation_mode
        if len(tokens) <= limit:
            return _Tokenized(tokens, False, line, rendered.columns)
        if mode in ("error", "drop"):
            raise (DataError if mode == "error" else TooLong)(
                rendered.origin,
                "too long",
                f"the prompt has {len(tokens)} tokens, over the {limit} that"
                " data.max_prompt_length, or data.max_length less generation.max_new_tokens,"
                " leaves it",
                "raise it or set data.truncation_mode to keep_end or keep_start",
            )
        kept = tokens[-limit:] if mode == "keep_end" else tokens[:limit]
        return _Tokenized(kept, True, line, rendered.columns)

    def columns(self, items: Iterator[_Tokenized], report: ReadReport) -> BlockColumns:
        """Arrays of ``contiguous_prompts``."""
        tokens, prompt_lengths, line_lengths = array("i"), array("i"), array("q")
        lines, names = bytearray(), dict[str, None]()
        for item in items:
            report.num_truncated += item.was_cut
            tokens.extend(item.ids)
            prompt_lengths.append(len(item.ids))
            line = json.dumps(item.line, default=str).encode() + b"\n"
            lines += line
            line_lengths.append(len(line))
            names.update(dict.fromkeys(item.columns))
        arrays = {
            "tokens": np.array(tokens, np.int32),
            "prompt_lengths": np.array(prompt_lengths, np.int32),
            "lines": np.frombuffer(bytes(lines), np.uint8),
            "line_lengths": np.array(line_lengths, np.int64),
        }
        return BlockColumns(arrays, report, tuple(names))

    def fingerprint(
        self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Iterable[Buffer]]
    ) -> str:
        """``PromptDataset.fingerprint`` of the columns."""
        content = (b for name in ("prompt_lengths", "tokens", "lines") for b in read(name))
        (number,) = shapes["prompt_lengths"]
        return prompts_fingerprint(number, self.tokenizer.pad_id, content)

    def problem(self, kept: Kept) -> str | None:
        """Name tokens beyond the vocabulary, and lengths that do not add up to their content."""
        tokens = kept.columns["tokens"]
        if not tokens.is_within(0, self.tokenizer.vocab_size):
            return f"tokens are from {tokens.least} to {tokens.most}"
        for name, content in (("prompt_lengths", "tokens"), ("line_lengths", "lines")):
            lengths, number = kept.columns[name], kept.columns[content].shape[0]
            total = int(kept.arrays[name].sum(dtype=np.int64))
            if not lengths.is_within(0, total + 1) or total != number:
                return f"{name} from {lengths.least}, in all {total}, of {number} {content}"
        return None


def _text(prompt: list[Message], variables: dict[str, Any], tokenizer: Tokenizer) -> str:
    """The text to continue; an assistant's last message is left unfinished."""
    last = prompt[-1]
    if last["role"] != "assistant":
        return tokenizer.render_chat(prompt, variables, add_generation_prompt=True)
    if last.get("content") is None:
        raise ValueError("the assistant's last message has no text to continue")
    # Like transformers' continue_final_message.
    marked = [*prompt[:-1], {**last, "content": last["content"] + _END}]
    text = tokenizer.render_chat(marked, variables, add_generation_prompt=False)
    at = text.rfind(_END.strip())
    if at < 0:
        raise ValueError("the chat template does not write the assistant's last message whole")
    kept = text[:at]
    return kept if text.startswith(_END, at) else kept.rstrip()  # else spaces are trimmed


def _synthetic_records(config: DataConfig, seed: int) -> Iterator[RawRecord]:
    """Prompts of the generated task, with the right letter in column ``answer``."""
    pairs = synthetic.generate(
        config.num_synthetic, seed, config.synthetic_length, config.synthetic_lengths
    )
    for number, (prompt, chosen, _) in enumerate(pairs):
        yield f"synthetic:{number}", {"prompt": prompt, "answer": chosen}
