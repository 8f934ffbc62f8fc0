"""Columns are the same for every cut of a source, any number of processes, and after every stop."""

import errno
import gzip
import importlib
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puzzle_align.data.blocks import Block, GivenRecords
from puzzle_align.data.build import Preparation, columns_of, gathered
from puzzle_align.data.errors import DataError
from puzzle_align.data.pairs import Budget, BuildOptions, Limits, PairRecipe
from puzzle_align.data.prepare import load_pairs
from puzzle_align.data.prompts import PromptOptions, PromptRecipe
from puzzle_align.data.sources import hash_source, open_source
from puzzle_align.data.text_files import JsonLines
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.data.workers import mapped
from tests.dist.spawn import run_alone
from tests.unit import worker_functions
from tests.unit.source_records import read_records

BYTE = ByteTokenizer()
OPTIONS = BuildOptions("auto", Limits(12), Budget(40, "shared", True), skip_errors=True)
PAIRS = PairRecipe(BYTE, OPTIONS)
RECIPES = {
    "pairs": PAIRS,
    "margins": PairRecipe(BYTE, replace(OPTIONS, margins=True)),
    "responses": PairRecipe(BYTE, replace(OPTIONS, unpaired=True)),
    "prompts": PromptRecipe(BYTE, PromptOptions(12, "drop", True)),
}

TEXT = st.text("abé\n", max_size=9)
RECORD = st.fixed_dictionaries(
    {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT},
    optional={"margin": st.sampled_from([0.0, -0.0, 1.5, None, "x"]), "other": TEXT},
)
BAD = st.sampled_from(["", "  ", "{", "3", '{"prompt": 1}', '{"prompt": "a", "chosen": []}'])
LINES = st.lists(RECORD.map(json.dumps) | BAD, min_size=1, max_size=30)


def outcome(path: Path, kind: str, skip_errors: bool, how: Preparation) -> Any:
    """All that columns are, or the error."""
    recipe = RECIPES[kind]
    recipe = replace(recipe, options=replace(recipe.options, skip_errors=skip_errors))
    try:
        columns = gathered(open_source(str(path), None), recipe, str(path), how)
    except DataError as error:
        return str(error), error.reason
    arrays = {name: (a.dtype, a.shape, a.tobytes()) for name, a in columns.arrays.items()}
    first = list(columns.report.first_errors.items())
    return arrays, columns.report, first, columns.column_names, columns.fingerprint


