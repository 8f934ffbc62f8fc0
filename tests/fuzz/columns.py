"""Arrow tables of records whose columns have other types, names and values than they should."""

import datetime
import decimal
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

_DAY = datetime.datetime(2024, 2, 29, 12)
_LARGEST = 2**63 - 1


def changed_table(
    draw: random.Random, records: list[dict[str, Any]], mark: Path
) -> tuple[str, pa.Table]:
    """What was done, and the records as a table, some of its columns others than they were.

    There may be pickled code in it, which would write ``mark``.
    """
    table, done = pa.Table.from_pylist(_of_one_form(draw, records)), []
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        at = draw.randrange(table.num_columns)
        what, table = draw.choice(_CHANGES)(draw, table, at)
        done.append(what)
    if table.num_columns and draw.random() < 0.05:
        table = _with_code(table, mark)
        done.append("an extension type that is pickled code")
    return "; ".join(done) or "as it was", table


def readable_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as Python values, without those of which there are none."""
    return [
        {
            name: values[0]
            for name, values in zip(
                table.column_names, (_values(c, row) for c in table.columns), strict=True
            )
            if values
        }
        for row in range(table.num_rows)
    ]


def _values(column: pa.ChunkedArray, row: int) -> list[Any]:
    try:
        return column.slice(row, 1).to_pylist()
    except Exception:  # noqa: BLE001 - there is no such value in Python
        return []


class _Code:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def _with_code(table: pa.Table, mark: Path) -> pa.Table:
    """What pyarrow before 14.0.1 unpickled: CVE-2023-47248."""
    code = pickle.dumps(_Code(mark))
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": code,
    }
    return table.cast(table.schema.set(0, table.field(0).with_metadata(metadata)))


def _of_one_form(draw: random.Random, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those records that can be in one table."""
    first = draw.choice(records)
    return [record for record in records if _form(record) == _form(first)]


def _form(record: dict[str, Any]) -> Any:
    return {name: type(value) for name, value in record.items()}


def _other_type(draw: random.Random, table: pa.Table, at: int) -> tuple[str, pa.Table]:
    make = draw.choice(_ARRAYS)
    array = make(table.num_rows)
    if draw.random() < 0.3:
        mask = [draw.random() < 0.5 for _ in range(table.num_rows)]
        with suppress(pa.ArrowException):  # there is no such function of some types
            array = pa.compute.if_else(pa.array(mask), array, None)
    return f"column {at} is {array.type}", table.set_column(at, table.field(at).name, array)


def _wrapped(draw: random.Random, table: pa.Table, at: int) -> tuple[str, pa.Table]:
    """The column's own values, in another form."""
    column, kind = table.column(at).combine_chunks(), draw.randrange(5)
    with suppress(pa.ArrowException, TypeError):  # there is no such form of some types
        if kind == 0:
            column = column.cast(draw.choice((pa.large_string(), pa.string_view(), pa.binary())))
        elif kind == 1:
            column = column.dictionary_encode()
        elif kind == 2:
            column = pa.StructArray.from_arrays([column, column], names=["a", draw.choice("ab")])
        elif kind == 3:
            column = pa.FixedSizeListArray.from_arrays(column, 1)
        else:
            depth = draw.choice((1, 5, 120))
            for _ in range(depth):
                offsets = np.arange(len(column) + 1, dtype=np.int32)
                column = pa.ListArray.from_arrays(offsets, column)
    return f"column {at} as {str(column.type)[:60]}", table.set_column(
        at, table.field(at).name, column
    )


def _other_name(draw: random.Random, table: pa.Table, at: int) -> tuple[str, pa.Table]:
    name = draw.choice(("", "\0", "a.b", "x" * 5000, "é\n", *table.column_names))
    names = [*table.column_names]
    names[at] = name
    return f"column {at} named {name[:20]!r}", table.rename_columns(names)


def _broken_text(draw: random.Random, table: pa.Table, at: int) -> tuple[str, pa.Table]:
    texts = [draw.choice((b"\xff", b"\xed\xa0\x80", b"ok", b"\0")) for _ in range(len(table))]
    raw = pa.array(texts, pa.binary())
    text = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:])
    return f"column {at} is no UTF-8", table.set_column(at, table.field(at).name, text)


def _other_rows(draw: random.Random, table: pa.Table, at: int) -> tuple[str, pa.Table]:
    kind = draw.randrange(3)
    if kind == 0:
        return "no rows", table.slice(0, 0)
    if kind == 1:
        return f"without column {at}", table.remove_column(at)
    return "all twice", pa.concat_tables([table, table])


def _metadata(draw: random.Random, table: pa.Table, at: int) -> tuple[str, pa.Table]:
    key = draw.choice(("ARROW:extension:name", "huggingface", "pandas", "ARROW:schema"))
    value = draw.choice(("arrow.py_extension_type", "{", "[]", "\x80", "x" * 9999, "arrow.json"))
    field = table.field(at).with_metadata({key: value, "ARROW:extension:metadata": value})
    schema = table.schema.set(at, field).with_metadata({key: value})
    return f"metadata {key}: {value[:30]}", table.cast(schema)


_VALUES: tuple[tuple[pa.DataType, Any], ...] = (
    *((pa.duration(unit), _LARGEST) for unit in ("s", "ms", "us", "ns")),
    *((pa.timestamp(unit), _LARGEST) for unit in ("s", "ms", "us", "ns")),
    (pa.timestamp("ns", "Nowhere/At_all"), 1),
    (pa.timestamp("us", "Europe/Paris"), _DAY),
    (pa.date32(), 2**31 - 1),
    (pa.date64(), _LARGEST),
    (pa.time64("ns"), 86_399_999_999_999),
    (pa.time32("s"), 2**31 - 1),
    (pa.decimal128(38, 2), decimal.Decimal("1.5")),
    (pa.decimal256(76, 0), decimal.Decimal(10) ** 75),
    (pa.binary(), b"\xff\0"),
    (pa.binary(2), b"ab"),
    (pa.bool_(), True),
    (pa.null(), None),
    (pa.uint64(), 2**64 - 1),
    (pa.int8(), -1),
    (pa.float16(), np.float16(0.5)),
    (pa.float64(), float("nan")),
    (pa.float64(), float("inf")),
    (pa.float32(), 1e38),
    (pa.map_(pa.string(), pa.int64()), [("a", 1), ("a", 2)]),
    (pa.list_(pa.string()), []),
    (pa.large_list(pa.struct([("role", pa.string())])), [{"role": "user"}]),
    (pa.struct([]), {}),
    (pa.list_view(pa.int64()), [1, 2]),
    (pa.json_(), '{"a": 1}'),
    (pa.uuid(), b"0123456789abcdef"),
    (pa.bool8(), 2),
    (pa.string(), "x" * 100_000),
    (pa.month_day_nano_interval(), (1, 2, 3)),
)


def _array(dtype: pa.DataType, value: Any) -> Callable[[int], pa.Array]:
    storage = dtype.storage_type if isinstance(dtype, pa.BaseExtensionType) else dtype
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole and not pa.types.is_integer(storage)

    def make(length: int) -> pa.Array:
        if number:
            integers = pa.int32() if storage.bit_width == 32 else pa.int64()
            array = pa.array([value] * length, integers).view(storage)
        else:
            array = pa.array([value] * length, storage)
        return pa.ExtensionArray.from_storage(dtype, array) if storage != dtype else array

    return make


_ARRAYS = [_array(dtype, value) for dtype, value in _VALUES]
_CHANGES = (_other_type, _other_type, _wrapped, _other_name, _broken_text, _other_rows, _metadata)
