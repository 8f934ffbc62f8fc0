"""Records of a run's metrics.jsonl."""

import json
from pathlib import Path
from typing import Any

MEASURED = ("time", "second", "memory", "mfu")  # in the names of what a clock has a part in


def records(output: Path) -> list[dict[str, Any]]:
    """All that was logged, line by line."""
    return [json.loads(line) for line in (output / "metrics.jsonl").open()]


def losses(output: Path) -> list[float]:
    """Losses of the steps that were logged."""
    return [record["loss"] for record in records(output) if "loss" in record]


def numbers(output: Path, *besides: str) -> list[dict[str, Any]]:
    """All that was logged but what a clock or the machine has a part in, and ``besides``."""
    left_out = (*MEASURED, *besides)
    return [
        {name: value for name, value in record.items() if not any(x in name for x in left_out)}
        for record in records(output)
    ]
