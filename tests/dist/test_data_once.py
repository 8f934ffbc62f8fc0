"""What a job reads, one rank reads: the others take what it made."""

import json
from pathlib import Path

import pytest
import torch

from puzzle_align.config.load import find_config, load_file
from puzzle_align.runtime.groups import World
from puzzle_align.stages.preference.data import open_data
from puzzle_align.stages.rl.setup import open_prompts
from puzzle_align.stages.tokenizer import open_tokenizer
from tests.dist.spawn import run_ranks

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
    """Bytes that this rank read, and the tokens of the first prompt."""
    config = load_file(
        find_config(name),
        ["data.eval_fraction=0"] * (name == "dpo_tiny")
        + ["data.format=auto", f"data.train={folder}/data.jsonl", f"output_dir={folder}/out"],
    )
    world = World(rank, world_size, torch.device("cpu"))
    before = _num_read()
    if config.stage == "ppo":
        prompt = open_prompts(config, open_tokenizer(config), world).prompt(0)
    else:
        prompt = open_data(config, world).train.prompt(0)
    return _num_read() - before, prompt.tolist()


def _num_read() -> int:
    """Bytes that this process has read from files and sockets."""
    (line,) = (own for own in Path("/proc/self/io").read_text().splitlines() if "rchar" in own)
    return int(line.split()[1])
