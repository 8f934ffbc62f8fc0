"""Rows packed once, offline: memory-mapped NPY files with segment boundaries.

A directory holds ``tokens.npy`` (int32 [rows, row_tokens], padded), the bounds of every example as
starts in the flattened rows and lengths (``prompt_starts`` [n], ``prompt_lengths`` [n],
``response_starts`` [n, K], ``response_lengths`` [n, K]; pairs in the source's order), which pairs
each row holds (``row_pairs`` [n], ``row_offsets`` [rows + 1]), ``meta.json`` with the report of
what was read, and, where pairs have labels, these as ``margins`` (float64 [n]).
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from puzzle_align.data.dataset import ExampleDataset, write_directory
from puzzle_align.data.packing import Rows
from puzzle_align.data.records import ReadReport

FORMAT_VERSION = 1


def write_packed(
    path: Path,
    dataset: ExampleDataset,
    rows: Rows,
    *,
    row_tokens: int,
    layout: str,
    tokenizer_fingerprint: str,
    report: ReadReport | None = None,
) -> None:
    """Write the rows of ``dataset`` as a directory that appears whole or not at all.

    ValueError where ``path`` exists.
    """
    if path.exists():
        raise ValueError(f"{path} exists already; remove it or name another directory")
    tokens = np.full((len(rows), row_tokens), dataset.pad_id, dtype=np.int32)
    prompt_starts = np.zeros_like(dataset.prompt_starts)
    response_starts = np.zeros_like(dataset.response_starts)
    flat = tokens.reshape(-1)
    for row in range(len(rows)):
        at = row * row_tokens
        for example in rows[row].tolist():
            at = _write_example(flat, at, dataset, example, layout, prompt_starts, response_starts)
    arrays = {
        "tokens": tokens,
        "prompt_starts": prompt_starts,
        "prompt_lengths": dataset.prompt_lengths,
        "response_starts": response_starts,
        "response_lengths": dataset.response_lengths,
        "row_pairs": rows.examples,
        "row_offsets": rows.offsets,
    }
    if dataset.labels is not None:
        arrays["margins"] = dataset.labels
    meta = {
        "version": FORMAT_VERSION,
        "row_tokens": row_tokens,
        "layout": layout,
        "num_rows": len(rows),
        "num_pairs": len(dataset),
        "num_responses": dataset.num_responses,
        "pad_id": dataset.pad_id,
        "data_fingerprint": dataset.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "report": asdict(ReadReport(num_used=len(dataset)) if report is None else report),
    }
    write_directory(path, arrays, meta)


def _write_example(
    flat: np.ndarray,
    at: int,
    dataset: ExampleDataset,
    example: int,
    layout: str,
    prompt_starts: np.ndarray,
    response_starts: np.ndarray,
) -> int:
    """Copy one example to ``flat[at:]``, note where its parts lie, return the position after it."""
    prompt = dataset.prompt(example)
    prompt_starts[example] = at
    for branch in range(dataset.num_responses):
        if branch == 0 or layout == "paired":
            flat[at : at + len(prompt)] = prompt
            at += len(prompt)
        response = dataset.response(example, branch)
        response_starts[example, branch] = at
        flat[at : at + len(response)] = response
        at += len(response)
    return at


def load_packed(
    path: Path, tokenizer_fingerprint: str, row_tokens: int, layout: str
) -> tuple[ExampleDataset, Rows]:
    """The pairs and their rows, tokens memory-mapped.

    ValueError where the directory is none of ours or was packed for another tokenizer or row.
    """
    if not (path / "meta.json").is_file():
        raise ValueError(
            f"{path} has no meta.json: not a directory of packed files; "
            "write one with tools/prepare_packed_dataset.py"
        )
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    expected = {
        "version": (FORMAT_VERSION, "pack it again"),
        "row_tokens": (row_tokens, "set packing.row_tokens to that or pack it again"),
        "layout": (layout, "set packing.layout to that or pack it again"),
        "tokenizer_fingerprint": (tokenizer_fingerprint, "use that tokenizer or pack it again"),
    }
    for name, (value, cure) in expected.items():
        if meta.get(name) != value:
            raise ValueError(f"{path} was packed with {name}={meta.get(name)}, not {value}; {cure}")

    def column(name: str) -> np.ndarray:
        return np.load(path / f"{name}.npy")

    dataset = ExampleDataset(
        np.load(path / "tokens.npy", mmap_mode="r").reshape(-1),
        column("prompt_starts"),
        column("prompt_lengths"),
        column("response_starts"),
        column("response_lengths"),
        meta["pad_id"],
        meta["data_fingerprint"],
        column("margins") if (path / "margins.npy").is_file() else None,
    )
    return dataset, Rows(column("row_pairs"), column("row_offsets"))


def packed_report(path: Path) -> ReadReport:
    """What reading the packed pairs' source gave; of files without it, their number alone."""
    meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    return ReadReport(**meta.get("report", {"num_used": meta["num_pairs"]}))
