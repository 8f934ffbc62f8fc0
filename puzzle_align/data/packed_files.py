"""Rows packed once, offline: memory-mapped NPY files with segment boundaries.

A directory holds ``tokens.npy`` (int32 [rows, row_tokens], padded), the lengths of every example
(``prompt_lengths`` int32 [n], ``response_lengths`` int32 [n, K]; pairs in the source's order),
which pairs each row holds one after the other (``row_pairs`` int64 [n], ``row_offsets`` int64
[rows + 1]), where pairs have labels these as ``margins`` (float64 [n]), and ``meta.json``: the
report of what was read, and what every file must hold (``files.checksums``).

The places of an example's parts follow from lengths and rows: no file can contradict them.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from puzzle_align.data.dataset import ExampleDataset
from puzzle_align.data.errors import ReadReport
from puzzle_align.data.packing import Rows, example_lengths
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.files.checksums import FileSum, missing, sealed, unsealed
from puzzle_align.files.json_file import to_plain
from puzzle_align.files.messages import reading, shown, writing
from puzzle_align.files.typed import from_plain

FORMAT_VERSION = 2
_BLOCK = 2**22  # tokens looked at together
_AGAIN = "make them again with tools/prepare_packed_dataset.py"


@dataclass(frozen=True)
class PackedFiles:
    """Content of a directory of packed files."""

    dataset: ExampleDataset  # its tokens memory-mapped
    rows: Rows
    report: ReadReport  # of reading the source


@dataclass(frozen=True)
class _Meta:
    """``meta.json``."""

    version: int
    row_tokens: int
    layout: str
    num_rows: int
    num_pairs: int
    num_responses: int
    pad_id: int
    data_fingerprint: str
    tokenizer_fingerprint: str
    report: ReadReport
    files: dict[str, FileSum]

    def arrays(self) -> dict[str, tuple[type, tuple[int, ...]]]:
        """Dtype and shape of every possible array, by its name."""
        pairs, rows = self.num_pairs, self.num_rows
        return {
            "tokens": (np.int32, (rows, self.row_tokens)),
            "prompt_lengths": (np.int32, (pairs,)),
            "response_lengths": (np.int32, (pairs, self.num_responses)),
            "row_pairs": (np.int64, (pairs,)),
            "row_offsets": (np.int64, (rows + 1,)),
            "margins": (np.float64, (pairs,)),
        }


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

    ValueError if ``path`` exists or cannot be written.
    """
    if path.exists():
        raise ValueError(f"{path} exists already; remove it or name another directory")
    columns = {
        "prompt_lengths": dataset.prompt_lengths,
        "response_lengths": dataset.response_lengths,
        "row_pairs": rows.examples,
        "row_offsets": rows.offsets,
    }
    if dataset.labels is not None:
        columns["margins"] = dataset.labels
    with _appearing(path) as scratch:
        _write_tokens(scratch / "tokens.npy", dataset, rows, row_tokens, layout)
        for name, values in columns.items():
            np.save(scratch / f"{name}.npy", values)
        meta = _Meta(
            FORMAT_VERSION,
            row_tokens,
            layout,
            len(rows),
            len(dataset),
            dataset.num_responses,
            dataset.pad_id,
            dataset.fingerprint,
            tokenizer_fingerprint,
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
    """Write ``tokens.npy`` row by row: it may be larger than the memory."""
    header = {"descr": "<i4", "fortran_order": False, "shape": (len(rows), row_tokens)}
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for row in range(len(rows)):
            parts = [
                part
                for example in rows[row].tolist()
                for branch in range(dataset.num_responses)
                for part in _parts(dataset, example, branch, layout)
            ]
            values = np.concatenate(parts)
            padding = np.full(row_tokens - len(values), dataset.pad_id)
            stream.write(np.concatenate([values, padding]).astype("<i4").tobytes())


def _parts(dataset: ExampleDataset, example: int, branch: int, layout: str) -> list[np.ndarray]:
    """Tokens that a response adds to its row."""
    response = dataset.response(example, branch)
    has_prompt = branch == 0 or layout == "paired"
    return [dataset.prompt(example), response] if has_prompt else [response]


def load_packed(
    path: Path, tokenizer: Tokenizer, row_tokens: int, layout: str, *, check_tokens: bool = True
) -> PackedFiles:
    """Open pairs and their rows, tokens memory-mapped, and verify that they are as written.

    Args:
        check_tokens: compare the checksum of ``tokens.npy``; False if another process of the job
            has done so. The other files are always checked.

    Raises:
        ValueError: one line, if the directory holds no packed files, was packed for another
            tokenizer or row, is damaged, or cannot be read.
    """
    with reading(path):
        meta = _read_meta(path)
    expected = {
        "row_tokens": (row_tokens, "set packing.row_tokens to that or pack it again"),
        "layout": (layout, "set packing.layout to that or pack it again"),
        "tokenizer_fingerprint": (tokenizer.fingerprint, "use that tokenizer or pack it again"),
    }
    for name, (value, cure) in expected.items():
        packed_with = shown(getattr(meta, name))
        if getattr(meta, name) != value:
            raise ValueError(f"{path} was packed with {name}={packed_with}, not {value}; {cure}")
    _check_counts(path, meta)
    with reading(path):
        for name, file_sum in meta.files.items():
            file = path / f"{name}.npy"
            unread = name == "tokens" and not check_tokens
            if problem := file_sum.size_problem(file) if unread else file_sum.problem(file):
                raise _damaged(path, problem)
        arrays = {name: _mapped(path, name, *meta.arrays()[name]) for name in meta.files}
    tokens = arrays.pop("tokens")
    columns = {name: np.array(values) for name, values in arrays.items()}
    rows = Rows(columns["row_pairs"], columns["row_offsets"])
    _check_columns(path, meta, columns, rows)
    largest = max(meta.pad_id, _largest(tokens) if check_tokens else 0)
    if largest >= tokenizer.vocab_size:
        what = f"tokens.npy has token {largest} and the tokenizer {tokenizer.vocab_size} tokens"
        raise _damaged(path, what)
    lengths = columns["prompt_lengths"], columns["response_lengths"]
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
    )
    return PackedFiles(dataset, rows, meta.report)


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
            "write one with tools/prepare_packed_dataset.py"
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


