"""Rows packed offline: prepare, the files and their damage, and that training sees one data."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from puzzle_align.commands import prepare
from puzzle_align.config.sections.data import DataConfig, PackingConfig
from puzzle_align.data import build
from puzzle_align.data.build import Preparation
from puzzle_align.data.dataset import ExampleDataset, from_examples
from puzzle_align.data.packed_files import load_packed, write_packed
from puzzle_align.data.packing import example_lengths, first_fit_decreasing
from puzzle_align.data.prepare import packed_settings, prepare_data
from puzzle_align.data.tokenize import ByteTokenizer, Tokenizer, load_tokenizer
from puzzle_align.files.checksums import sealed, unsealed
from tests.command import main
from tests.refusals import refusal
from tests.unit.chat_tokenizers import save_qwen
from tests.unit.test_loader import make_loader

HH = Path(__file__).parents[3] / "shared/data/hh_rlhf_harmless_base_test.jsonl.gz"
BYTE = ByteTokenizer()
data = partial(DataConfig, max_length=256)  # no longer than the rows
AGAIN = "make them again with puzzle-align prepare"


@pytest.fixture
def source(tmp_path):
    generator = np.random.default_rng(0)
    rows = []
    for length in generator.integers(1, 30, (60, 3)).tolist():
        rows.append(
            {
                "prompt": "p" * length[0],
                "chosen": "c" * length[1],
                "rejected": "r" * length[2],
                "margin": length[0] / 4,
            }
        )
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(config: DataConfig, packing: PackingConfig, tokenizer: Tokenizer = BYTE):
    return prepare_data(config, packing, tokenizer, Preparation(), add_eos="auto", seed=0)


def pack(source: str, output: Path, *overrides: str) -> int:
    """Run the command with the config of the tiny DPO."""
    keys = ["tokenizer.path=byte", "actor.model.random_weights=true", "data.format=auto"]
    keys += [f"data.train={source}", f"output_dir={output.parent}/run", "data.max_length=256"]
    return main(["prepare", "--config", "dpo_tiny", "--output", str(output), *keys, *overrides])


@pytest.mark.parametrize("layout", ["shared", "paired"])
def test_packed_files_give_the_microbatches_of_scope_dataset(tmp_path, capsys, source, layout):
    output = tmp_path / "packed"
    assert pack(source, output, "packing.row_tokens=256", f"packing.layout={layout}") == 0
    printed = capsys.readouterr().out
    assert "60 pairs, 0 of them truncated" in printed and "rows of 256 tokens: fill" in printed
    assert re.search(rf"^  whole, {layout} +\d+ +\d+ +\d+ +\d+$", printed, re.MULTILINE)
    packing = PackingConfig(row_tokens=256, layout=layout, scope="dataset")
    plain = prepared(data(train=source), packing)
    packed = prepared(data(train=str(output), format="packed"), packing)
    assert packed.train.fingerprint == plain.train.fingerprint
    assert isinstance(packed.train.tokens, np.memmap)
    sizes = {"global_batch_size": 16, "row_tokens": 256, "data_rank": 1, "data_size": 2}
    loaders = [
        make_loader(pairs.train, layout=layout, scope="dataset", rows=pairs.rows, **sizes)
        for pairs in (plain, packed)
    ]
    assert plain.rows is None and packed.rows is not None
    for step in range(loaders[0].steps_per_epoch + 1):
        one, other = (loader.batch(step) for loader in loaders)
        assert np.array_equal(one.example_indices, other.example_indices)
        for left, right in zip(one.microbatches, other.microbatches, strict=True):
            assert left.layout == right.layout
            for name in ("tokens", "position_ids", "targets", "slots", "example_ids", "branch_ids"):
                assert np.array_equal(getattr(left, name), getattr(right, name))


def test_rows_on_disk_by_hand(tmp_path):
    dataset = from_examples([([1, 2], [[3], [4]]), ([5], [[6], [7, 8]])], pad_id=9)
    lengths = example_lengths(dataset.prompt_lengths, dataset.response_lengths, "paired")
    rows = first_fit_decreasing(lengths, 8)
    settings = {"packing.row_tokens": 8, "packing.layout": "paired"}
    write_packed(tmp_path / "p", dataset, rows, settings, BYTE)
    tokens = np.load(tmp_path / "p" / "tokens.npy")
    assert tokens.tolist() == [[1, 2, 3, 1, 2, 4, 9, 9], [5, 6, 5, 7, 8, 9, 9, 9]]
    packed = load_packed(tmp_path / "p", BYTE, settings)
    assert packed.dataset.response_starts.tolist() == [[2, 5], [9, 11]]
    assert packed.dataset.response(1, 1).tolist() == [7, 8]
    assert np.array_equal(packed.rows.examples, rows.examples)


def test_what_was_cut_is_known_of_packed_files_too(tmp_path, source):
    length = ("data.max_length=30", "data.truncation_mode=keep_start", "packing.row_tokens=4096")
    assert pack(source, tmp_path / "packed", *length) == 0
    config = data(train=source, max_length=30, truncation_mode="keep_start")
    plain = prepared(config, PackingConfig())
    again = replace(config, train=str(tmp_path / "packed"), format="packed")
    assert prepared(again, PackingConfig()).report == plain.report
    assert 0 < plain.report.num_cut_responses < len(plain.train)


def test_packing_goes_on_where_it_was_stopped(tmp_path, source, monkeypatch):
    output, found = tmp_path / "packed", list[ExampleDataset]()

    def full(_: Path, dataset: ExampleDataset, *rest: object) -> None:
        found.append(dataset)
        raise OSError("no space")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(prepare, "write_packed", full)
        pack(source, output)
    assert isinstance(found[0].tokens, np.memmap)  # not all of it is in memory
    monkeypatch.setattr(build, "parts", None)  # what is tokenized is not tokenized again
    assert pack(source, output) == 0


@pytest.fixture
def packed(tmp_path, source):
    output = tmp_path / "packed"
    keys = ["tokenizer.path=byte", "data.format=auto", f"data.train={source}"]
    keys += [f"output_dir={tmp_path}/run", "packing.row_tokens=256", "data.max_length=256"]
    keys += ["reward.model.random_weights=true", "data.eval_fraction=0.5"]  # all is packed
    assert main(["prepare", "--config", "reward_tiny", "--output", str(output), *keys]) == 0
    return output


def opened(path: Path, check_tokens: bool = True):
    settings = packed_settings(data(), PackingConfig(row_tokens=256), "auto")
    return load_packed(path, BYTE, settings, check_tokens=check_tokens)


def error_of(path: Path, **options: bool) -> str:
    caught = refusal(lambda: opened(path, **options))
    return caught.removeprefix(f"{path}: ").removesuffix(f"; {AGAIN}")


@pytest.mark.parametrize("name", ["tokens.npy", "margins.npy", "meta.json"])
@pytest.mark.parametrize("check_tokens", [True, False])
def test_what_cannot_be_read_need_not_be_made_again(packed, name, check_tokens):
    (packed / name).unlink()
    (packed / name).symlink_to(name)  # to itself
    assert error_of(packed, check_tokens=check_tokens) == (
        f"{packed} cannot be read ({name}: Too many levels of symbolic links), and is left as it "
        "is: mend the disk or its permissions there, and run the same command again"
    )


@pytest.mark.parametrize("name", ["tokens", "prompt_lengths", "row_pairs", "margins", "meta"])
def test_a_flipped_bit_is_found(packed, name):
    file = packed / ("meta.json" if name == "meta" else f"{name}.npy")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    if name == "meta":
        assert error_of(packed).startswith("packed files are damaged: meta.json: it")
    else:
        what = f"packed files are damaged: {name}.npy has another checksum than when it was made"
        assert error_of(packed) == what
        if name != "tokens":
            assert error_of(packed, check_tokens=False) == what
    if name == "tokens":  # one process has read them for all
        opened(packed, check_tokens=False)


def test_missing_and_cut_files_are_found_without_reading_the_tokens(packed):
    file = packed / "tokens.npy"
    with file.open("r+b") as stream:
        stream.truncate(1000)
    assert "tokens.npy has 1000 bytes, not" in error_of(packed, check_tokens=False)
    file.unlink()
    assert "tokens.npy is missing" in error_of(packed, check_tokens=False)


def test_packed_files_without_checksums_are_to_be_made_again(packed):
    meta = packed / "meta.json"
    values = json.loads(meta.read_text())
    del values["xxh3_64"]
    meta.write_text(json.dumps({**values, "version": 1}))
    assert error_of(packed).startswith("packed files are damaged: meta.json: it has no checksum")
    meta.write_text(sealed({**unsealed(sealed(values).encode()), "version": 4}))
    assert error_of(packed) == "packed files of format 4, not 3"


@pytest.mark.parametrize(
    ("packing", "changed", "message"),
    [
        (
            {"row_tokens": 128},
            {},
            "was packed with packing.row_tokens=256; this job has packing.row_tokens=128",
        ),
        (
            {"layout": "paired"},
            {"max_length": 30, "max_prompt_length": 20},
            "was packed with packing.layout='shared', data.max_length=256, "
            "data.max_prompt_length=null; this job has packing.layout='paired', "
            "data.max_length=30, data.max_prompt_length=20",
        ),
        (
            {},
            {"apply_chat_template": True},
            "was packed with data.apply_chat_template=false; this job has "
            "data.apply_chat_template=true",
        ),
    ],
)
def test_other_settings_are_refused_by_name(packed, packing, changed, message):
    config = data(train=str(packed), format="packed", **changed)
    caught = refusal(lambda: prepared(config, PackingConfig(**{"row_tokens": 256, **packing})))
    assert caught == f"{packed} {message}: set the keys as they were, or pack it again"


@pytest.mark.parametrize(
    ("add_eos", "changed", "message"),
    [
        (True, {}, "tokenizer.add_eos=auto; this job has tokenizer.add_eos=true"),
        ("auto", {"comparisons": "best"}, "data.comparisons=all; this job has data.comparisons="),
    ],
)
def test_other_tokens_and_comparisons_are_refused_by_name(packed, add_eos, changed, message):
    settings = packed_settings(data(**changed), PackingConfig(row_tokens=256), add_eos)
    caught = refusal(lambda: load_packed(packed, BYTE, settings))
    assert caught.replace("'", "").startswith(f"{packed} was packed with {message}")


def test_files_from_before_a_setting_existed_have_what_was_done_then(packed):
    meta = packed / "meta.json"
    values = unsealed(meta.read_bytes())
    values["settings"] = {
        key: value
        for key, value in values["settings"].items()
        if key not in ("data.comparisons", "margins")
    }
    meta.write_text(sealed(values))
    settings = packed_settings(data(), PackingConfig(row_tokens=256), "auto")
    found = load_packed(packed, BYTE, {**settings, "margins": True}).dataset
    assert found.labels is not None and found.labels.any()
    best = refusal(lambda: load_packed(packed, BYTE, {**settings, "data.comparisons": "best"}))
    assert "data.comparisons" in best


def test_another_tokenizer_is_refused_by_name(tmp_path, packed):
    def error(tokenizer: Tokenizer) -> str:
        config = data(train=str(packed), format="packed", max_length=30)
        return refusal(lambda: prepared(config, PackingConfig(row_tokens=256), tokenizer))

    qwen = load_tokenizer(save_qwen(tmp_path / "qwen"))
    assert error(qwen) == (
        f"{packed} was packed with data.max_length=256, tokenizer.path=byte; this job has "
        f"data.max_length=30, tokenizer.path={tmp_path}/qwen: set the keys as they were, or pack it"
        " again"
    )
    assert "tokenizer.path=byte, whose tokens or chat template are others now: set" in (
        error(ByteTokenizer("{{ messages }}"))
    )


def test_errors_of_reading(tmp_path, packed):
    config = data(train=str(packed), format="packed", eval_fraction=0.1)
    assert refusal(lambda: prepared(config, PackingConfig(row_tokens=256))) == (
        "data.eval_fraction=0.1 cannot split packed rows; pack the held-out pairs into a "
        "directory of their own and name it in data.eval"
    )
    assert refusal(lambda: prepared(data(train=str(packed)), PackingConfig())) == (
        f"{packed}: files that puzzle-align prepare has packed; set data.format=packed"
    )
    with pytest.raises(ValueError, match="has no meta.json: not a directory of packed files"):
        prepared(data(train=str(tmp_path), format="packed"), PackingConfig())


def test_errors_of_the_command(tmp_path, capsys, source):
    assert pack(source, tmp_path) == 2
    assert capsys.readouterr().err == (
        f"error: --output {tmp_path}: it exists already; remove it, or name another\n"
    )
    out = tmp_path / "out"
    assert pack(source, out, "packing.row_tokens=16", "data.max_length=16") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}:") and error.count("\n") == 1
    assert pack(source, out, "data.format=packed") == 2
    assert capsys.readouterr().err.startswith("error: prepare packs data for data.format=packed: ")
    assert pack(source, out, "tokenizer.path=null") == 2
    error = capsys.readouterr().err
    assert "tokenizer.path: null, and actor.model has no path to take it from" in error
    assert main(["prepare", "--config", "ppo_tiny", "--output", str(out)]) == 2
    assert "there is nothing to pack" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.skipif(not HH.is_file(), reason="the HH file is not at hand")
def test_fill_on_hh(tmp_path, capsys):
    keys = ("packing.row_tokens=4096", "data.max_length=2048")
    assert pack(str(HH), tmp_path / "out", *keys) == 0
    fill = capsys.readouterr().out.split("fill ")[1].split("%")[0]
    assert float(fill) >= 98
