"""Checkpoints by hand, and damage: flipped bits, values changed behind checksums that agree."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from puzzle_align.files.checksums import sealed, unsealed


def flip(file: Path, place: int) -> None:
    """Flip a bit of the byte at ``place``; a second flip mends it."""
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 4]))


def seal(checkpoint: Path, step: int, job_id: str = "") -> None:
    """Write the ``checksums.json`` of a folder's files."""
    files = {file.name: {"ends": [], "xxh3_64": []} for file in checkpoint.iterdir()}
    values = {"step": step, "job_id": job_id, "files": files}
    (checkpoint / "checksums.json").write_text(sealed(values))
    reseal(checkpoint)


def reseal(checkpoint: Path, **values: Any) -> None:
    """Make ``checksums.json`` agree with the files as they are; ``values`` replace its own."""
    file = checkpoint / "checksums.json"
    manifest = unsealed(file.read_bytes()) | values
    for name, sums in manifest["files"].items():
        data, ends = (checkpoint / name).read_bytes(), sums["ends"]
        if ends[-1:] != [len(data)] or not name.endswith(".distcp"):
            ends = [len(data)] if data else []
        digests = [xxhash.xxh3_64_hexdigest(data[a:b]) for a, b in pairwise((0, *ends))]
        manifest["files"][name] = {"ends": ends, "xxh3_64": digests}
    file.write_text(sealed(manifest))


def change_job(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` have the values of ``job.json``, and write what it makes of them."""
    file = checkpoint / "job.json"
    job = json.loads(file.read_text())
    change(job)
    file.write_text(json.dumps(job))
    if (checkpoint / "checksums.json").exists():
        reseal(checkpoint, step=job["step"])
