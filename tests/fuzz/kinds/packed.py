"""Packed files: every flipped bit is found, and what only looks whole holds no nonsense."""

import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.data.packed_files import write_packed
from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.data.prepare import Prepared, prepare_data
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.files.checksums import FileSum, sealed, unsealed
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.values import changed
from tests.unit.labelled import with_labels

BYTE = ByteTokenizer()
ROW_TOKENS, NUM_EXAMPLES = 40, 9
ARRAYS = (np.int8, np.int32, np.int64, np.uint32, np.float32, np.float64, np.complex64, "O", "U3")
NUMBERS = (-(2**31), -1, 0, 1, 2, 8, 9, 39, 40, 258, 259, 2**31 - 1)


@dataclass(frozen=True)
class _Good:
    """A directory as it was written, and what is in it."""

    layout: str
    num_responses: int
    files: dict[str, bytes]
    data: Prepared

    def prepare(self, folder: Path) -> Prepared:
        return _prepare(folder, self.layout, self.num_responses)


class Kind:
    """See ``harness.Kind``."""

    limit_s = 2.0
    imports = ("puzzle_align.data.prepare", "puzzle_align.data.loader")

    def __init__(self, folder: Path) -> None:
        draw = np.random.default_rng(0)
        self.folder = folder / "packed"
        settings = (("shared", 2, True), ("paired", 2, False), ("shared", 1, True))
        self.goods = [_written(folder / "made", draw, *setting) for setting in settings]

    def case(self, draw: random.Random) -> Case:
        """A directory that is damaged, or made to look whole."""
        good, files = draw.choice(self.goods), dict[str, bytes]()
        kind = draw.random()
        if kind < 0.6:
            name = draw.choice(sorted(good.files))
            what, data = damaged_bytes(draw, good.files[name])
            what, files = f"{name}: {what}", {**good.files, name: data}
        elif kind < 0.7:
            what, files = self._other_files(draw, good)
        else:
            what, files = _crafted(draw, good)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        check: Callable[[Prepared], str | None] = (
            (lambda found: _unequal(found, good.data)) if kind < 0.7 else _nonsense
        )
        return Case(what, lambda: _used(good.prepare(self.folder), good.layout), check)

    def _other_files(self, draw: random.Random, good: _Good) -> tuple[str, dict[str, bytes]]:
        name, other = draw.sample(sorted(good.files), 2)
        files, kind = dict(good.files), draw.randrange(3)
        if kind == 0:
            del files[name]
            return f"without {name}", files
        if kind == 1:
            files[name] = good.files[other]
            return f"{other} as {name}", files
        strange = draw.choice([one for one in self.goods if one is not good])
        files[name] = strange.files.get(name, b"")
        return f"{name} of another directory", files


def _written(folder: Path, draw: np.random.Generator, layout: str, num: int, has: bool) -> _Good:
    def tokens(least: int) -> list[int]:
        return draw.integers(0, 256, draw.integers(least, 9)).tolist()

    examples = [(tokens(1), [tokens(1) for _ in range(num)]) for _ in range(NUM_EXAMPLES)]
    dataset = from_examples(examples, BYTE.pad_id)
    if has:
        labels = draw.integers(0, 2, NUM_EXAMPLES) * (1.0 if num == 1 else 0.25)
        dataset = with_labels(dataset, labels)
    lengths = example_lengths(dataset.prompt_lengths, dataset.response_lengths, layout)
    rows = first_fit_decreasing(lengths, ROW_TOKENS)
    named: dict[str, Any] = {"layout": layout, "tokenizer_fingerprint": BYTE.fingerprint}
    write_packed(folder, dataset, rows, row_tokens=ROW_TOKENS, **named)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    data = _prepare(folder, layout, num)
    shutil.rmtree(folder)
    return _Good(layout, num, files, data)


def _prepare(folder: Path, layout: str, num_responses: int) -> Prepared:
    config = DataConfig(train=str(folder), format="packed")
    packing = PackingConfig(row_tokens=ROW_TOKENS, layout=layout)
    unpaired = num_responses == 1
    return prepare_data(
        config, packing, BYTE, Preparation(), add_eos="auto", seed=0, unpaired=unpaired
    )


