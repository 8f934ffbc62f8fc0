"""Tokenized data on disk, by the hash of all that decides it: made once, then memory-mapped."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.data.dataset import write_directory

Arrays = Mapping[str, np.ndarray]


def cached(
    folder: Path, key: Sequence[Any], make: Callable[[], tuple[Arrays, dict[str, Any]]]
) -> tuple[Path, dict[str, Any]]:
    """The directory of what ``key`` decides, and its JSON values; made where it is not there.

    Args:
        key: JSON values.
        make: the arrays (``NAME.npy`` in the directory) and the values. What it raises leaves
            nothing behind.
    """
    path = folder / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    if not (path / "meta.json").is_file():
        write_directory(path, *make())
    return path, json.loads((path / "meta.json").read_text(encoding="utf-8"))
