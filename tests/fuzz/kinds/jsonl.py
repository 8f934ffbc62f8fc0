"""JSON lines, plain and compressed: what is taken in is what the lines say."""

import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.reading import GOOD, Use
from tests.fuzz.values import changed_json


class Kind:
    """See ``harness.Kind``."""

    limit_s = 2.0
    imports = ("puzzle_align.data.prepare", "puzzle_align.data.prepare_prompts", "jinja2.sandbox")

    def __init__(self, folder: Path) -> None:
        self.files = folder / "some.jsonl", folder / "some.jsonl.gz"

    def case(self, draw: random.Random) -> Case:
        """A file with lines that are damaged, or say nasty things."""
        form = draw.choice(sorted(GOOD))
        use = Use.drawn(draw, form)
        what, lines = _lines(draw, GOOD[form])
        data, file = b"\n".join(lines), self.files[0]
        if draw.random() < 0.3:
            whole, data = draw.choice(_ENCODINGS)(data), data
            what, data = f"{what}; written another way", whole
        if draw.random() < 0.3 and data:
            more, data = damaged_bytes(draw, data)
            what = f"{what}; {more}"
        if draw.random() < 0.3:
            file, data = self.files[1], gzip.compress(data, 1)
            if draw.random() < 0.5:
                more, data = damaged_bytes(draw, data)
                what = f"{what}; compressed, {more}"
        file.write_bytes(data)
        named = f"{use.name}{', skipping' if use.skips else ''} of {form}: {what}"

        def wrong(found: Any) -> str | None:
            raws = _read(file)
            known = [repr(record) for record in GOOD[form]]
            good = [raw for raw in raws if repr(raw) in known]
            return use.wrong(found, raws, good)

        return Case(named, lambda: use.prepare(str(file)), wrong)


_ENCODINGS = (
    lambda data: b"\xef\xbb\xbf" + data,
    lambda data: data.replace(b"\n", b"\r\n"),
    lambda data: data.replace(b"\n", b"\n\n \n"),
    lambda data: data.decode().encode("utf-16"),
    lambda data: data.decode().encode("latin-1", errors="replace"),
    lambda data: data.replace(b"\n", b""),
    lambda data: data.replace(b" ", b"\0"),
    lambda data: b"[" + data.replace(b"\n", b",") + b"]",
    lambda data: data + b"\n" + data,
)


def _lines(draw: random.Random, records: list[dict[str, Any]]) -> tuple[str, list[bytes]]:
    """Lines, one of them or two with other values."""
    lines = [json.dumps(record, ensure_ascii=draw.random() < 0.5).encode() for record in records]
    done = []
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        at = draw.randrange(len(records))
        what, text = changed_json(draw, records[at])
        lines[at] = text.encode()
        done.append(f"line {at + 1}: {what}")
    return "; ".join(done) or "as it was", lines


def _read(file: Path) -> list[Any]:
    """The records of a file, all at once; None where a line is none."""
    data = file.read_bytes()
    if file.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, OSError):
            return []
    return [_record(line) for line in data.split(b"\n") if line.strip()]


def _record(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