def _check_counts(path: Path, meta: _Meta) -> None:
    """Raise a ValueError if ``meta.json`` has impossible counts or other names of files."""
    least = min(meta.num_rows, meta.num_pairs, meta.num_responses, meta.row_tokens)
    if least < 1 or meta.num_pairs < meta.num_rows or meta.pad_id < 0:
        raise _damaged(path, "meta.json has impossible counts")
    names = set(meta.arrays())
    if meta.files.keys() | {"margins"} != names:
        raise _damaged(path, f"meta.json does not have the files {', '.join(sorted(names))}")


def _mapped(path: Path, name: str, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    """Memory-map an array; ValueError if the file holds another dtype or shape."""
    try:
        array = np.load(path / f"{name}.npy", mmap_mode="r")
    except Exception as error:  # NumPy raises anything for a file that is no array
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _damaged(path, f"{name}.npy cannot be read ({shown(str(error))})") from None
    if not isinstance(array, np.memmap):  # NumPy also reads zip files under any name
        raise _damaged(path, f"{name}.npy holds no array ({type(array).__name__})")
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        what = f"{name}.npy is {shown(f'{array.dtype} {array.shape}')}"
        raise _damaged(path, f"{what}, not {np.dtype(dtype)} {shape}")
    return array


def _check_columns(path: Path, meta: _Meta, columns: Mapping[str, np.ndarray], rows: Rows) -> None:
    """Raise a ValueError if lengths, rows and labels cannot be those of packed pairs."""
    pairs, offsets = meta.num_pairs, rows.offsets
    if offsets[0] != 0 or offsets[-1] != pairs or not (np.diff(offsets) > 0).all():
        raise _damaged(path, "row_offsets.npy does not split the pairs into rows")
    if not np.array_equal(np.sort(rows.examples), np.arange(pairs)):
        raise _damaged(path, "row_pairs.npy does not have every pair once")
    prompts, responses = columns["prompt_lengths"], columns["response_lengths"]
    predicted = responses - (prompts == 0)[:, None]
    if prompts.min() < 0 or predicted.min() < 1:
        raise _damaged(path, "prompt_lengths.npy or response_lengths.npy has too small a length")
    lengths = example_lengths(prompts, responses, meta.layout)
    if np.add.reduceat(lengths[rows.examples], offsets[:-1]).max() > meta.row_tokens:
        raise _damaged(path, f"a row has more than {meta.row_tokens} tokens")
    labels = columns.get("margins")
    if labels is not None and not np.isfinite(labels).all():
        raise _damaged(path, "margins.npy has a margin that is not finite")
    if labels is not None and meta.num_responses == 1 and not np.isin(labels, (0, 1)).all():
        raise _damaged(path, "margins.npy has a label that is neither 0 nor 1")


def _largest(tokens: np.ndarray) -> int:
    """The largest token of int32 [rows, row_tokens]; a negative one is the largest of all."""
    flat = tokens.reshape(-1).view(np.uint32)
    return max(int(flat[at : at + _BLOCK].max()) for at in range(0, len(flat), _BLOCK))


def _starts(
    rows: Rows,
    prompt_lengths: np.ndarray,
    response_lengths: np.ndarray,
    layout: str,
    row_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Starts of prompts (int64 [n]) and responses (int64 [n, K]) in the flattened rows."""
    lengths = example_lengths(prompt_lengths, response_lengths, layout)[rows.examples]
    before = np.cumsum(lengths) - lengths  # in the rows without padding
    begins = np.arange(len(rows)) * row_tokens - before[rows.offsets[:-1]]
    starts = np.empty_like(before)
    starts[rows.examples] = before + np.repeat(begins, np.diff(rows.offsets))
    num_responses = response_lengths.shape[1]
    copies = np.arange(1, num_responses + 1) if layout == "paired" else np.ones(num_responses, int)
    responses = response_lengths.astype(np.int64)
    earlier = np.cumsum(responses, axis=1) - responses
    prompts = prompt_lengths.astype(np.int64)[:, None] * copies
    return starts, starts[:, None] + prompts + earlier
