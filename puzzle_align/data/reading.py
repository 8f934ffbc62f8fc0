"""What can be used of a source's records: converted chunk by chunk, bad ones raised or counted."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from puzzle_align.data.records import DataError, ReadReport, TooLong
from puzzle_align.data.sources import RawRecord
from puzzle_align.data.tokenize import Tokenizer

CHUNK = 512  # records tokenized at once

R = TypeVar("R")
T = TypeVar("T")


def usable_items(
    records: Iterator[RawRecord],
    convert: Callable[[list[RawRecord]], list[T | DataError]],
    report: ReadReport,
    *,
    name: str,
    skip_errors: bool,
    progress: bool,
) -> Iterator[T]:
    """What ``convert`` makes of the records, in order; the report counts them as they pass.

    ``convert`` gives the item or the error of every record of a chunk. A bad one raises its
    DataError, or is counted where ``skip_errors``; one that is left out for its length is counted.
    ``name`` is the source's, for the bar that ``progress`` shows.
    """
    from tqdm import tqdm

    hidden = None if progress else True  # None: where it is no terminal
    unit = f" {report.unit}"
    with tqdm(desc=f"tokenize {name}", unit=unit, disable=hidden, leave=False) as bar:
        while chunk := list(islice(records, CHUNK)):
            for outcome in convert(chunk):
                if isinstance(outcome, DataError):
                    if not (skip_errors or isinstance(outcome, TooLong)):
                        outcome.suggest("leave bad records out with data.on_error=skip")
                        raise outcome
                    report.skip(outcome)
                    continue
                report.num_used += 1
                yield outcome
            bar.update(len(chunk))


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
    finish: Callable[[R, list[list[int]]], T],
) -> list[T | DataError]:
    """What comes of every record, or its error; all texts are tokenized in one call.

    Args:
        render: a raw record and its origin to what has texts.
        texts: those to tokenize.
        finish: what was rendered, and the token ids of its texts, to what is kept.
    """
    rendered = [
        raw if isinstance(raw, DataError) else value_or_error(render, raw, origin)
        for origin, raw in chunk
    ]
    wanted = [() if isinstance(item, DataError) else tuple(texts(item)) for item in rendered]
    flat = [text for own in wanted for text in own]
    ids = iter(tokenizer.encode_batch(flat) if flat else [])
    return [
        item
        if isinstance(item, DataError)
        else value_or_error(finish, item, list(islice(ids, len(own))))
        for item, own in zip(rendered, wanted, strict=True)
    ]
