"""From a source to a dataset of prompts: strict or skipping, cached by content hash.

A record's column ``data.prompt_key`` is the prompt: text, or a list of messages that the template,
told of the record's ``tools`` and ``chat_template_kwargs``, ends where the answer begins, as TRL's
``apply_chat_template`` does. What the other columns hold that JSON has no form for (dates,
decimals) becomes text.
"""

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.config.sections.data import DataConfig
from puzzle_align.data import synthetic
from puzzle_align.data.cache import Arrays, cached
from puzzle_align.data.prompts import PromptDataset, contiguous_prompts
from puzzle_align.data.reading import check_not_empty, tokenize_together, usable_items
from puzzle_align.data.records import (
    DataError,
    Message,
    Part,
    ReadReport,
    TooLong,
    template_kwargs,
    to_prompt,
)
from puzzle_align.data.sources import RawRecord, hash_source, read_records
from puzzle_align.data.tokenize import Tokenizer

CACHE_VERSION = 3
_END = "END_OF_WHAT_IS_BEGUN "  # a mark in what templates write


@dataclass(frozen=True)
class PreparedPrompts:
    """What stage ppo samples responses to."""

    train: PromptDataset
    report: ReadReport

    @property
    def summary(self) -> str:
        """What was read, in one line."""
        return f"data: {self.report.summary()}"


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

    ids: list[int]
    was_cut: bool
    line: list[Any]  # as ``PromptDataset.lines`` has it
    columns: dict[str, Any]


def prepare_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    seed: int,
    cache_dir: Path | None,
    progress: bool = False,
    hash_of: Callable[[str], str] = hash_source,
) -> PreparedPrompts:
    """The prompts that the config asks for; ValueError, one line, where it cannot.

    ``max_new_tokens`` is the room that ``data.max_length`` leaves to a response, and there must be
    some for a prompt. ``cache_dir`` None: tokenize anew. ``progress``: show a bar. ``hash_of``:
    a source's hash, where it is known. Several processes may call it.
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
        train, report = load_prompts(
            config.train, tokenizer, options, cache_dir, progress=progress, hash_of=hash_of
        )
    return PreparedPrompts(train, report)


def load_prompts(
    source: str,
    tokenizer: Tokenizer,
    options: PromptOptions,
    cache_dir: Path | None,
    *,
    progress: bool = False,
    hash_of: Callable[[str], str] = hash_source,
) -> tuple[PromptDataset, ReadReport]:
    """The prompts of a source, from the cache where it has them, memory-mapped."""
    if cache_dir is None:
        records = read_records(source, columns=None)
        return build_prompts(records, tokenizer, options, name=source, progress=progress)
    key = ["prompts", CACHE_VERSION, hash_of(source), tokenizer.fingerprint, tokenizer.pad_id]

    def make() -> tuple[Arrays, dict[str, Any]]:
        records = read_records(source, columns=None)
        dataset, report = build_prompts(records, tokenizer, options, name=source, progress=progress)
        names = ("tokens", "prompt_lengths", "lines", "line_lengths")
        meta = {
            "fingerprint": dataset.fingerprint,
            "source": source,
            "column_names": dataset.column_names,
            "report": asdict(report),
        }
        return {name: getattr(dataset, name) for name in names}, meta

    path, meta = cached(cache_dir, [*key, asdict(options)], make)
    dataset = contiguous_prompts(
        np.load(path / "tokens.npy", mmap_mode="r"),
        np.load(path / "prompt_lengths.npy"),
        np.load(path / "lines.npy", mmap_mode="r"),
        np.load(path / "line_lengths.npy"),
        tuple(meta["column_names"]),
        tokenizer.pad_id,
        meta["fingerprint"],
    )
    return dataset, ReadReport(**meta["report"])


def build_prompts(
    records: Iterator[RawRecord],
    tokenizer: Tokenizer,
    options: PromptOptions,
    *,
    name: str = "synthetic",
    progress: bool = False,
) -> tuple[PromptDataset, ReadReport]:
    """Tokenize raw records. A bad one raises its DataError, or is counted where ``skip_errors``."""
    report = ReadReport(unit="prompts")
    tokens, prompt_lengths, line_lengths = array("i"), array("i"), array("q")
    lines, names = bytearray(), dict[str, None]()
    for item in usable_items(
        records,
        partial(_tokenize_chunk, tokenizer=tokenizer, options=options),
        report,
        name=name,
        skip_errors=options.skip_errors,
        progress=progress,
    ):
        report.num_truncated += item.was_cut
        tokens.extend(item.ids)
        prompt_lengths.append(len(item.ids))
        line = json.dumps(item.line, default=str).encode() + b"\n"
        lines += line
        line_lengths.append(len(line))
        names.update(dict.fromkeys(item.columns))
    check_not_empty(report, name)
    dataset = contiguous_prompts(
        np.array(tokens, dtype=np.int32),
        np.array(prompt_lengths, dtype=np.int32),
        np.frombuffer(lines, dtype=np.uint8),
        np.array(line_lengths, dtype=np.int64),
        tuple(names),
        tokenizer.pad_id,
    )
    return dataset, report


def _tokenize_chunk(
    chunk: list[RawRecord], tokenizer: Tokenizer, options: PromptOptions
) -> list[_Tokenized | DataError]:
    """The prompt or the error of every record."""
    return tokenize_together(
        chunk,
        tokenizer,
        render=partial(_render_record, tokenizer=tokenizer, key=options.prompt_key),
        texts=lambda rendered: [rendered.text],
        finish=partial(_finish, tokenizer=tokenizer, options=options),
    )


def _render_record(raw: dict[str, Any], origin: str, tokenizer: Tokenizer, key: str) -> _Rendered:
    prompt = to_prompt(raw, key, origin)
    columns = {name: value for name, value in raw.items() if name != key}
    if isinstance(prompt, str):
        return _Rendered(prompt, prompt, columns, origin)
    given = template_kwargs(raw, origin)
    given["tools"] = given["tools"] or None  # Llama's templates write of tools where there are none
    try:
        return _Rendered(_text(prompt, given, tokenizer), prompt, columns, origin)
    except ValueError as error:
        cure = "correct the messages, or set tokenizer.chat_template"
        raise DataError(origin, "chat template", str(error), cure) from None


def _text(prompt: list[Message], given: dict[str, Any], tokenizer: Tokenizer) -> str:
    """A prompt as the text to go on from; an assistant's last message is begun, not ended."""
    last = prompt[-1]
    if last["role"] != "assistant":
        return tokenizer.render_chat(prompt, given, add_generation_prompt=True)
    if last.get("content") is None:
        raise ValueError("the assistant's last message has no text to go on from")
    # As transformers' continue_final_message.
    marked = [*prompt[:-1], {**last, "content": last["content"] + _END}]
    text = tokenizer.render_chat(marked, given, add_generation_prompt=False)
    at = text.rfind(_END.strip())
    if at < 0:
        raise ValueError("the chat template does not write the assistant's last message whole")
    kept = text[:at]
    return kept if text.startswith(_END, at) else kept.rstrip()  # else spaces are trimmed


