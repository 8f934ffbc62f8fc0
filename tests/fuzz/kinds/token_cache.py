"""Folders of the token cache: what was made is given, whatever becomes of the files."""

import json
import logging
import random
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from puzzle_align.data.build import Columns, Preparation, columns_of
from puzzle_align.data.cache import CachedColumns, opened
from puzzle_align.data.pairs import Budget, BuildOptions, Limits, PairRecipe
from puzzle_align.data.prompts import PromptOptions, PromptRecipe
from puzzle_align.data.tokenize import ByteTokenizer
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes

OPTIONS = BuildOptions("auto", Limits(40), Budget(99, "shared", True), False, margins=True)
RECIPES = (
    PairRecipe(ByteTokenizer(), OPTIONS),
    PairRecipe(ByteTokenizer(), replace(OPTIONS, unpaired=True, skip_errors=True)),
    PromptRecipe(ByteTokenizer(), PromptOptions(40, "keep_end", False)),
)


class Kind:
    limit_s = 2
    imports = ("tqdm",)

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        logging.getLogger("puzzle_align").addHandler(handler)
        self.how = Preparation(folder / "cache", 1)
        self.sources = [str(folder / f"{number}.jsonl") for number in range(2)]
        for number, source in enumerate(self.sources):
            rows: list[dict[str, Any]] = [
                {"prompt": f"{number} {n}", "chosen": "yes", "rejected": "no", "margin": n}
                for n in range(3 + number)
            ]
            rows.append({"prompt": "r", "responses": ["a", "b", "c"], "scores": [1, 1, 0]})
            Path(source).write_text("\n".join(map(json.dumps, rows)))
        # By recipe and source: the folder's files, and what they hold.
        self.made: dict[tuple[int, int], tuple[Path, dict[str, bytes], Any]] = {}
        for recipe in range(len(RECIPES)):
            for source in range(2):
                known = set(folder.glob("cache/*/"))
                content = _content(self._load(recipe, source))
                (path,) = set(folder.glob("cache/*/")) - known
                files = {file.name: file.read_bytes() for file in sorted(path.iterdir())}
                self.made[recipe, source] = path, files, content

    def case(self, draw: random.Random) -> Case:
        """One damage of a folder; either it is opened as it is, or wanted by a job."""
        recipe, source = draw.randrange(len(RECIPES)), draw.randrange(2)
        path, files, content = self.made[recipe, source]
        what, damaged = self._damaged(draw, recipe, source)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name, data in damaged.items():
            (path / name).write_bytes(data)
        self.lines.clear()
        if draw.randrange(2):
            use = partial(opened, path, verify=True)
            return Case(f"opened, {what}", use, partial(_untouched, damaged, files))
        wrong = partial(self._wrong, content, damaged != files)
        return Case(f"wanted, {what}", partial(self._load, recipe, source), wrong)

    def _damaged(
        self, draw: random.Random, recipe: int, source: int
    ) -> tuple[str, dict[str, bytes]]:
        """Damage in words, and the folder's files after it."""
        _, files, _ = self.made[recipe, source]
        name = draw.choice(sorted(files))
        way = draw.randrange(10)
        if way == 0:
            return f"{name} is missing", {k: v for k, v in files.items() if k != name}
        if way == 1:  # another source's, or another recipe's that has such a file
            others = [
                (key, own[name])
                for key, (_, own, _) in self.made.items()
                if key != (recipe, source) and name in own
            ]
            key, data = draw.choice(others)
            return f"{name} of {key} in place of its own", {**files, name: data}
        if way == 2:
            key = draw.choice([key for key in self.made if key != (recipe, source)])
            return f"all files of {key}", self.made[key][1]
        if way == 3:
            swapped = draw.choice(sorted(files))
            named = f"{name} and {swapped} exchanged"
            return named, {**files, name: files[swapped], swapped: files[name]}
        done, data = damaged_bytes(draw, files[name])
        return f"{name}: {done}", {**files, name: data}

    def _load(self, recipe: int, source: int) -> Columns:
        return columns_of(self.sources[source], None, recipe, RECIPES[recipe], self.how)

    def _wrong(self, content: Any, is_damaged: bool, result: Columns) -> str | None:
        if _content(result) != content:
            return f"other data: {_content(result)}, not {content}"
        if len(self.lines) != is_damaged:
            return f"told as {self.lines}"
        return None


def _content(columns: Columns) -> Any:
    arrays = {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in columns.arrays.items()}
    return arrays, columns.report, columns.column_names, columns.fingerprint


def _untouched(damaged: dict[str, bytes], files: dict[str, bytes], _: CachedColumns) -> str | None:
    return None if damaged == files else "opened as if nothing were wrong"
