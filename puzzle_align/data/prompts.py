"""Prompts to sample responses to: build, store and draw them.

A record's column ``prompt`` is the prompt: a text, or a list of messages that the chat
template renders up to the beginning of the answer, as TRL's ``apply_chat_template`` does. Reward
functions get texts, messages and the other columns. These are stored as JSON lines in one byte
array (dates and decimals become text) and parsed one by one, since they may exceed memory. With
``data.apply_chat_template`` a text is rendered as one user message; reward functions get the text.

Shapes: n prompts.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from puzzle_align.data.blocks import GivenRecords
from puzzle_align.data.build import BlockColumns, Preparation, Recipe, columns_of
from puzzle_align.data.cache import Arrays
from puzzle_align.data.errors import DataError, ReadReport, TooLong
from puzzle_align.data.records import (
    Content,
    Message,
    checked_text,
    template_kwargs,
    to_prompt,
    user_messages,
)
from puzzle_align.data.tokenize import Tokenizer, rendering

_END = "END_OF_WHAT_IS_BEGUN "  # marks the end of an assistant's message to continue


@dataclass(frozen=True)
class PromptDataset:
    """Prompts as tokens, texts and messages, and their columns. Arrays may be memory-mapped."""

    tokens: np.ndarray  # int32 [total]
    prompt_starts: np.ndarray  # int64 [n], index into tokens
    prompt_lengths: np.ndarray  # int32 [n]
    # uint8 [bytes], a JSON line per prompt: [text, columns], or [rendered, columns, prompt]
    lines: np.ndarray
    line_starts: np.ndarray  # int64 [n], index into lines
    line_lengths: np.ndarray  # int64 [n]
    column_names: tuple[str, ...]  # of all records
    pad_id: int
    fingerprint: str  # hash of the content, the same on every machine

    def __len__(self) -> int:
        return len(self.prompt_starts)

    def prompt(self, index: int) -> np.ndarray:
        """Tokens of a prompt, int32."""
        start = self.prompt_starts[index]
        return self.tokens[start : start + self.prompt_lengths[index]]

    def text(self, index: int) -> str:
        """The prompt as rendered by the chat template; whole, even if its tokens were cut."""
        return self._line(index)[0]

    def as_given(self, index: int) -> Content:
        """The prompt as in its record: a text, or a list of messages."""
        text, _, *given = self._line(index)
        return given[0] if given else text

    def ending(self, index: int) -> str:
        """The end of the prompt without the chat template: the text of its last message."""
        given = self.as_given(index)
        return given if isinstance(given, str) else given[-1].get("content") or self.text(index)

    def columns(self, indices: Sequence[int] | np.ndarray) -> dict[str, list[Any]]:
        """The other columns of these prompts, by name; None where a record lacks one."""
        values = [self._line(index)[1] for index in indices]
        return {name: [value.get(name) for value in values] for name in self.column_names}

    def _line(self, index: int) -> list[Any]:
        start = self.line_starts[index]
        return json.loads(self.lines[start : start + self.line_lengths[index]].tobytes())


def prompt_indices(
    num_prompts: int, batch_size: int, step: int, seed: int, shuffle: bool
) -> np.ndarray:
    """Prompts of iteration ``step`` >= 0, int64 [batch_size], each below ``num_prompts``.

    Epochs follow each other without a gap, so that every iteration is full. Every prompt comes once
    an epoch, in a new order each epoch (``shuffle``) or in the data's.
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
class PromptOptions:
    """All options besides source and tokenizer that decide the dataset's content."""

    max_length: int  # of a prompt, in tokens
    truncation_mode: str  # keep_end, keep_start, drop or error
    skip_errors: bool
    columns: Mapping[str, str] = field(default_factory=dict)  # the source's names, by ours
    apply_chat_template: bool = False  # to texts


@dataclass(frozen=True)
class _Rendered:
    """A record before tokenization."""

    text: str
    is_chat: bool  # written by a chat template, special tokens included
    prompt: Content
    columns: dict[str, Any]
    origin: str


@dataclass(frozen=True)
class _Tokenized:
    """A usable record as token ids."""

    ids: array
    was_cut: bool
    line: bytes  # of ``PromptDataset.lines``
    columns: dict[str, Any]


