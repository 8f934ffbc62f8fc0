"""Tables of the reference's log-probabilities: damaged ones are told of and computed anew.

Two ranks, on one node or on two with disks of their own; all cases share one spawn.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from puzzle_align.config.load import load_job
from puzzle_align.config.resolve import Job
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.runtime.groups.collectives import barrier
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages import models as opened_models
from puzzle_align.stages.dpo import DPOTrainer
from puzzle_align.stages.preference import reference_table
from tests.dist.spawn import run_ranks
from tests.jobs import resolved

JOB = """
global_batch_size: 8
max_steps: 2
engine: {device: cpu}
actor:
  model:
    config:
      {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
       num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 260,
       max_position_embeddings: 64}
data: {format: synthetic, num_synthetic: 16, max_length: 64}
dpo: {precompute_ref_log_probs: true}
packing: {row_tokens: 64}
optimizer: {lr: 0.01, warmup_steps: 2}
telemetry: {progress: false}
"""


def _scaled(file: Path) -> None:
    values = np.fromfile(file)
    (1.5 * values).tofile(file)


def _cut(file: Path) -> None:
    os.truncate(file, 100)


def _flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _not_described(file: Path) -> None:
    (file.parent / "meta.json").write_text("{}")


def _gone(file: Path) -> None:
    file.unlink()


def _none(_file: Path) -> None: ...


DAMAGES = (_scaled, _cut, _flipped, _not_described, _gone)


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _run(world: World, folder: Path, damage: Callable[[Path], None], does_it: bool) -> Any:
    """Losses, what was built, what the cache told and the table, on a rank, after a damage."""
    if does_it:
        for file in (folder / "cache").glob("ref_log_probs/*/log_probs.bin"):
            damage(file)
    barrier()
    built, open_context = [], reference_table.open_context

    def recorded(job: Job, context: ContextPlan, *arguments: Any) -> Any:
        built.append(context.role)
        return open_context(job, context, *arguments)

    job, told = load_job(JOB, [f"output_dir={folder}"]), _Told()
    cache_log = logging.getLogger("puzzle_align.data.cache")
    cache_log.addHandler(told)
    reference_table.open_context = opened_models.open_context = recorded
    try:
        trainer = DPOTrainer(resolved(job, world.size), world)
    finally:
        reference_table.open_context = opened_models.open_context = open_context
        cache_log.removeHandler(told)
    losses = [trainer.train_step(step)[0]["loss"] for step in range(job.max_steps)]
    (file,) = (folder / "cache").glob("ref_log_probs/*/log_probs.bin")
    table = np.fromfile(file).tolist()
    barrier()  # a rank that goes on damages it
    return losses, built, told.lines, table


def _all_runs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    world = World(rank, world_size, torch.device("cpu"))
    one = Path(folder) / "one"
    runs = {
        f"one node, {damage.__name__}": _run(world, one, damage, rank == 0)
        for damage in (_none, *DAMAGES)
    }
    own = Path(folder) / f"node{rank}"
    os.environ["LOCAL_RANK"] = "0"
    for damage in (_none, *DAMAGES):
        runs[f"two nodes, {damage.__name__}"] = _run(world, own, damage, rank == 1)
    return runs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all_runs, 2, str(tmp_path_factory.mktemp("tables")))


@pytest.mark.parametrize("nodes", ["one node", "two nodes"])
@pytest.mark.parametrize("damage", [damage.__name__ for damage in DAMAGES])
def test_a_damaged_table_is_told_of_and_computed_anew(ranks, nodes, damage) -> None:
    whole = ranks[0]["one node, _none"]
    for rank, runs in enumerate(ranks):
        losses, built, told, table = runs[f"{nodes}, {damage}"]
        assert losses == whole[0] and table == whole[3]
        assert built == ["reference", "actor"]
        is_first = rank == (0 if nodes == "one node" else 1)
        assert len(told) == is_first
        assert all("is damaged (" in line and "made anew" in line for line in told)
