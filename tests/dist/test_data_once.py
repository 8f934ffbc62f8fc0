"""Data that one rank of a node reads: the others take the arrays it made."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import find_config, load_file
from puzzle_align.data.packed_files import write_packed
from puzzle_align.data.packing import Rows
from puzzle_align.data.prepare import packed_settings
from puzzle_align.runtime.groups.collectives import barrier, on_other_nodes
from puzzle_align.runtime.liveness.activity import this_rank
from puzzle_align.stages.preference.data import job_pairs, open_data
from puzzle_align.stages.rl.prompts import open_prompts
from puzzle_align.stages.tokenizer import open_tokenizer
from tests.dist.spawn import run_ranks
from tests.jobs import resolved
from tests.refusals import refusal
from tests.unit.test_stamps import num_read

SIZE = 8_000_000  # bytes, most of them in a column that nothing reads


@pytest.mark.parametrize("name", ["dpo_tiny", "ppo_tiny"])
def test_the_source_is_read_on_one_rank(name: str, tmp_path: Path) -> None:
    pair = {"prompt": "a:", "chosen": "b", "rejected": "c", "note": "x" * SIZE}
    (tmp_path / "data.jsonl").write_text(json.dumps(pair))
    (first, *tokens), *others = run_ranks(_read, 3, tmp_path, name)
    assert first > 2 * SIZE  # hashed, and tokenized
    for size, *same in others:
        assert size < SIZE / 4 and same == tokens


def _read(rank: int, world_size: int, folder: Path, name: str) -> tuple[int, list[int]]:
    """Bytes that this rank read, and the tokens."""
    config = _config(name, f"{folder}/data.jsonl", folder / "out")
    before = num_read()
    tokens = _tokens(config, world_size)
    return num_read() - before, tokens.tolist()


def _config(name: str, source: str, output: Path) -> JobConfig:
    keys = ["data.eval_fraction=0"] * (name == "dpo_tiny")
    keys += ["data.format=auto", f"data.train={source}", f"output_dir={output}"]
    return load_file(find_config(name), keys)


def _tokens(config: JobConfig, world_size: int) -> np.ndarray:
    """All tokens of a job's data, opened as the job opens them."""
    job = resolved(config, world_size)
    if config.stage == "ppo":
        return open_prompts(job, open_tokenizer(config.tokenizer)).tokens
    return open_data(job).train.tokens


def _on_nodes_of_two(rank: int, _world_size: int) -> tuple[Any, str]:
    os.environ["LOCAL_RANK"] = str(rank % 2)
    first = on_other_nodes(lambda: (rank, this_rank.num_unhurried))

    def fail() -> None:
        raise ValueError(f"{rank}: no good")

    message = refusal(lambda: on_other_nodes(fail))
    assert this_rank.num_unhurried == 0 and not this_rank.is_waiting
    return first, message


def test_the_first_rank_of_every_other_node_does_it_without_haste() -> None:
    wanted = [(2, 1), (4, 1)], f"on node {platform.node()}: 2: no good"
    assert run_ranks(_on_nodes_of_two, 5) == [wanted] * 5


@pytest.mark.parametrize("name", ["dpo_tiny", "ppo_tiny"])
def test_a_cache_on_another_node_s_disk_is_verified(name: str, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}:", "chosen": "b", "rejected": "c"} for n in range(99)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    whole, damaged = run_ranks(_twice, 2, tmp_path, name)
    assert whole == damaged  # as it was made, on both nodes


def _twice(rank: int, world_size: int, folder: Path, name: str) -> bytes:
    """A node's tokens, with one of node 1's changed in between."""
    os.environ["LOCAL_RANK"] = "0"
    out = folder / f"node{rank}"
    config = _config(name, f"{folder}/data.jsonl", out)
    first = _tokens(config, world_size).tobytes()
    (file,) = out.glob("cache/*/tokens.bin")
    if rank == 1:
        _change(file, at=8)
    barrier()
    assert _tokens(config, world_size).tobytes() == first
    return first


def _change(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(b"\1")


@pytest.mark.parametrize("name", ["dpo_tiny", "ppo_tiny"])
def test_another_copy_on_another_node_is_refused(name: str, tmp_path: Path) -> None:
    """Keep nothing of it: once the right copy is there, the job begins."""
    first, second = run_ranks(_copies, 2, tmp_path, name)
    assert first[0] == second[0] and first[1] == second[1]
    assert first[0].startswith(
        f"on node {platform.node()}: data.jsonl: its content differs from what rank 0 read at"
    )


def _copies(rank: int, world_size: int, folder: Path, name: str) -> tuple[str, bytes]:
    """Error about another data.jsonl on node 1, and the tokens once it is node 0's."""
    os.environ["LOCAL_RANK"] = "0"
    own = folder / f"node{rank}"
    own.mkdir()
    os.chdir(own)
    _write_pairs(Path("data.jsonl"), "b" if rank == 0 else "x")
    config = _config(name, "data.jsonl", Path("out"))
    message = refusal(lambda: _tokens(config, world_size))
    assert len([*own.glob("out/cache/*/meta.json")]) == 1 - rank
    _write_pairs(Path("data.jsonl"), "b")
    return message, _tokens(config, world_size).tobytes()


def _write_pairs(file: Path, letter: str) -> None:
    pairs = [{"prompt": f"{letter}{n}:", "chosen": "b", "rejected": "c"} for n in range(9)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def test_packed_files_on_another_node_s_disk_are_verified_and_compared(tmp_path: Path) -> None:
    for case, message in {
        "other": "data.train: this node's data differ from rank 0's",
        "damaged": f"{tmp_path}/damaged/node1: packed files are damaged: tokens.npy has another "
        "checksum than when it was made; make them again with puzzle-align prepare",
    }.items():
        (tmp_path / case).mkdir()
        first, second = run_ranks(_packed, 2, tmp_path / case, case == "other")
        assert first == second
        assert first.startswith(f"on node {platform.node()}: {message}")
        assert case == "other" or first.endswith(message)


def _packed(rank: int, world_size: int, folder: Path, is_other: bool) -> str:
    """Error about the packed files of two nodes: node 1's damaged, or whole and others."""
    os.environ["LOCAL_RANK"] = "0"
    config = _write_node_s_files(rank, folder, [f"data.num_synthetic={64 + rank * is_other}"])
    if rank == 1 and not is_other:
        _change(folder / "node1" / "tokens.npy", at=200)
    barrier()
    return refusal(lambda: open_data(resolved(config, world_size)))


def _write_node_s_files(rank: int, folder: Path, keys: list[str]) -> JobConfig:
    """Pack what the keys name for a node; the config of a job that reads it."""
    path = folder / f"node{rank}"
    made = ["data.eval_fraction=0", f"output_dir={folder}/out{rank}", *keys]
    packed = [*made, "data.format=packed", f"data.train={path}"]
    config = load_file(find_config("dpo_tiny"), packed)
    tokenizer = open_tokenizer(config.tokenizer)
    pairs = job_pairs(load_file(find_config("dpo_tiny"), made), tokenizer).train
    rows = Rows(np.arange(len(pairs)), np.arange(len(pairs) + 1))
    settings = packed_settings(config.data, config.packing, config.tokenizer.add_eos)
    write_packed(path, pairs, rows, settings, tokenizer)
    return config
