"""Tokenize pairs and single responses: separate prompts from responses, and truncate.

Invariants (the tests assert them):
- prompt + response is the tokenization of the whole text; the prompt is the common token prefix of
  the prompt text's tokenization and all whole texts', so that a token that straddles the boundary
  belongs to the response;
- every response has at least one predicted token. A prompt may be empty: then nothing predicts the
  responses' first tokens, and they are left out of the loss, as in TRL.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from puzzle_align.config.sections.data import AddEos, Comparisons
from puzzle_align.data.blocks import RawRecord
from puzzle_align.data.build import BlockColumns, Recipe
from puzzle_align.data.cache import Arrays
from puzzle_align.data.dataset import TokenizedExample, content_fingerprint
from puzzle_align.data.errors import DataError, ReadReport, TooLong
from puzzle_align.data.packing import slot_lengths
from puzzle_align.data.records import (
    UNPAIRED_BLOCK,
    Record,
    as_messages,
    checked_text,
    shared_length,
    taken_apart,
    to_margin,
    to_record,
    to_response,
)
from puzzle_align.data.tokenize import Tokenizer, rendering
from puzzle_align.layout.rows import SLOT_MULTIPLE


@dataclass(frozen=True)
class Limits:
    """Limits of a tokenized pair, in tokens."""

    max_length: int  # prompt plus the longest response
    max_prompt_length: int | None = None
    truncation_mode: str = "keep_end"  # see ``truncate``


@dataclass(frozen=True)
class Budget:
    """The row that a pair must fit."""

    row_tokens: int
    layout: str
    packed: bool


@dataclass(frozen=True)
class BuildOptions:
    """All options besides source and tokenizer that decide the token ids."""

    add_eos: AddEos
    limits: Limits
    budget: Budget
    skip_errors: bool
    margins: bool = False  # read the margins of pairs
    unpaired: bool = False  # read single responses, and split pairs
    columns: Mapping[str, str] = field(default_factory=dict)  # the source's names, by ours
    comparisons: Comparisons = "all"  # of rankings
    apply_chat_template: bool = False  # to texts


@dataclass(frozen=True)
class Tokenized:
    """A usable record as token ids."""

    pair: TokenizedExample
    was_cut: bool  # truncated at all
    cut_response: bool
    label: float  # see ``ExampleDataset``
    tied: tuple[bool, ...]  # see ``Record``


@dataclass(frozen=True)
class RenderedPair:
    """A record as texts to tokenize."""

    prompt: str
    wholes: tuple[str, ...]  # prompt + response, for every response
    closed: tuple[bool, ...]  # whether each response's text ends with the end-of-sequence token
    is_chat: bool  # rendered by a chat template, which writes special tokens itself
    origin: str
    label: float = 0.0  # see ``ExampleDataset``
    tied: tuple[bool, ...] = ()  # see ``Record``


def render(record: Record, tokenizer: Tokenizer, label: float = 0.0) -> RenderedPair:
    """Render a record as texts; conversations go through the chat template.

    The prompt always ends with the template's generation prompt. ``separate`` drops those of its
    tokens that the whole texts lack: templates may write an answer's beginning differently.
    """
    prompt, eos = record.prompt, tokenizer.eos_text
    if isinstance(prompt, str):
        responses = [text for text in record.responses if isinstance(text, str)]
        wholes = tuple(prompt + text for text in responses)
        closed = tuple(bool(eos) and text.endswith(eos) for text in responses)
        return RenderedPair(prompt, wholes, closed, False, record.origin, label, record.tied)
    variables = record.template_kwargs
    with rendering(record.origin):
        text = tokenizer.render_chat(prompt, variables, add_generation_prompt=True)
        wholes = tuple(
            tokenizer.render_chat(prompt + response, variables, add_generation_prompt=False)
            for response in record.responses
            if isinstance(response, list)
        )
    for rendered in (text, *wholes):
        checked_text(rendered, "what the chat template writes", record.origin)
    closed = tuple(bool(eos) and whole.rstrip().endswith(eos) for whole in wholes)
    return RenderedPair(text, wholes, closed, True, record.origin, label, record.tied)


def separate(
    rendered: RenderedPair, ids: list[array], tokenizer: Tokenizer, *, add_eos: AddEos
) -> TokenizedExample:
    """Separate prompt and responses; ``ids`` are the tokens of the prompt and of each whole."""
    bos, none = array("i", tokenizer.bos_ids), array("i")
    start = none if rendered.is_chat or ids[0][: len(bos)] == bos else bos
    # A template ends messages itself, unless the EOS token has no text to write.
    adds = not (rendered.is_chat and tokenizer.eos_text) if add_eos == "auto" else add_eos
    eos = array("i", [tokenizer.eos_id]) if adds and tokenizer.eos_id is not None else none
    prompt = start + ids[0]
    wholes = [
        start + whole + (none if is_closed else eos)
        for whole, is_closed in zip(ids[1:], rendered.closed, strict=True)
    ]
    boundary = shared_length(prompt, *wholes)
    if min(map(len, wholes)) <= max(boundary, 1):
        raise DataError(
            rendered.origin,
            "empty response",
            "a response has no token to predict",
            "fill it in, or end all responses with a token: tokenizer.add_eos=true",
        )
    return wholes[0][:boundary], [whole[boundary:] for whole in wholes]


def truncate(pair: TokenizedExample, limits: Limits, origin: str) -> TokenizedExample:
    """Truncate a pair to the limits; return the same pair if it is within them.

    A prompt over ``max_prompt_length`` is cut to it. If prompt plus longest response is still over
    ``max_length``, ``truncation_mode`` decides:
    - keep_end: cut the prompt's beginning, down to ``max_prompt_length`` (default: half of
      ``max_length``), then the end of every response;
    - keep_start, as in TRL's DPO: cut the end of every prompt plus response.

    Raises:
        TooLong: the mode is drop and a limit is exceeded, or keep_start leaves no response token.
        DataError: the mode is error and a limit is exceeded.
    """
    prompt, responses = pair
    longest, mode = max(len(response) for response in responses), limits.truncation_mode
    cap = limits.max_prompt_length or len(prompt)
    if len(prompt) <= cap and len(prompt) + longest <= limits.max_length:
        return pair
    keep = min(len(prompt), cap)
    leaves_none = mode == "keep_start" and keep >= limits.max_length
    if mode in ("drop", "error") or leaves_none:
        bound = f"data.max_length={limits.max_length}"
        if len(prompt) > cap:
            bound = f"data.max_prompt_length={limits.max_prompt_length}"
        raise (DataError if mode == "error" else TooLong)(
            origin,
            "too long",
            f"{len(prompt)} prompt and {longest} response tokens are over {bound}",
            "raise it or set data.truncation_mode to keep_end",
        )
    if mode == "keep_start":
        kept = prompt[:keep]
    else:
        floor = min(limits.max_prompt_length or limits.max_length // 2, limits.max_length - 1)
        keep = max(min(keep, limits.max_length - longest), min(keep, floor))
        kept = prompt[-keep:]
    return kept, [response[: limits.max_length - keep] for response in responses]


def example_tokens(example: TokenizedExample, layout: str, packed: bool) -> int:
    """Row tokens of a single example, packed or in padded slots."""
    prompt, responses = example
    if packed:
        copies = 1 if layout == "shared" else len(responses)
        return copies * len(prompt) + sum(map(len, responses))
    prompt_lengths = np.array([len(prompt)])
    response_lengths = np.array([[len(response) for response in responses]])
    slots = 1 if layout == "shared" else len(responses)
    return slots * int(slot_lengths(prompt_lengths, response_lengths, layout, SLOT_MULTIPLE)[0])


@dataclass(frozen=True)
class PairRecipe(Recipe[RenderedPair, Tokenized]):
    """Recipe of pairs, or of single responses."""

    options: BuildOptions
    optional = ("labels", "others", "tied")

    @property
    def together(self) -> int:
        """Pairs that are split together, for unpaired data."""
        return UNPAIRED_BLOCK if self.options.unpaired else 1

    def new_report(self) -> ReadReport:
        """An empty report of responses or pairs."""
        if self.options.unpaired:
            return ReadReport(unit="responses", num_desirable=0)
        return ReadReport()

    def records(self, raw: Iterator[RawRecord]) -> Iterator[RawRecord]:
        """The records; for unpaired data, pairs are split."""
        if not self.options.unpaired:
            return raw
        return taken_apart(raw, as_chat=self.options.apply_chat_template)

    def render(self, raw: dict[str, object], origin: str) -> RenderedPair:
        """A raw record as texts."""
        label, as_chat = 0.0, self.options.apply_chat_template
        if self.options.unpaired:
            record, label = to_response(raw, origin)
        else:
            record = to_record(raw, origin, self.options.comparisons, as_chat=as_chat)
        if as_chat:
            record = as_messages(record, raw)
        if self.options.margins:
            label = to_margin(raw, origin)
        return render(record, self.tokenizer, label)

    def texts(self, rendered: RenderedPair) -> list[str]:
        """The prompt, and the prompt with every response."""
        return [rendered.prompt, *rendered.wholes]

    def finish(self, rendered: RenderedPair, ids: list[array]) -> Tokenized:
        """Separate prompt and responses, truncate, and check the row budget."""
        options, budget = self.options, self.options.budget
        whole = separate(rendered, ids, self.tokenizer, add_eos=options.add_eos)
        pair = truncate(whole, options.limits, rendered.origin)
        needed = example_tokens(pair, budget.layout, budget.packed)
        if needed > budget.row_tokens:
            raise DataError(
                rendered.origin,
                "longer than the row budget",
                f"it needs {needed} tokens of a row, over packing.row_tokens={budget.row_tokens}",
                "raise packing.row_tokens or lower data.max_length",
            )
        cut_response = pair[1] != whole[1]
        tied = rendered.tied or (False,) * len(pair[1])
        return Tokenized(pair, pair is not whole, cut_response, rendered.label, tied)

    def columns(self, items: Iterator[Tokenized], report: ReadReport) -> BlockColumns:
        """``tokens``, and ``part_lengths`` and ``labels``; for rankings, ``others`` and ``tied``.

        ``part_lengths`` (int32) are those of a prompt and its responses, example after example;
        ``others`` (int32 [n]) the number of responses beyond a pair's; ``tied`` (uint8) has a
        response's ``Record.tied``.
        """
        tokens, lengths, labels = array("i"), array("i"), array("d")
        others, all_tied, usual = array("i"), bytearray(), self._num_responses
        for item in items:
            prompt, responses = item.pair
            for part in (prompt, *responses):
                tokens.extend(part)
                lengths.append(len(part))
            labels.append(item.label)
            others.append(len(responses) - usual)
            all_tied += bytes(item.tied)
            report.num_truncated += item.was_cut
            report.num_cut_responses += item.cut_response
            chosen, *rest = responses
            report.num_equal += bool(rest) and all(other == chosen for other in rest)
            report.num_comparisons += _num_comparisons(item.tied)
        if self.options.unpaired:
            report.num_desirable = int(sum(labels))
        arrays = {
            "tokens": np.array(tokens, np.int32),
            "part_lengths": np.array(lengths, np.int32),
            "labels": np.array(labels, np.float64),
            "others": np.array(others, np.int32),
            "tied": np.frombuffer(bytes(all_tied), np.uint8),
        }
        return BlockColumns(arrays, report)

    @property
    def _num_responses(self) -> int:
        """Responses of an example that is no ranking."""
        return 1 if self.options.unpaired else 2

    def fingerprint(self, arrays: Arrays) -> str:
        """Content hash for ``ExampleDataset.fingerprint``."""
        lengths, levels = self.rectangles(arrays)
        pad_id, labels = self.tokenizer.pad_id, arrays.get("labels")
        return content_fingerprint(lengths, arrays["tokens"], pad_id, labels, levels)

    def rectangles(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray | None]:
        """Lengths of prompts and responses (int32 [n, 1 + K]), and ``ExampleDataset.levels``."""
        lengths, usual = arrays["part_lengths"], self._num_responses
        if "others" not in arrays:
            return lengths.reshape(-1, 1 + usual), None
        numbers = usual + arrays["others"]
        is_there = np.arange(numbers.max()) < numbers[:, None]
        has_part = np.concatenate([np.ones_like(is_there[:, :1]), is_there], axis=1)
        parts = np.zeros(has_part.shape, np.int32)
        parts[has_part] = lengths
        steps = np.zeros(is_there.shape, np.int32)
        steps[is_there] = 1 - arrays["tied"] if "tied" in arrays else 1
        return parts, np.where(is_there, steps.cumsum(axis=1) - 1, -1).astype(np.int32)


def _num_comparisons(tied: tuple[bool, ...]) -> int:
    """Comparisons of an example, from its responses' ``Record.tied``."""
    total = num_better = num_equal = 0
    for is_tied in tied:
        if not is_tied:
            num_better, num_equal = num_better + num_equal, 0
        num_equal += 1
        total += num_better
    return total
