"""Checkpoints that survive: a save that is killed never harms the last good one.

A checkpoint is a directory ``step_00000123``: Megatron's distributed checkpoint, and ``job.json``
with what is not a tensor. It is written under a temporary name and renamed when every rank's files
are on disk, so a directory of that name is whole. ``latest`` is the one with the largest step:
there is no pointer file that could be torn.
"""

import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from puzzle_align.runtime.context import Context
from puzzle_align.runtime.optimizer import Optimizer
from puzzle_align.runtime.optimizer_state import allocate_state, load_state
from puzzle_align.runtime.reduce import barrier, from_rank_zero

_NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint on disk; ``job`` is what was saved beside the tensors."""

    path: Path
    step: int
    job: dict[str, Any]


def find_latest(folder: Path) -> Saved | None:
    """The checkpoint with the largest step, or None."""
    steps = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return open_checkpoint(max(steps)) if steps else None


def open_checkpoint(path: Path) -> Saved:
    """Read a checkpoint's ``job.json``.

    Raises:
        ValueError: if there is none.
    """
    file = path / "job.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a checkpoint (no job.json): give a step_* directory")
    job = json.loads(file.read_text())
    return Saved(path, job["step"], job)


def save_checkpoint(
    folder: Path,
    step: int,
    job: dict[str, Any],
    context: Context,
    optimizer: Optimizer | None,
    *,
    keep_last: int,
) -> Path:
    """Save model, optimizer and random states after ``step`` optimizer steps. Collective.

    Args:
        job: JSON values to store beside the tensors.
        keep_last: checkpoints to keep, this one included; 0 keeps all.
    """
    final = folder / f"step_{step:08d}"
    scratch = folder / from_rank_zero(lambda: f".saving_{final.name}_{uuid.uuid4().hex[:8]}")
    from_rank_zero(lambda: _clear_leftovers(folder, scratch))
    # A new name for every attempt: writers orphaned by a kill may still be at work on an old one.
    state = _sharded_state(context, optimizer, loading=False)
    dist_checkpointing.save(state, str(scratch))
    job = {**job, "step": step, "has_optimizer": optimizer is not None}
    barrier()
    from_rank_zero(lambda: _publish(scratch, final, job))
    if keep_last > 0:
        from_rank_zero(lambda: _delete_older(folder, keep_last))
    return final


def load_checkpoint(saved: Saved, context: Context, optimizer: Optimizer | None) -> None:
    """Load a checkpoint, written under any plan, into a context (and its optimizer). Collective."""
    if optimizer is not None:
        allocate_state(optimizer.megatron)
    world_size = saved.job.get("world_size")
    state = _sharded_state(
        context, optimizer, loading=True, random_states=world_size == dist.get_world_size()
    )
    loaded = dist_checkpointing.load(state, str(saved.path))
    for number, chunk in enumerate(context.chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    if optimizer is not None:
        load_state(optimizer.megatron, loaded["optimizer"])
    if "random" in loaded:
        _set_random_states(loaded["random"], context.device)


def _sharded_state(
    context: Context, optimizer: Optimizer | None, *, loading: bool, random_states: bool = True
) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": context.groups.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        f"model{number}": chunk.sharded_state_dict(metadata=dict(metadata))
        for number, chunk in enumerate(context.chunks)
    }
    if optimizer is not None:
        model = state["model0"] if len(context.chunks) == 1 else dict(state)
        state["optimizer"] = optimizer.megatron.sharded_state_dict(
            model, is_loading=loading, metadata=dict(metadata)
        )
    if random_states and optimizer is not None:
        world = (dist.get_world_size(),)
        values = _random_states(context.device)
        state["random"] = ShardedObject("random", values, world, (dist.get_rank(),))
    return state


def _random_states(device: torch.device) -> dict[str, Any]:
    states = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _clear_leftovers(folder: Path, scratch: Path) -> None:
    for leftover in [*folder.glob(".saving_*"), *folder.glob(".deleting_*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    scratch.mkdir(parents=True)


def _publish(scratch: Path, final: Path, job: dict[str, Any]) -> None:
    with open(scratch / "job.json", "w") as file:
        json.dump(job, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _fsync_directory(scratch)
    if final.exists():  # the same step saved again: what is there is as good
        shutil.rmtree(scratch)
        return
    os.rename(scratch, final)
    _fsync_directory(final.parent)


def _delete_older(folder: Path, keep_last: int) -> None:
    steps = sorted(p for p in folder.glob("step_*") if _NAME.fullmatch(p.name))
    for path in steps[:-keep_last]:
        # Renamed first: a kill amid the deletion must not leave half a checkpoint under a good name.
        doomed = path.with_name(f".deleting_{path.name}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