def _used(data: Prepared, layout: str) -> Prepared:
    """The data, after a step's batch was made of it."""
    loader = ExampleLoader(
        data.train,
        global_batch_size=4,
        row_tokens=ROW_TOKENS,
        layout=layout,
        packed=True,
        scope="dataset",
        seed=0,
        shuffle=True,
        data_rank=0,
        data_size=1,
        rows=data.rows,
    )
    loader.batch(0)
    return data


def _unequal(found: Prepared, good: Prepared) -> str | None:
    """What differs from what was written."""
    assert found.rows is not None and good.rows is not None
    pairs = [(found.rows.examples, good.rows.examples), (found.rows.offsets, good.rows.offsets)]
    everyone = np.arange(NUM_EXAMPLES)
    pairs.append((found.train.labels_of(everyone), good.train.labels_of(everyone)))
    names = ("tokens", "prompt_starts", "prompt_lengths", "response_starts", "response_lengths")
    pairs += [(getattr(found.train, name), getattr(good.train, name)) for name in names]
    if not all(np.array_equal(one, other) for one, other in pairs):
        return "it is not what was written"
    same = found.report == good.report and found.train.fingerprint == good.train.fingerprint
    return None if same else "its report or fingerprint is another"


def _nonsense(found: Prepared) -> str | None:
    """What no packed files can say, example by example."""
    data, rows = found.train, found.rows
    assert rows is not None
    if sorted(rows.examples.tolist()) != list(range(len(data))):
        return "not every pair once"
    if not np.isfinite(data.labels_of(np.arange(len(data)))).all():
        return "a label that is not finite"
    for row in range(len(rows)):
        taken = set[int]()
        for example in rows[row].tolist():
            starts = [data.prompt_starts[example], *data.response_starts[example]]
            lengths = [data.prompt_lengths[example], *data.response_lengths[example]]
            for start, length in zip(starts, lengths, strict=True):
                places = set(range(int(start), int(start + length)))
                in_row = places <= set(range(row * ROW_TOKENS, (row + 1) * ROW_TOKENS))
                if not in_row or taken & places:
                    return f"example {example} lies outside its row, or on another"
                taken |= places
                tokens = data.tokens[sorted(places)]
                if ((tokens < 0) | (tokens >= BYTE.vocab_size)).any():
                    return f"example {example} has a token that there is not"
    return None


def _crafted(draw: random.Random, good: _Good) -> tuple[str, dict[str, bytes]]:
    """Files whose checksums are right."""
    meta = unsealed(good.files["meta.json"])
    files = dict(good.files)
    if draw.random() < 0.5:
        what, meta = changed(draw, meta)
    else:
        name = draw.choice(sorted(meta["files"]))
        what, data = _other_array(draw, good.files[f"{name}.npy"])
        what, files[f"{name}.npy"] = f"{name}: {what}", data
        meta["files"][name] = vars(_sum_of(data))
    try:
        files["meta.json"] = sealed(meta).encode()
    except (TypeError, ValueError):  # a number that is not finite, no mapping at all
        files["meta.json"] = json.dumps(meta).encode()
    return f"crafted: {what}", files


def _other_array(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Another array instead of one: of other numbers, another type, another shape, none at all."""
    array, kind = np.load(io.BytesIO(data)), draw.randrange(4)
    if kind == 0:
        header = 128 if draw.random() < 0.5 else 0
        what, changed_bytes = damaged_bytes(draw, data[header:])
        return what, data[:header] + changed_bytes
    if kind == 1:
        dtype = draw.choice(ARRAYS)
        what, array = f"as {dtype}", array.astype(dtype)
    elif kind == 2:
        shape = draw.choice(((-1,), (1, -1), (-1, 1), array.shape[::-1]))
        what, array = f"as {shape}", np.asfortranarray(array.reshape(shape))
    else:
        value = draw.choice(NUMBERS if array.dtype.kind == "i" else (np.nan, np.inf, 0.5, -1, 1))
        at = draw.randrange(array.size)
        array.reshape(-1)[at] = value
        what = f"{value} at {at}"
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return what, stream.getvalue()


def _sum_of(data: bytes) -> FileSum:
    file = Path("sum")  # in the kind's folder
    file.write_bytes(data)
    return FileSum.of(file)
