"""Journal of an unfinished profile: its parts, one per line, in a file beside the output.

Invariants (the tests assert them):
- a part is in the file when ``add`` returns: a killed run loses only the part in progress;
- parts measured with other hardware, versions, models or settings are not reused;
- a truncated line is skipped and spoils no other.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from puzzle_align.files.json_file import to_plain
from puzzle_align.files.typed import from_plain
from puzzle_align.planning.costs.profile import (
    DecodePoint,
    EndPoint,
    Link,
    MergePoint,
    OptimizerPoint,
    PrefillPoint,
    RowPoint,
)


@dataclass(frozen=True, kw_only=True)
class UnitPoints:
    """One unit's points, of a model or of links; ``left_out`` says why some are missing."""

    rows: tuple[RowPoint, ...] = ()
    ends: tuple[EndPoint, ...] = ()
    optimizer: tuple[OptimizerPoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    merge: tuple[MergePoint, ...] = ()
    links: tuple[Link, ...] = ()
    left_out: str = ""


class Journal:
    """Finished parts by the name of their unit, and the file to which more are added."""

    def __init__(self, path: Path, circumstances: Mapping[str, Any]) -> None:
        """Read the parts of an earlier run.

        Args:
            circumstances: everything beside the unit that the numbers depend on, as JSON values.
        """
        text = json.dumps(circumstances, sort_keys=True)
        self._path = path
        self._under = hashlib.sha256(text.encode()).hexdigest()
        self.parts: dict[str, UnitPoints] = {}
        self._cut_off = False
        if path.is_file():
            self._read(path.read_bytes())

    def add(self, unit: str, part: UnitPoints) -> None:
        """Write a part to the file, safe from later failures."""
        line = json.dumps({"under": self._under, "unit": unit, "part": to_plain(part)})
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(("\n" if self._cut_off else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._cut_off = False
        self.parts[unit] = part

    def close(self) -> None:
        """Delete the file, after the profile is written."""
        self._path.unlink(missing_ok=True)

    def _read(self, content: bytes) -> None:
        self._cut_off = bool(content) and not content.endswith(b"\n")
        for line in content.splitlines():
            try:
                entry = json.loads(line)
                if entry["under"] == self._under:
                    self.parts[entry["unit"]] = from_plain(
                        UnitPoints, entry["part"], str(self._path)
                    )
            except (ValueError, KeyError, TypeError):
                continue  # truncated, or of another version: measured again
