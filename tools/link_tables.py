"""Markdown tables of what ``bench_links.py`` measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_TITLES = {
    "one host": "Between ranks of one host",
    "gradients": "Gradients and weights of replicas",
    "pipeline": "A pipeline's training step",
    "switch": "Switches of plans",
    "hidden": "Transfers of reference and policy in DPO steps",
}


def markdown(rows: Sequence[Row]) -> str:
    """A table for every part: bytes beside the count, and seconds at every rate."""
    parts = {row["part"]: [other for other in rows if other["part"] == row["part"]] for row in rows}
    texts = []
    for part, of_part in parts.items():
        if part == "hidden":
            head = "{} Mbit/s: s a step; transfers (hidden)"
            table = _table(of_part, "MB a step", head, _of_step)
        else:
            table = _table(of_part, "MB each way", "s at {} Mbit/s (least)", _of_turn)
        texts.append("\n".join([f"### {_TITLES[part]}", "", *table, ""]))
    return "\n".join(texts)


def _table(rows: Sequence[Row], sizes: str, head: str, cell: Callable[[Row], str]) -> list[str]:
    """A line for each case: its bytes, and a cell for each rate."""
    rates = sorted({row["mbit"] for row in rows})
    heads = ["", sizes, "counted", *map(head.format, rates)]
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for name, by_rate in _by_case(rows).items():
        first = next(iter(by_rate.values()), None)
        moved = ["", ""]
        if first is not None:
            steps = first.get("steps", 1)
            moved = [_megabytes([n / steps for n in first[key]]) for key in ("bytes", "counted")]
        cells = [cell(by_rate[rate]) if rate in by_rate else "left out" for rate in rates]
        lines.append(_line([name, *moved, *cells]))
    return lines


def _of_turn(row: Row) -> str:
    return f"{row['seconds']:.2f} ({row['least_seconds']:.2f})"


def _of_step(row: Row) -> str:
    """Seconds of the shortest step, and of the reference's and the policy's transfers in it."""
    parts = []
    for role in ("reference", "actor"):
        seconds, hidden = row[role]["transfer_seconds"], row[role]["hidden_seconds"]
        share = f"{hidden / seconds:.0%}" if seconds else "none"
        parts.append(f"{seconds / row['steps']:.2f} ({share})")
    return f"{row['step_seconds']:.2f}; {', '.join(parts)}"


def _by_case(rows: Sequence[Row]) -> dict[str, dict[int, Row]]:
    """Measured rows by case and rate, the slowest first."""
    cases: dict[str, dict[int, Row]] = {row["case"]: {} for row in rows}
    for row in sorted(rows, key=lambda row: row["mbit"]):
        if "left_out" not in row:
            cases[row["case"]][row["mbit"]] = row
    return cases


def _megabytes(directions: Sequence[float]) -> str:
    first, second = (f"{size / 1e6:.1f}" for size in directions)
    return first if first == second else f"{first}, {second}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
