"""Unpaired preference data: prompts with one response each, desirable or not (TRL's format).

Columns are ``prompt`` and ``completion``, both text or both messages, and ``label``, a boolean.
Pairs are two such records: the chosen response is desirable, the rejected one is not.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from puzzle_align.data.blocks import RawRecord
from puzzle_align.data.reading import value_or_error
from puzzle_align.data.records import (
    DataError,
    Record,
    template_kwargs,
    to_parts,
    to_record,
)
from puzzle_align.files.messages import quoted

BLOCK = 1000  # of TRL's ``unpair_preference_dataset``: pairs that are taken apart together


def taken_apart(records: Iterator[RawRecord]) -> Iterator[RawRecord]:
    """The records, pairs among them taken apart.

    Of a block the chosen responses come first, then the rejected ones, as from TRL's function:
    neighbours, which lend each other their responses, then have other prompts.
    """
    while block := list(islice(records, BLOCK)):
        parts = [_responses_of(origin, raw) for origin, raw in block]
        yield from (first for first, *_ in parts)
        yield from (second for _, *rest in parts for second in rest)


def to_response(raw: Mapping[str, Any], origin: str) -> tuple[Record, bool]:
    """A record of one response, and whether it is desirable; DataError where there is none."""
    prompt, completion = to_parts(raw, ("prompt", "completion"), origin)
    label = raw.get("label")
    if label is None or label not in (0, 1):
        what = "missing" if label is None else f"{quoted(label)}, not true or false"
        raise DataError(
            origin,
            "bad label",
            f"field 'label' is {what}",
            "say whether the completion is desirable",
        )
    given = {} if isinstance(prompt, str) else template_kwargs(raw, origin)
    return Record(prompt, (completion,), origin, given), bool(label)


def _responses_of(origin: str, raw: dict[str, Any] | DataError) -> list[RawRecord]:
    """A record in a list; a pair's two."""
    if isinstance(raw, DataError) or raw.get("completion") is not None:
        return [(origin, raw)]
    if raw.get("chosen") is None and raw.get("rejected") is None:
        return [(origin, raw)]
    pair = value_or_error(to_record, raw, origin)
    if isinstance(pair, DataError):
        return [(origin, pair)]
    return [
        (origin, {**raw, "prompt": pair.prompt, "completion": response, "label": label})
        for response, label in zip(pair.responses, (True, False), strict=True)
    ]