def _finish(
    rendered: _Rendered, texts: list[list[int]], tokenizer: Tokenizer, options: PromptOptions
) -> _Tokenized:
    """Begin as the tokenizer's texts begin, and cut to the limit."""
    (ids,), bos = texts, tokenizer.bos_ids
    is_chat = not isinstance(rendered.prompt, str)  # the template writes the special tokens itself
    if not is_chat and ids[: len(bos)] != bos:
        ids = bos + ids
    if not ids:
        what = "the prompt has no tokens"
        raise DataError(rendered.origin, "empty prompt", what, "fill it in")
    line = [rendered.text, rendered.columns, *([rendered.prompt] if is_chat else [])]
    limit = options.max_length
    if len(ids) <= limit:
        return _Tokenized(ids, False, line, rendered.columns)
    if options.truncation_mode in ("error", "drop"):
        raise (DataError if options.truncation_mode == "error" else TooLong)(
            rendered.origin,
            "too long",
            f"the prompt has {len(ids)} tokens, over the {limit} that data.max_prompt_length, or"
            " data.max_length less generation.max_new_tokens, leaves it",
            "raise it or set data.truncation_mode to keep_end or keep_start",
        )
    kept = ids[-limit:] if options.truncation_mode == "keep_end" else ids[:limit]
    return _Tokenized(kept, True, line, rendered.columns)


def _synthetic_records(config: DataConfig, seed: int) -> Iterator[RawRecord]:
    """The generated task's prompts, with the right letter as column ``answer``."""
    pairs = synthetic.generate(
        config.num_synthetic, seed, config.synthetic_length, config.synthetic_lengths
    )
    for number, (prompt, chosen, _) in enumerate(pairs):
        yield f"synthetic:{number}", {"prompt": prompt, "answer": chosen}
