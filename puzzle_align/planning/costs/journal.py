"""The parts of an unfinished profile, kept line by line beside the file to be.

Invariants (the tests assert them):
- a part is in the file as soon as ``add`` returns: what is killed loses the one under way, no more;
- parts that were measured otherwise (other hardware, versions, models, settings) are not taken;
- a line that was cut off is passed over, and spoils no other.
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
    OptimizerPoint,
    PrefillPoint,
    RowPoint,
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One unit's points, of a model or of links; ``left_out`` says why some are missing."""

    rows: tuple[RowPoint, ...] = ()
    ends: tuple[EndPoint, ...] = ()
    optimizer: tuple[OptimizerPoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    links: tuple[Link, ...] = ()
    left_out: str = ""


class Journal:
    """The parts that are there, by the name of their unit, and where more are added."""

    def __init__(self, path: Path, circumstances: Mapping[str, Any]) -> None:
        """Read what an earlier run left.

        Args:
            circumstances: all that the numbers depend on beside the unit, as JSON has it.
        """
        text = json.dumps(circumstances, sort_keys=True)
        self._path = path
        self._under = hashlib.sha256(text.encode()).hexdigest()
        self.parts: dict[str, Part] = {}
        self._cut_off = False
        if path.is_file():
            self._read(path.read_bytes())

    def add(self, unit: str, part: Part) -> None:
        """Keep a part, whatever happens from here on."""
        line = json.dumps({"under": self._under, "unit": unit, "part": to_plain(part)})
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(("\n" if self._cut_off else "") + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._cut_off = False
        self.parts[unit] = part

    def close(self) -> None:
        """Take the file away: the profile is written."""
        self._path.unlink(missing_ok=True)

    def _read(self, content: bytes) -> None:
        self._cut_off = bool(content) and not content.endswith(b"\n")
        for line in content.splitlines():
            try:
                entry = json.loads(line)
                if entry["under"] == self._under:
                    self.parts[entry["unit"]] = from_plain(Part, entry["part"], str(self._path))
            except (ValueError, KeyError, TypeError):
                continue  # cut off, or of another version: it is measured again
