"""What can be used of a source's records: converted chunk by chunk, bad ones raised or counted."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from puzzle_align.data.blocks import RawRecord
from puzzle_align.data.records import DataError, ReadReport, TooLong
from puzzle_align.data.tokenize import Tokenizer

CHUNK = 512  # records tokenized at once, at most
CHUNK_CHARACTERS = 2**20  # in them, about: what is longer is tokenized on its own

R = TypeVar("R")
T = TypeVar("T")


def usable_items(
    records: Iterator[RawRecord],
    convert: Callable[[list[RawRecord]], list[T | DataError]],
    report: ReadReport,
    *,
    skip_errors: bool,
) -> Iterator[T]:
    """What ``convert`` makes of the records, in order; the report counts them as they pass.

    ``convert`` gives the item or the error of every record of a chunk. A bad one raises its
    DataError, or is counted where ``skip_errors``; one that is left out for its length is counted.
    """
    for chunk in _chunks(records):
        for outcome in convert(chunk):
            if isinstance(outcome, DataError):
                if not (skip_errors or isinstance(outcome, TooLong)):
                    outcome.suggest("leave bad records out with data.on_error=skip")
                    raise outcome
                report.skip(outcome)
                continue
            report.num_used += 1
            yield outcome


def _chunks(records: Iterator[RawRecord]) -> Iterator[list[RawRecord]]:
    """The records in lists of a bounded number and size; what is huge has a list of its own."""
    chunk: list[RawRecord] = []
    room = CHUNK_CHARACTERS
    for record in records:
        size = _num_characters(record[1])
        if chunk and (size > room or len(chunk) == CHUNK):
            yield chunk
            chunk, room = [], CHUNK_CHARACTERS
        chunk.append(record)
        room -= size
    if chunk:
        yield chunk


def _num_characters(record: object) -> int:
    """Characters of all texts in a record, however deep."""
    total, left = 0, [record]
    while left:
        value = left.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, (dict, list)):
            left.extend(value.values() if isinstance(value, dict) else value)
    return total


def value_or_error(function: Callable[..., T], *arguments: object) -> T | DataError:
    """The function's value, or the DataError it raises."""
    try:
        return function(*arguments)
    except DataError as error:
        return error


def check_not_empty(report: ReadReport, name: str) -> None:
    """DataError where nothing of the source could be used, with the first reason."""
    if report.num_used == 0:
        first = next(iter(report.first_errors.values()), "it has no records")
        what = f"no usable {report.unit} ({first})"
        raise DataError(name, f"no {report.unit}", what, "check data.train and data.eval")


def tokenize_together(
    chunk: Sequence[RawRecord],
    tokenizer: Tokenizer,
    *,
    render: Callable[[dict[str, Any], str], R],
    texts: Callable[[R], Sequence[str]],
    finish: Callable[[R, list[array]], T],
    skip_errors: bool,
) -> list[T | DataError]:
    """What comes of every record, or its error; texts are tokenized in few calls.

    It ends with the first error where these are not skipped: what comes after is of no use.

    Args:
        render: a raw record and its origin to what has texts.
        texts: those to tokenize.
        finish: what was rendered, and the token ids of its texts, to what is kept.
    """
    rendered: list[R | DataError] = []
    for origin, raw in chunk:
        item = raw if isinstance(raw, DataError) else value_or_error(render, raw, origin)
        rendered.append(item)
        if isinstance(item, DataError) and not skip_errors:
            break
    wanted = [() if isinstance(item, DataError) else tuple(texts(item)) for item in rendered]
    ids = _encoded([text for own in wanted for text in own], tokenizer)
    return [
        item
        if isinstance(item, DataError)
        else value_or_error(finish, item, list(islice(ids, len(own))))
        for item, own in zip(rendered, wanted, strict=True)
    ]


def _encoded(texts: list[str], tokenizer: Tokenizer) -> Iterator[array]:
    """Token ids of every text, four bytes each; a huge text is tokenized on its own.

    A tokenizer needs some hundred bytes a token as long as it works, a list of ids 8 to 36.
    """
    first = 0
    while first < len(texts):
        end, room = first + 1, CHUNK_CHARACTERS - len(texts[first])
        while end < len(texts) and (room := room - len(texts[end])) >= 0:
            end += 1
        yield from [array("i", ids) for ids in tokenizer.encode_batch(texts[first:end])]
        first = end
