"""From config to datasets: errors before training, skipping, the cache, the generated task."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data import build
from puzzle_align.data.build import Preparation
from puzzle_align.data.errors import DataError
from puzzle_align.data.packing import example_lengths
from puzzle_align.data.prepare import Prepared, prepare_data
from puzzle_align.data.tokenize import ByteTokenizer
from tests.refusals import refusal

HH = Path(__file__).parents[3] / "shared/data/hh_rlhf_harmless_base_test.jsonl.gz"
GOOD = {"prompt": "ab", "chosen": "cd", "rejected": "e"}


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(
    config: DataConfig,
    packing: PackingConfig | None = None,
    cache_dir: Path | None = None,
    template: str | None = None,
):
    return prepare_data(
        config,
        packing or PackingConfig(),
        ByteTokenizer(template),
        Preparation(cache_dir),
        add_eos=True,
        seed=0,
    )


def lengths(data: Prepared) -> list[int]:
    return example_lengths(
        data.train.prompt_lengths, data.train.response_lengths, "shared"
    ).tolist()


def test_tokens_of_a_file(tmp_path):
    data = run(DataConfig(train=write(tmp_path / "a.jsonl", [GOOD, {**GOOD, "prompt": "z"}])))
    assert data.train.prompt(0).tolist() == [257, *b"ab"]
    assert data.train.response(1, 0).tolist() == [*b"cd", 258]
    assert data.train.response(1, 1).tolist() == [*b"e", 258]
    assert lengths(data) == [8, 7] and data.eval is None
    assert data.report.num_used == 2 and data.report.num_truncated == 0


def test_one_bad_row_stops_before_training_with_one_line(tmp_path):
    source = write(tmp_path / "a.jsonl", [GOOD] * 600 + [{**GOOD, "chosen": []}])
    assert refusal(
        lambda: run(DataConfig(train=source), cache_dir=tmp_path / "cache"), DataError
    ) == (
        f"{source}:601: field 'chosen' is empty; fill it in, "
        "or leave bad records out with data.on_error=skip"
    )
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def test_skipping_counts_by_reason_and_the_cache_remembers(tmp_path):
    long = {**GOOD, "prompt": "p" * 50}
    rows = [GOOD, {**GOOD, "chosen": []}, {"prompt": "x"}, long]
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows), on_error="skip")
    for _ in range(2):
        data = run(config, PackingConfig(row_tokens=40), tmp_path / "cache")
        assert len(data.train) == 1
        assert data.report.skipped == {
            "empty field": 1,
            "missing field": 1,
            "longer than the row budget": 1,
        }


@pytest.mark.parametrize(
    ("packing", "needed"),
    [
        (PackingConfig(row_tokens=7), 8),
        (PackingConfig(row_tokens=10, layout="paired"), 11),
        (PackingConfig(row_tokens=15, layout="paired", enabled=False), 16),
    ],
)
def test_a_pair_over_the_row_budget_is_an_error(tmp_path, packing, needed):
    source = write(tmp_path / "a.jsonl", [GOOD])
    fitting = replace(packing, row_tokens=needed)
    assert len(run(DataConfig(train=source), fitting).train) == 1
    assert refusal(lambda: run(DataConfig(train=source), packing), DataError) == (
        f"{source}:1: it needs {needed} tokens of a row, over "
        f"packing.row_tokens={packing.row_tokens}; raise packing.row_tokens or lower "
        "data.max_length, or leave bad records out with data.on_error=skip"
    )


def test_no_usable_pairs(tmp_path):
    source = write(tmp_path / "a.jsonl", [{**GOOD, "chosen": []}])
    with pytest.raises(DataError, match="no usable pairs .*a.jsonl:1: field 'chosen' is empty"):
        run(DataConfig(train=source, on_error="skip"))
    with pytest.raises(DataError, match=r"no usable pairs \(it has no records\)"):
        run(DataConfig(train=write(tmp_path / "b.jsonl", [])))
    with pytest.raises(ValueError, match="data.train is not set"):
        run(DataConfig())


def test_cache_is_used_and_follows_content_and_options(tmp_path, monkeypatch):
    source, cache = write(tmp_path / "a.jsonl", [GOOD] * 3), tmp_path / "cache"
    first = run(DataConfig(train=source), cache_dir=cache).train
    built = []
    parts = build.parts
    monkeypatch.setattr(build, "parts", lambda *a, **k: built.append(1) or parts(*a, **k))
    cached = run(DataConfig(train=source), cache_dir=cache).train
    assert not built and cached.fingerprint == first.fingerprint
    assert isinstance(cached.tokens, np.memmap)
    assert np.array_equal(cached.tokens, first.tokens)
    assert np.array_equal(cached.response_starts, first.response_starts)
    run(DataConfig(train=source, max_length=5), cache_dir=cache)
    write(tmp_path / "a.jsonl", [GOOD] * 4)
    assert len(run(DataConfig(train=source), cache_dir=cache).train) == 4
    assert len(built) == 2
    row = {"prompt": "ab", "chosen": "abcd", "rejected": "abe"}
    texts = {name: [{"role": "user", "content": text}] for name, text in row.items()}
    chat = DataConfig(train=write(tmp_path / "b.jsonl", [texts]))
    for template, prompt in ((None, "\n\nHuman: ab\n\n"), ("{{ messages[-1].content }}", "ab")):
        data = run(chat, cache_dir=cache, template=template).train
        assert bytes(data.prompt(0).tolist()).decode() == prompt


def test_equal_responses_are_kept_and_counted(tmp_path):
    rows = [GOOD, {**GOOD, "rejected": "cd"}, {**GOOD, "chosen": "cdzx", "rejected": "cdzy"}]
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows), max_length=5)
    for _ in range(2):
        data = run(config, cache_dir=tmp_path / "cache")
        assert len(data.train) == 3
        assert data.report.summary() == (
            "3 pairs, 3 of them truncated (1 with a cut response), 2 of them with equal responses"
        )


def test_eval_file_and_eval_fraction(tmp_path):
    source = write(tmp_path / "a.jsonl", [{**GOOD, "prompt": str(i)} for i in range(10)])
    data = run(DataConfig(train=source, eval_fraction=0.3))
    assert data.eval is not None and (len(data.train), len(data.eval)) == (7, 3)
    data = run(DataConfig(train=source, eval=write(tmp_path / "b.jsonl", [GOOD])))
    assert data.eval is not None and (len(data.train), len(data.eval)) == (10, 1)


def test_format_synthetic():
    data = run(DataConfig(format="synthetic", num_synthetic=100, eval_fraction=0.2))
    assert data.eval is not None and (len(data.train), len(data.eval)) == (80, 20)
    assert set(lengths(data)) == {11}  # BOS, 6, then twice a letter and EOS


@pytest.mark.skipif(not HH.is_file(), reason="the HH file is not at hand")
def test_hh_transcripts():
    data = run(
        DataConfig(train=str(HH), max_length=8192, truncation_mode="error"),
        PackingConfig(row_tokens=8192),
    )
    assert len(data.train) == 2312 and data.report.skipped == {}
    tokenizer = ByteTokenizer()
    for row in range(0, 2312, 97):
        prompt = tokenizer.decode(data.train.prompt(row).tolist())
        responses = [tokenizer.decode(data.train.response(row, k).tolist()) for k in (0, 1)]
        assert prompt.startswith("\n\nHuman:") and prompt.endswith("\n\nAssistant:")
        assert responses[0] != responses[1]
