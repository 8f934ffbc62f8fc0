"""Markdown tables of what ``bench_links.py`` measured."""

from collections.abc import Mapping, Sequence
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
        table = _hidden(of_part) if part == "hidden" else _seconds(of_part)
        texts.append("\n".join([f"### {_TITLES[part]}", "", *table, ""]))
    return "\n".join(texts)


def _seconds(rows: Sequence[Row]) -> list[str]:
    rates = _rates(rows)
    heads = [f"s at {rate} Mbit/s (least)" for rate in rates]
    lines = _head(["", "MB each way", "counted", *heads])
    for name, by_rate in _by_case(rows).items():
        first = next(iter(by_rate.values()), None)
        sizes = ["", ""] if first is None else [_megabytes(first[k]) for k in ("bytes", "counted")]
        cells = [
            f"{by_rate[rate]['seconds']:.2f} ({by_rate[rate]['least_seconds']:.2f})"
            if rate in by_rate
            else "left out"
            for rate in rates
        ]
        lines.append(_line([name, *sizes, *cells]))
    return lines


def _hidden(rows: Sequence[Row]) -> list[str]:
    rates = _rates(rows)
    heads = [f"{rate} Mbit/s: s a step; transfers (hidden)" for rate in rates]
    lines = _head(["", "MB a step", "counted", *heads])
    for name, by_rate in _by_case(rows).items():
        first = next(iter(by_rate.values()), None)
        sizes = ["", ""]
        if first is not None:
            sizes = [
                _megabytes([size / first["steps"] for size in first[key]])
                for key in ("bytes", "counted")
            ]
        cells = [_of_step(by_rate[rate]) if rate in by_rate else "left out" for rate in rates]
        lines.append(_line([name, *sizes, *cells]))
    return lines


def _of_step(row: Row) -> str:
    """Seconds of the shortest step, and of the reference's and the policy's transfers in it."""
    parts = []
    for role in ("reference", "actor"):
        seconds, hidden = row[role]["transfer_seconds"], row[role]["hidden_seconds"]
        share = f"{hidden / seconds:.0%}" if seconds else "none"
        parts.append(f"{seconds / row['steps']:.2f} ({share})")
    return f"{row['step_seconds']:.2f}; {', '.join(parts)}"


def _rates(rows: Sequence[Row]) -> list[int]:
    return sorted({row["mbit"] for row in rows})


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


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
