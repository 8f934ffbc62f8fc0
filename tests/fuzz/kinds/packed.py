"""Packed files: every flipped bit is found."""

import random
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import DataView, ExampleLoader
from puzzle_align.data.packed_files import write_packed
from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.data.prepare import Prepared, packed_settings, prepare_data
from puzzle_align.data.tokenize import ByteTokenizer
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.unit.labelled import with_labels

BYTE = ByteTokenizer()
ROW_TOKENS, NUM_EXAMPLES = 40, 9


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
    limit_s = 2
    imports = ("puzzle_align.data.prepare", "puzzle_align.data.loader")

    def __init__(self, folder: Path) -> None:
        draw = np.random.default_rng(0)
        self.folder = folder / "packed"
        settings = (("shared", 2, True), ("paired", 2, False), ("shared", 1, True))
        self.goods = [_written(folder / "made", draw, *setting) for setting in settings]

    def case(self, draw: random.Random) -> Case:
        good, files = draw.choice(self.goods), dict[str, bytes]()
        if draw.random() < 0.8:
            name = draw.choice(sorted(good.files))
            what, data = damaged_bytes(draw, good.files[name])
            what, files = f"{name}: {what}", {**good.files, name: data}
        else:
            what, files = self._other_files(draw, good)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        opened = partial(good.prepare, self.folder)
        return Case(what, lambda: _used(opened(), good.layout), partial(_unequal, good.data))

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
    packing = PackingConfig(row_tokens=ROW_TOKENS, layout=layout)
    write_packed(folder, dataset, rows, packed_settings(DataConfig(), packing, "auto"), BYTE)
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
        view=DataView(),
        rows=data.rows,
    )
    loader.batch(0)
    return data


def _unequal(good: Prepared, found: Prepared) -> str | None:
    """Fields that differ from those written."""
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
