"""Records into token ids: where the prompt ends, where the responses end, what is cut.

Invariants (the tests assert them):
- prompt + response is the tokenization of the whole text; a token that straddles their boundary
  belongs to the response, and the prompt is what all responses have in common;
- no prompt and no response is ever empty.
"""

from dataclasses import dataclass

import numpy as np

from puzzle_align.data.dataset import TokenizedExample
from puzzle_align.data.packing import SLOT_MULTIPLE, example_lengths, slot_lengths
from puzzle_align.data.records import DataError, Record, shared_length
from puzzle_align.data.tokenize import Tokenizer


@dataclass(frozen=True)
class Limits:
    """How long a tokenized pair may be, in tokens, and what gives way."""

    max_length: int  # prompt plus the longest response
    max_prompt_length: int | None = None
    truncation_mode: str = "keep_end"  # of the prompt: keep_end, keep_start; or error


@dataclass(frozen=True)
class RenderedPair:
    """A record as the texts to tokenize."""

    prompt: str
    wholes: tuple[str, ...]  # prompt + response, for every response
    is_chat: bool  # a chat template writes the special tokens itself
    origin: str
    margin: float = 0.0  # by how much the first response is better than the second


def render(record: Record, tokenizer: Tokenizer) -> RenderedPair:
    """The texts of a record; conversations go through the chat template."""
    prompt = record.prompt
    if isinstance(prompt, str):
        wholes = tuple(prompt + text for text in record.responses if isinstance(text, str))
        return RenderedPair(prompt, wholes, False, record.origin)
    try:
        text = tokenizer.render_chat(
            prompt, add_generation_prompt=prompt[-1]["role"] != "assistant"
        )
        wholes = tuple(
            tokenizer.render_chat(prompt + response, add_generation_prompt=False)
            for response in record.responses
            if isinstance(response, list)
        )
    except ValueError as error:
        cure = "correct the messages, or set tokenizer.chat_template"
        raise DataError(record.origin, "chat template", str(error), cure) from None
    # Templates may write a prompt's end another way when an answer follows: keep what all share.
    shared = text[: shared_length(text, *wholes)]
    return RenderedPair(shared, wholes, True, record.origin)


def separate(
    rendered: RenderedPair, ids: list[list[int]], tokenizer: Tokenizer, *, add_eos: bool
) -> TokenizedExample:
    """Prompt and responses from ``ids``, the tokens of ``rendered.prompt`` and of every whole."""
    bos = tokenizer.bos_ids
    start = [] if rendered.is_chat or ids[0][: len(bos)] == bos else bos  # or written out already
    prompt = start + ids[0]
    wholes = [
        start + whole + _closing(text, whole, tokenizer) if add_eos else start + whole
        for text, whole in zip(rendered.wholes, ids[1:], strict=True)
    ]
    boundary = shared_tokens(prompt, wholes)
    if boundary == 0:
        raise DataError(
            rendered.origin,
            "empty prompt",
            "the prompt has no token of its own: its text merges into the responses' first tokens",
            "end the prompt at a word boundary",
        )
    return wholes[0][:boundary], [whole[boundary:] for whole in wholes]


def _closing(text: str, ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The end-of-sequence token, unless the text has it already."""
    written = tokenizer.eos_text and text.rstrip().endswith(tokenizer.eos_text)
    if tokenizer.eos_id is None or written or ids[-1:] == [tokenizer.eos_id]:
        return []
    return [tokenizer.eos_id]


def shared_tokens(prompt: list[int], wholes: list[list[int]]) -> int:
    """Tokens that the prompt alone and all whole texts begin with, less than any whole text has."""
    return shared_length(prompt, *(whole[:-1] for whole in wholes))


def truncate(pair: TokenizedExample, limits: Limits, origin: str) -> tuple[TokenizedExample, bool]:
    """``(pair within the limits, whether it was cut)``.

    A prompt over ``max_prompt_length`` is cut to it. Where prompt plus the longest response is
    still over ``max_length``, the prompt gives way first, down to ``max_prompt_length`` (default:
    half of ``max_length``), then every response loses its end.
    """
    prompt, responses = pair
    longest = max(len(response) for response in responses)
    cap = limits.max_prompt_length or len(prompt)
    if len(prompt) <= cap and len(prompt) + longest <= limits.max_length:
        return pair, False
    if limits.truncation_mode == "error":
        bound = f"data.max_length={limits.max_length}"
        if len(prompt) > cap:
            bound = f"data.max_prompt_length={limits.max_prompt_length}"
        raise DataError(
            origin,
            "too long",
            f"{len(prompt)} prompt and {longest} response tokens are over {bound}",
            "raise it or set data.truncation_mode to keep_end or keep_start",
        )
    keep = min(len(prompt), cap)
    floor = min(limits.max_prompt_length or limits.max_length // 2, limits.max_length - 1)
    keep = max(min(keep, limits.max_length - longest), min(keep, floor))
    kept = prompt[-keep:] if limits.truncation_mode == "keep_end" else prompt[:keep]
    return (kept, [response[: limits.max_length - keep] for response in responses]), True


def example_tokens(example: TokenizedExample, layout: str, packed: bool) -> int:
    """Row tokens that one example takes on its own, packed or in padded slots."""
    prompt_lengths = np.array([len(example[0])])
    response_lengths = np.array([[len(response) for response in example[1]]])
    if packed:
        return int(example_lengths(prompt_lengths, response_lengths, layout)[0])
    slots = 1 if layout == "shared" else len(example[1])
    return slots * int(slot_lengths(prompt_lengths, response_lengths, layout, SLOT_MULTIPLE)[0])
