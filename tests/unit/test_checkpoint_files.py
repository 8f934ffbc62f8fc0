"""A checkpoint's values: plain, and whole on the disk; the steps at which one is saved."""

import argparse
import io
import os
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunState
from torch.distributed.checkpoint import LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from puzzle_align.config.load import load_job
from puzzle_align.config.saved import DamagedError, checkpoint_paths, open_checkpoint
from puzzle_align.runtime.checkpoint import writer as checkpoint_writer
from puzzle_align.runtime.checkpoint.reader import _plain, _Reader, read_state
from puzzle_align.runtime.checkpoint.writer import _SummedStream
from puzzle_align.runtime.liveness.activity import this_rank
from puzzle_align.stages import saving
from puzzle_align.stages.divergence import Health
from puzzle_align.stages.saving import Saving
from tests.checkpoints import seal
from tests.refusals import refusal
from tests.unit.test_saved import make_checkpoint

STEP = Path("step_00000003")


def _stream(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def test_what_is_saved_of_a_model_is_read() -> None:
    saved = OrderedDict(a=[torch.ones(3), {"lr": 1e-3, 1: (None, True)}], b=torch.bfloat16)
    assert str(_plain(_stream(saved), STEP, "common.pt")) == str(saved)


@pytest.mark.parametrize(
    "value",
    [OptimizerConfig(), np.float64(1.0), Path("a"), argparse.Namespace(a=1), RerunState(0)],
    ids=lambda value: type(value).__name__,
)
def test_classes_that_packages_declare_safe_are_refused(value: Any) -> None:
    """They are on the list when this runs: it is Megatron that adds them."""
    added = torch.serialization.get_safe_globals()
    assert OptimizerConfig in added
    with pytest.raises(DamagedError, match=r"common.pt holds code, or an unknown class \("):
        _plain(_stream({"actor": value}), STEP, "common.pt")
    # Of others' loading nothing is taken away.
    assert set(map(str, torch.serialization.get_safe_globals())) == set(map(str, added))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02N.", b"x" * 100, b"\x80\x04]r"])
def test_what_holds_no_values_is_damaged(data: bytes) -> None:
    with pytest.raises(DamagedError, match="step_00000003 is damaged or incomplete .common.pt"):
        _plain(io.BytesIO(data), STEP, "common.pt")


def test_a_value_beside_the_tensors_is_refused_unread(tmp_path: Path) -> None:
    reader = _Reader(open_checkpoint(make_checkpoint(tmp_path, 3)), Metadata({}, storage_data={}))
    planned: Any = LoadPlan(_create_read_items("actor.random", BytesStorageMetadata(), None))
    with pytest.raises(DamagedError, match="actor.random is no tensor: it is refused"):
        reader.read_data(planned, MCoreLoadPlanner())


@pytest.mark.parametrize("text", ['{"sharded_backend": "zarr"}', "{}", "[", "null"])
def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    path = make_checkpoint(tmp_path, 3)
    (path / "metadata.json").write_text(text)
    seal(path, 3, "a")
    line = refusal(lambda: read_state(open_checkpoint(path), {}))
    assert "metadata.json is not of this format" in line


def test_large_pieces_are_written_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_CHUNK_BYTES", 1000)
    data, before = os.urandom(3500), this_rank.count
    with (tmp_path / "file").open("wb") as file:
        stream = _SummedStream(file)
        assert stream.write(data) == 3500
        assert this_rank.count == before + 4
        assert stream.write(b"") == 0
        sums = stream.sums()
    assert (tmp_path / "file").read_bytes() == data
    assert (sums.ends, sums.xxh3_64) == ((3500,), (xxhash.xxh3_64_hexdigest(data),))


def test_a_file_is_whole_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, this_rank.num_unhurried))

    monkeypatch.setattr(os, "fsync", sync)
    with (tmp_path / "file").open("wb") as file:
        stream = _SummedStream(file)
        stream.write(b"abc")
        stream.close()
        assert file.closed
    assert synced == [(3, 1)] and this_rank.num_unhurried == 0


@pytest.mark.parametrize("keep_last", [0, 1])
def test_a_checkpoint_that_is_due_waits_for_a_good_step(
    keep_last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second step is due; at the last one, and where the job is to stop, it is saved."""
    monkeypatch.setattr(saving, "sum_over_world", lambda raised: raised)
    monkeypatch.setattr(saving, "from_rank_zero", lambda do: do())
    given = [f"checkpoint.dir={tmp_path}", "checkpoint.save_every=2"]
    given.append(f"checkpoint.keep_last={keep_last}")
    job = SimpleNamespace(config=load_job("stage: dpo", given))
    world, divergence = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace()
    trainer = cast(Any, SimpleNamespace(job=job, world=world, num_steps=12))
    own = Saving(trainer, cast(Any, divergence), {})
    monkeypatch.setattr(own, "save", partial(make_checkpoint, tmp_path))
    kept, skipped = [], {4, 8, 9, 12}
    for step in range(1, 13):
        divergence.health = Health.SKIPPED if step in skipped else Health.GOOD
        assert own.end_step(step, asked=step == 9) == (step == 9)
        kept.append([path.step for path in map(open_checkpoint, checkpoint_paths(tmp_path))])
    if keep_last == 0:  # all are kept
        assert kept[-1] == [2, 5, 6, 9, 10, 12]
        return
    assert kept[:6] == [[], [2], [2], [2], [2, 5], [5, 6]]
    # A failed step deletes none, and the step after one that was saved is not due.
    assert kept[6:] == [[5, 6], [5, 6], [5, 6, 9], [9, 10], [9, 10], [9, 10, 12]]
