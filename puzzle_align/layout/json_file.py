"""JSON objects in files that others wrote."""

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 32 * 2**20  # the index of a model of a hundred thousand tensors takes a third of it


def read_object(path: Path, cure: str) -> dict[str, Any]:
    """The object in a file of UTF-8 JSON, in which no object has a key twice.

    Args:
        cure: what errors advise, after a semicolon.

    Raises:
        ValueError: one line with the path, if it is anything else, or over ``MAX_BYTES``.
    """
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {cure}") from error
    if len(text) > MAX_BYTES:
        raise ValueError(f"{path} has over {MAX_BYTES} bytes; {cure}")
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is not JSON ({why}); {cure}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object; {cure}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