@dataclass(frozen=True)
class PromptRecipe(Recipe[_Rendered, _Tokenized]):
    """Recipe of prompts."""

    options: PromptOptions

    def new_report(self) -> ReadReport:
        """An empty report of prompts."""
        return ReadReport(unit="prompts")

    def render(self, raw: dict[str, Any], origin: str) -> _Rendered:
        """A raw record as the text of its prompt."""
        prompt = to_prompt(raw, origin, as_chat=self.options.apply_chat_template)
        columns = {name: value for name, value in raw.items() if name != "prompt"}
        messages = prompt
        if isinstance(messages, str):
            if not self.options.apply_chat_template:
                return _Rendered(messages, False, prompt, columns, origin)
            messages = user_messages(messages, raw, origin)
        variables = template_kwargs(raw, origin)
        variables["tools"] = variables["tools"] or None  # Llama's templates announce an empty list
        with rendering(origin):
            text = _text(messages, variables, self.tokenizer)
        text = checked_text(text, "what the chat template writes", origin)
        return _Rendered(text, True, prompt, columns, origin)

    def texts(self, rendered: _Rendered) -> list[str]:
        """The prompt's text."""
        return [rendered.text]

    def finish(self, rendered: _Rendered, ids: list[array]) -> _Tokenized:
        """Add the tokenizer's BOS to plain text, and cut to the limit."""
        (tokens,), bos = ids, array("i", self.tokenizer.bos_ids)
        if not rendered.is_chat and tokens[: len(bos)] != bos:
            tokens = bos + tokens
        if not tokens:
            what = "the prompt has no tokens"
            raise DataError(rendered.origin, "empty prompt", what, "fill it in")
        values = [rendered.text, rendered.columns, *([rendered.prompt] if rendered.is_chat else [])]
        line = json.dumps(values, default=str).encode() + b"\n"
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
        """Tokens and lines, each in one array, and their lengths by prompt."""
        tokens, prompt_lengths, line_lengths = array("i"), array("i"), array("q")
        lines, names = bytearray(), dict[str, None]()
        for item in items:
            report.num_truncated += item.was_cut
            tokens.extend(item.ids)
            prompt_lengths.append(len(item.ids))
            lines += item.line
            line_lengths.append(len(item.line))
            names.update(dict.fromkeys(item.columns))
        arrays = {
            "tokens": np.array(tokens, np.int32),
            "prompt_lengths": np.array(prompt_lengths, np.int32),
            "lines": np.frombuffer(bytes(lines), np.uint8),
            "line_lengths": np.array(line_lengths, np.int64),
        }
        return BlockColumns(arrays, report, tuple(names))

    def fingerprint(self, arrays: Arrays) -> str:
        """Content hash for ``PromptDataset.fingerprint``."""
        number = len(arrays["prompt_lengths"])
        digest = hashlib.sha256(f"prompts {number} {self.tokenizer.pad_id}".encode())
        for name in ("prompt_lengths", "tokens", "lines"):
            digest.update(arrays[name].data)
        return digest.hexdigest()


def _text(prompt: list[Message], variables: dict[str, Any], tokenizer: Tokenizer) -> str:
    """The text to continue: up to the answer's beginning, or an assistant's unfinished message."""
    last = prompt[-1]
    if last["role"] != "assistant":
        return tokenizer.render_chat(prompt, variables, add_generation_prompt=True)
    if last.get("content") is None:
        raise ValueError("the assistant's last message has no text to continue")
    # As transformers' continue_final_message does.
    marked = [*prompt[:-1], {**last, "content": last["content"] + _END}]
    text = tokenizer.render_chat(marked, variables, add_generation_prompt=False)
    at = text.rfind(_END.strip())
    if at < 0:
        raise ValueError("the chat template does not write the assistant's last message whole")
    kept = text[:at]
    return kept if text.startswith(_END, at) else kept.rstrip()  # the template trims spaces


def load_prompts(
    source: str | GivenRecords, tokenizer: Tokenizer, options: PromptOptions, how: Preparation
) -> tuple[PromptDataset, ReadReport]:
    """The tokenized prompts of a source, memory-mapped."""
    key = ["prompts", tokenizer.fingerprint, tokenizer.pad_id, asdict(options)]
    columns = columns_of(source, None, key, PromptRecipe(tokenizer, options), how)
    lengths, line_lengths = columns.arrays["prompt_lengths"], columns.arrays["line_lengths"]
    prompts = PromptDataset(
        columns.arrays["tokens"],
        np.cumsum(lengths, dtype=np.int64) - lengths,
        lengths,
        columns.arrays["lines"],
        np.cumsum(line_lengths) - line_lengths,
        line_lengths,
        columns.column_names,
        tokenizer.pad_id,
        columns.fingerprint,
    )
    return prompts, columns.report
