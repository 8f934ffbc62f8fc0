"""Rows packed once, offline: memory-mapped NPY files with segment boundaries.

A directory holds, for n examples with K responses, in the source's order:
- ``tokens.npy``, int32 [rows, row_tokens], padded;
- ``prompt_lengths.npy``, int32 [n], and ``response_lengths.npy``, int32 [n, K];
- ``row_pairs.npy``, int64 [n], and ``row_offsets.npy``, int64 [rows + 1]: the examples of each row;
- ``margins.npy``, float64 [n], if there are labels, and ``levels.npy``, int32 [n, K], of rankings;
- ``meta.json``: settings, the source's report, and the files' checksums (``files.checksums``).
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.errors import ReadReport
from puzzle_align.data.loader import collate_row
from puzzle_align.data.packing import Rows, example_lengths
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.files.checksums import FileSum, missing, sealed, unsealed
from puzzle_align.files.json_file import to_plain
from puzzle_align.files.messages import reading, shown, shown_path, writing
from puzzle_align.files.typed import from_plain, written

FORMAT_VERSION = 3
_AGAIN = "make them again with puzzle-align prepare"
# Of files that were written before the key existed.
_LATER_SETTINGS = {"data.comparisons": "all", "margins": True}
_OTHER_CONTENT = ", whose tokens or chat template are others now"


@dataclass(frozen=True)
class PackedFiles:
    """Content of a directory of packed files."""

    dataset: ExampleDataset  # with memory-mapped tokens
    rows: Rows
    report: ReadReport  # of the source


@dataclass(frozen=True)
class _Meta:
    """``meta.json``."""

    version: int
    settings: dict[str, Any]  # by config key, ``packing.row_tokens`` and ``layout`` among them
    num_rows: int
    num_pairs: int
    num_responses: int
    pad_id: int
    data_fingerprint: str
    tokenizer: str  # its path
    tokenizer_fingerprint: str
    report: ReadReport
    files: dict[str, FileSum]


def write_packed(
    path: Path,
    dataset: ExampleDataset,
    rows: Rows,
    settings: Mapping[str, Any],
    tokenizer: Tokenizer,
    report: ReadReport | None = None,
) -> None:
    """Write the rows of ``dataset`` as a directory that appears whole or not at all.

    Args:
        settings: keys of the config that decide tokens and rows, ``packing.row_tokens`` and
            ``packing.layout`` among them.

    Raises:
        ValueError: one line, if ``path`` cannot be written.
    """
    row_tokens, layout = settings["packing.row_tokens"], settings["packing.layout"]
    columns = {
        "prompt_lengths": dataset.prompt_lengths,
        "response_lengths": dataset.response_lengths,
        "row_pairs": rows.examples,
        "row_offsets": rows.offsets,
    }
    if dataset.labels is not None:
        columns["margins"] = dataset.labels
    if dataset.levels is not None:
        columns["levels"] = dataset.levels
    with _appearing(path) as scratch:
        _write_tokens(scratch / "tokens.npy", dataset, rows, row_tokens, layout)
        for name, values in columns.items():
            np.save(scratch / f"{name}.npy", values)
        meta = _Meta(
            FORMAT_VERSION,
            dict(settings),
            len(rows),
            len(dataset),
            dataset.num_responses,
            dataset.pad_id,
            dataset.fingerprint,
            tokenizer.path,
            tokenizer.fingerprint,
            ReadReport(num_used=len(dataset)) if report is None else report,
            {name: FileSum.of(scratch / f"{name}.npy") for name in ("tokens", *columns)},
        )
        (scratch / "meta.json").write_text(sealed(to_plain(meta)), encoding="utf-8")


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Yield a directory to write, then rename it to ``path``; ValueError if that fails."""
    with writing(path, cure="make room, or name another directory"):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            yield scratch
            scratch.chmod(0o755)
            os.rename(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _write_tokens(
    file: Path, dataset: ExampleDataset, rows: Rows, row_tokens: int, layout: str
) -> None:
    """Write ``tokens.npy`` row by row, since it may be larger than memory."""
    header = {"descr": "<i4", "fortran_order": False, "shape": (len(rows), row_tokens)}
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for row in range(len(rows)):
            members = rows[row]
            example_ids = np.arange(len(members))
            microbatch = collate_row(
                dataset, members, example_ids, layout=layout, num_tokens=row_tokens
            )
            stream.write(microbatch.tokens.astype("<i4").tobytes())


def load_packed(
    path: Path, tokenizer: Tokenizer, settings: Mapping[str, Any], *, check_tokens: bool = True
) -> PackedFiles:
    """Open and verify packed files; tokens are memory-mapped.

    Args:
        settings: as for ``write_packed``.
        check_tokens: compare the checksum of ``tokens.npy``; False if another process of the job
            has done so. The other files are always checked.

    Raises:
        ValueError: one line, if the directory holds no packed files, was packed with another
            tokenizer or other settings, is damaged, or cannot be read.
    """
    with reading(path):
        meta = _read_meta(path)
    _check_settings(path, meta, tokenizer, settings)
    with reading(path):
        for name, file_sum in meta.files.items():
            file = path / f"{name}.npy"
            unread = name == "tokens" and not check_tokens
            if problem := file_sum.size_problem(file) if unread else file_sum.problem(file):
                raise _damaged(path, problem)
        tokens = np.load(path / "tokens.npy", mmap_mode="r")
        columns = {name: np.load(path / f"{name}.npy") for name in meta.files if name != "tokens"}
    rows = Rows(columns["row_pairs"], columns["row_offsets"])
    lengths = columns["prompt_lengths"], columns["response_lengths"]
    row_tokens, layout = settings["packing.row_tokens"], settings["packing.layout"]
    prompt_starts, response_starts = _starts(rows, *lengths, layout, row_tokens)
    dataset = ExampleDataset(
        tokens.reshape(-1),
        prompt_starts,
        lengths[0],
        response_starts,
        lengths[1],
        meta.pad_id,
        meta.data_fingerprint,
        columns.get("margins"),
        columns.get("levels"),
    )
    return PackedFiles(dataset, rows, meta.report)


def _check_settings(
    path: Path, meta: _Meta, tokenizer: Tokenizer, settings: Mapping[str, Any]
) -> None:
    """Raise a ValueError that names every setting with which the files were packed differently."""
    before = _LATER_SETTINGS | meta.settings
    changed = {key: value for key, value in settings.items() if before.get(key) != value}
    then = [f"{key}={written(before.get(key))}" for key in changed]
    now = [f"{key}={written(value)}" for key, value in changed.items()]
    if meta.tokenizer_fingerprint != tokenizer.fingerprint:
        changes = _OTHER_CONTENT if meta.tokenizer == tokenizer.path else ""
        then.append(f"tokenizer.path={shown_path(meta.tokenizer)}")
        now.append(f"tokenizer.path={shown_path(tokenizer.path)}{changes}")
    if then:
        raise ValueError(
            f"{path} was packed with {', '.join(then)}; this job has {', '.join(now)}: set the keys"
            " as they were, or pack it again"
        )


def _damaged(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path}: packed files are damaged: {problem}; {_AGAIN}")


def _read_meta(path: Path) -> _Meta:
    file = path / "meta.json"
    try:
        text = file.read_bytes()
    except OSError as error:
        missing(file, error)
        raise ValueError(
            f"{path} has no meta.json: not a directory of packed files; "
            "write one with puzzle-align prepare"
        ) from None
    try:
        values = unsealed(text)
    except ValueError as error:
        raise _damaged(path, f"meta.json: {error}") from None
    version = values.get("version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: packed files of format {shown(version)}, not {FORMAT_VERSION}; {_AGAIN}"
        )
    return from_plain(_Meta, values, str(file))


def _starts(
    rows: Rows,
    prompt_lengths: np.ndarray,
    response_lengths: np.ndarray,
    layout: str,
    row_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Starts of prompts (int64 [n]) and responses (int64 [n, K]) in the flattened rows."""
    lengths = example_lengths(prompt_lengths, response_lengths, layout)[rows.examples]
    before = np.cumsum(lengths) - lengths  # starts, if rows had no padding
    begins = np.arange(len(rows)) * row_tokens - before[rows.offsets[:-1]]
    starts = np.empty_like(before)
    starts[rows.examples] = before + np.repeat(begins, np.diff(rows.offsets))
    num_responses = response_lengths.shape[1]
    copies = np.arange(1, num_responses + 1) if layout == "paired" else np.ones(num_responses, int)
    responses = response_lengths.astype(np.int64)
    earlier = np.cumsum(responses, axis=1) - responses
    prompts = prompt_lengths.astype(np.int64)[:, None] * copies
    return starts, starts[:, None] + prompts + earlier
