"""Parquet: other types, damaged pages and footers; what is taken in is what pyarrow reads."""

import io
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from tests.fuzz.columns import changed_table, readable_rows
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.reading import GOOD, Use


class Kind:
    """See ``harness.Kind``."""

    limit_s = 2.0
    imports = (
        "pandas",
        "pyarrow.parquet",
        "puzzle_align.data.prepare",
        "puzzle_align.data.prepare_prompts",
        "jinja2.sandbox",
    )

    def __init__(self, folder: Path) -> None:
        self.file, self.mark = folder / "some.parquet", folder / "mark"

    def case(self, draw: random.Random) -> Case:
        """A file with strange columns, or a damaged one."""
        form = draw.choice(sorted(GOOD))
        use = Use.drawn(draw, form)
        what, table = changed_table(draw, GOOD[form], self.mark)
        written, data = _written(draw, table)
        damaged = draw.random() < 0.5
        if damaged:
            more, data = _damaged(draw, data)
            written = f"{written}; {more}"
        self.file.write_bytes(data)
        named = f"{use.name}{', skipping' if use.skips else ''} of {form}: {what}; {written}"

        def wrong(found: Any) -> str | None:
            raws = _read(self.file)
            known = [repr(record) for record in GOOD[form]]
            good = [raw for raw in raws or () if repr(raw) in known]
            return None if raws is None else use.wrong(found, raws, good)

        return Case(named, lambda: use.prepare(str(self.file)), wrong, self.mark)


def _written(draw: random.Random, table: pa.Table) -> tuple[str, bytes]:
    """A table as a file, in one of the many ways there are; as it is, where it has no such form."""
    given = {
        "compression": draw.choice(("none", "snappy", "gzip", "zstd")),
        "use_dictionary": draw.random() < 0.5,
        "data_page_version": draw.choice(("1.0", "2.0")),
        "row_group_size": draw.choice((1, 1000)),
        "write_page_checksum": draw.random() < 0.5,
        "store_schema": draw.random() < 0.7,
    }
    stream = io.BytesIO()
    try:
        pyarrow.parquet.write_table(table, stream, **given)
    except (pa.ArrowException, ValueError, TypeError) as error:
        stream, given = io.BytesIO(), {"not written": type(error).__name__}
        pyarrow.parquet.write_table(pa.table({"prompt": ["Sky?"]}), stream)
    return str(given), stream.getvalue()


def _damaged(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Damage of any byte, or of the footer, which is most of a small file's meaning."""
    footer = int.from_bytes(data[-8:-4], "little") + 8
    if draw.random() < 0.5:
        return damaged_bytes(draw, data)
    what, end = damaged_bytes(draw, data[-footer:])
    return f"in the footer: {what}", data[:-footer] + end


def _read(file: Path) -> list[Any] | None:
    """The rows of a file, read all at once; None where a whole column cannot be read."""
    try:
        table = pyarrow.parquet.read_table(file)
    except Exception:  # noqa: BLE001 - of columns that the use does not need, say
        return None
    return readable_rows(table)