@given(LINES, st.sampled_from(sorted(RECIPES)), st.booleans(), st.integers(1, 400), st.booleans())
@settings(max_examples=60)
def test_every_cut_of_a_source_gives_the_same(
    tmp_path_factory, lines, kind, skip_errors, block_bytes, is_gzip
):
    path = tmp_path_factory.mktemp("cut") / ("a.jsonl.gz" if is_gzip else "a.jsonl")
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if is_gzip else content)
    whole = outcome(path, kind, skip_errors, Preparation())
    parts = outcome(path, kind, skip_errors, Preparation(block_bytes=block_bytes))
    assert parts == whole


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Some thousand pairs, some of them bad, one of them at the end."""
    path = tmp_path_factory.mktemp("many") / "a.jsonl"
    rows = [
        {"prompt": f"p{n} ", "chosen": "c" * (n % 9), "rejected": "r", "margin": n % 3}
        for n in range(3000)
    ]
    lines = [json.dumps(row) if n % 97 else "{" for n, row in enumerate(rows)]
    path.write_text("\n".join([*lines[1:], "[]"]))
    return path


@pytest.mark.parametrize("kind", ["responses", "prompts"])
def test_processes_give_what_one_gives(many, kind):
    whole = outcome(many, kind, True, Preparation())
    assert isinstance(whole[0], dict)
    how = Preparation(num_workers=2, block_bytes=1 << 14)
    assert outcome(many, kind, True, how) == whole
    strict = outcome(many, kind, False, Preparation())
    assert f"{many}:97: " in strict[0]
    assert outcome(many, kind, False, how) == strict


def test_columnar_sources_are_cut_too(many, tmp_path):
    rows = [raw for _, raw in read_records(str(many)) if not isinstance(raw, DataError)]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700
    )
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
    for name in ("a.parquet", "d"):
        source = open_source(str(tmp_path / name))
        for together in (1, 1000):
            blocks = [b for b in source.blocks(together, 1 << 12) if isinstance(b, Block)]
            assert len(blocks) > 2 and blocks[-1].end == source.size == len(rows)
            there, sent = pickle.loads(pickle.dumps((source, blocks)))  # as a worker has them
            found = [list(there.records(block)) for block in sent]
            assert all(len(own) % together == 0 for own in found[:-1])
            assert [raw for own in found for _, raw in own] == rows
            origins = [origin for own in found for origin, _ in own]
            assert origins == [f"{tmp_path / name}:{n}" for n in range(len(rows))]


def test_a_broken_source_is_reported_after_what_lies_before(many, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(many.read_bytes())[:-9])
    for how in (Preparation(), Preparation(num_workers=2, block_bytes=1 << 15)):
        message, reason = outcome(path, "pairs", True, how)
        assert reason == "broken file" and "not a whole gzip file" in message
        assert f"{path}:97: " in outcome(path, "pairs", False, how)[0]


def test_workers_answer_in_order_and_end():
    before = psutil.Process().children()
    results = mapped(worker_functions.slow_double, iter(range(10**9)), 3)
    assert list(islice(results, 20)) == [2 * n for n in range(20)]
    assert len(psutil.Process().children()) == len(before) + 3
    results.close()
    assert psutil.Process().children() == before


def test_few_results_wait_for_that_of_a_slow_item() -> None:
    taken: list[float] = []

    def items() -> Iterator[float]:
        for seconds in (1.0, *[0.0] * 99):
            taken.append(seconds)
            yield seconds

    results = mapped(time.sleep, items(), 2)
    next(results)
    assert len(taken) <= 4  # two for each worker
    results.close()


@pytest.mark.parametrize(
    ("function", "items"), [(worker_functions.killed_at_two, range(9)), (bytearray, [2**62])]
)
def test_a_worker_that_the_system_or_itself_ends_for_memory_is_an_error(function, items):
    with pytest.raises(ValueError, match=r"data.num_proc: .* ended by SIGKILL, .* lower data.num_"):
        list(mapped(function, items, 2))


def test_an_error_in_a_worker_is_one_line_if_it_is_for_the_user():
    with pytest.raises(RuntimeError, match="(?s)Traceback.*invalid literal"):
        list(mapped(worker_functions.broken_at_two, range(9), 2))
    with pytest.raises(DataError, match=r"^none.jsonl: no such file; check the path$"):
        list(mapped(hash_source, ["none.jsonl"], 2))


def test_an_error_of_the_items_is_raised_as_it_is_and_ends_the_workers():
    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError(errno.EIO, "Input/output error")

    before = psutil.Process().children()
    with pytest.raises(OSError, match="Input/output error"):
        list(mapped(worker_functions.slow_double, items(), 2))
    assert psutil.Process().children() == before


def test_closing_early_ends_workers_amid_their_items():
    start = time.monotonic()
    results = mapped(worker_functions.endless_but_the_first, range(9), 2)
    assert next(results) == 0
    results.close()
    assert time.monotonic() - start < 30


def test_workers_find_what_is_found_here(tmp_path, monkeypatch):
    folder = tmp_path / "12:30"
    folder.mkdir()
    (folder / "found_at_half_past.py").write_text("def negative(value):\n    return -value\n")
    monkeypatch.syspath_prepend(folder)
    function = importlib.import_module("found_at_half_past").negative
    assert list(mapped(function, range(3), 2)) == [0, -1, -2]


def test_workers_that_cannot_all_be_started_leave_none_behind():
    before = psutil.Process().children()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 9, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot be started \(Too many open files\): lower"):
            list(mapped(worker_functions.slow_double, range(9), 50))
        assert psutil.Process().children() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


PREPARES = """
import sys
import time
from pathlib import Path
from puzzle_align.data.build import Preparation, columns_of
from puzzle_align.data.pairs import Budget, BuildOptions, Limits, PairRecipe
from puzzle_align.data.tokenize import ByteTokenizer
OPTIONS = BuildOptions("auto", Limits(12), Budget(40, "shared", True), skip_errors=True)
how = Preparation(Path(sys.argv[2]), 3, block_bytes=1 << 12)
columns_of(sys.argv[1], None, "k", PairRecipe(ByteTokenizer(), OPTIONS), how)
"""


def test_a_killed_preparation_ends_its_workers_and_is_made_anew(many, tmp_path):
    """SIGKILL of the process that prepares: nobody else is told."""
    how = Preparation(tmp_path / "cache", block_bytes=1 << 12)
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARES, str(many), str(how.cache_dir)], env=path
    )
    tokens = None
    while tokens is None or not tokens.stat().st_size:
        assert process.poll() is None, "it was done before it could be killed"
        tokens = next(tmp_path.glob("cache/.*.partial/tokens.bin"), None)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert len(workers) == 3 and not psutil.wait_procs(workers, timeout=10)[1]
    assert tokens.exists()
    cached = columns_of(str(many), None, "k", PAIRS, replace(how, num_workers=1))
    again = gathered(JsonLines(many), PAIRS, str(many), Preparation())
    assert cached.fingerprint == again.fingerprint and cached.report == again.report
    assert all(np.array_equal(cached.arrays[name], again.arrays[name]) for name in again.arrays)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_records_that_a_program_makes_are_converted_by_itself():
    rows = ((f"g:{n}", {"prompt": f"{n}", "chosen": "c", "rejected": "r"}) for n in range(2500))
    data, _ = load_pairs(GivenRecords("g", rows), BYTE, OPTIONS, Preparation(num_workers=2))
    assert [BYTE.decode(data.prompt(n).tolist()) for n in range(2500)] == [*map(str, range(2500))]


def test_a_huge_record_is_tokenized_alone(tmp_path):
    """Whatever its neighbours; and its tokens are those that a cut leaves."""
    rows: list[dict[str, Any]] = [{"prompt": "a", "chosen": "b", "rejected": "c"} for _ in range(9)]
    rows[4]["prompt"] = "x" * 3_000_000
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    calls: list[int] = []

    class Noting(ByteTokenizer):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            calls.append(len(texts))
            return super().encode_batch(texts)

    data, report = load_pairs(str(path), Noting(), OPTIONS, Preparation())
    assert calls == [12, 1, 1, 1, 12] and report.num_truncated == 1
    assert data.prompt(4).tolist() == [*b"x" * 10] and len(data) == 9


def write_until_full(many: Path, folder: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # a disk that is full by then
    with pytest.raises(ValueError) as full:
        columns_of(str(many), None, "k", PAIRS, Preparation(folder, 1, block_bytes=1 << 12))
    return str(full.value)


def test_a_cache_that_cannot_be_written_is_one_line(many, tmp_path):
    (tmp_path / "file").write_text("")
    line = f"data.cache_dir: {tmp_path}/file/cache cannot be written (Not a directory): free space"
    with pytest.raises(ValueError, match=line.replace("(", r"\(").replace(")", r"\)")):
        columns_of(str(many), None, "k", PAIRS, Preparation(tmp_path / "file" / "cache"))

    full = run_alone(write_until_full, many, tmp_path / "cache")
    assert re.match(r"data.cache_dir: .* cannot be written \(File too la", full)
    how = Preparation(tmp_path / "cache", 1, block_bytes=1 << 12)
    assert columns_of(str(many), None, "k", PAIRS, how).report.num_used > 0  # there is room again


def test_signals_to_the_rank_s_group_end_no_worker() -> None:
    """torchrun sends them to the whole group; the rank itself handles them."""
    code = """
import os, signal
from puzzle_align.data.workers import mapped
from tests.unit import worker_functions
results = mapped(worker_functions.slow_double, iter(range(6)), 2)
first = next(results)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the workers have not inherited it
os.killpg(0, signal.SIGTERM)
print(first, *results)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True
    )
    assert done.stdout == "0 2 4 6 8 10\n", done.stderr
