"""Sealed JSON files: every change of a byte is found."""

import random
from pathlib import Path

from puzzle_align.files.checksums import sealed, unsealed
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes

VALUES = {"step": 6, "job": "4f0c", "files": {"a": [1.5, 1e-9, None, True], "b ü": "x\ty"}}


class Kind:
    limit_s = 2
    imports = ()

    def __init__(self, folder: Path) -> None:
        self.good = sealed(VALUES).encode()

    def case(self, draw: random.Random) -> Case:
        what, data = damaged_bytes(draw, self.good)
        return Case(what, lambda: unsealed(data), lambda result: f"read as {result}")
