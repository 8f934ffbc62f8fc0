"""Checkpoints that survive: a save that is killed never harms the last good one.

A checkpoint is a directory ``step_00000123``: Megatron's distributed checkpoint, and ``job.json``
with what is not a tensor. Invariants (the tests assert them):
- it is written under a temporary name, synced to the disk and renamed when every rank's files are
  there, so a directory of that name is whole;
- older ones are deleted after that, and lose their names first;
- the latest is the one with the largest step: there is no pointer file that could be torn;
- it loads under any plan; on the same plan training goes on bit for bit;
- it holds nothing of ranks without a part in the model, which only join in.
"""

import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from puzzle_align.runtime.checkpoint_writer import InProcessSave
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.optimizer import Optimizer
from puzzle_align.runtime.optimizer_state import allocate_state, load_state
from puzzle_align.runtime.reduce import from_rank_zero
from puzzle_align.spec.model import to_hf_config

_NAME = re.compile(r"step_(\d{8,})")
# What reading torn or missing files raises; anything else is a bug, not the user's disk.
_DAMAGE = (
    OSError,
    EOFError,
    KeyError,
    RuntimeError,
    UnpicklingError,
    CheckpointingException,
    CheckpointException,
)
_LOCK_WAIT_S = 30.0  # a killed run needs a moment to die


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint on disk.

    ``job`` is what was saved beside the tensors: the caller's values and ``step``, ``model`` (as
    in a ``config.json``), ``dtype``, ``world_size`` (the model's ranks), ``has_optimizer``.
    """

    path: Path
    step: int
    job: dict[str, Any]


def find_latest(folder: Path) -> Saved | None:
    """The checkpoint with the largest step, or None."""
    names = _by_step(folder)
    return open_checkpoint(names[-1]) if names else None


def open_checkpoint(path: Path) -> Saved:
    """Read a checkpoint's ``job.json``.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    file = path / "job.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a checkpoint (no job.json): give a step_* directory")
    try:
        job = json.loads(file.read_text())
        return Saved(path, job["step"], job)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make ``folder`` this job's own while the block runs; clear it of half saves. Collective.

    A run whose launcher was killed can live on for a while: two must not write one folder.

    Raises:
        ValueError: if it cannot be written, or another run is at work in it.
    """
    lock = from_rank_zero(lambda: _claim(folder))
    try:
        yield
    finally:
        if lock is not None and dist.get_rank() == 0:
            os.close(lock)


def save_checkpoint(
    folder: Path,
    step: int,
    job: dict[str, Any],
    context: Context | None,
    optimizer: Optimizer | None,
    *,
    keep_last: int,
) -> Path:
    """Save model, optimizer and random states after ``step`` optimizer steps.

    Collective over the world.

    Args:
        job: JSON values to store beside the tensors.
        context: None on ranks that hold no part of the model; rank 0 is none of them.
        optimizer: None saves the weights alone.
        keep_last: checkpoints to keep, this one included; 0 keeps all.

    Raises:
        ValueError: if it cannot be written; what was there before is unharmed.
    """
    final = folder / f"step_{step:08d}"
    # A new name for every attempt: an orphan of a killed run may still be at work on an old one.
    scratch = folder / from_rank_zero(lambda: f".saving_{final.name}_{uuid.uuid4().hex[:8]}")
    if optimizer is not None:
        allocate_state(optimizer.megatron)
    try:
        from_rank_zero(lambda: scratch.mkdir(parents=True))
        state = {} if context is None else _sharded_state(context, optimizer, loading=False)
        dist_checkpointing.save(
            state,
            str(scratch),
            sharded_strategy=InProcessSave(),
            # Rank 0's is written; Megatron would warn that ranks without the model have none.
            preprocess_common_before_consistancy_check=lambda _: {},
        )
        about = {} if context is None else _about(context, optimizer)
        from_rank_zero(lambda: _publish(scratch, final, {**job, "step": step, **about}))
    except (OSError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise ValueError(
            f"{final} could not be written ({_cause(error)}): free space or mend the disk, and run"
            " the same command again: it goes on from the checkpoint before"
        ) from error
    if keep_last > 0:
        from_rank_zero(lambda: _delete_older(folder, keep_last))
    return final


def load_checkpoint(saved: Saved, context: Context | None, optimizer: Optimizer | None) -> None:
    """Load a checkpoint, written under any plan, into a context (and its optimizer).

    Collective over the world; ``context`` is None on ranks that hold no part of the model. Without
    optimizer state in the checkpoint, ``optimizer`` starts afresh from the loaded weights.

    Raises:
        ValueError: if the checkpoint is damaged or of another kind of optimizer.
    """
    whole = optimizer if saved.job["has_optimizer"] else None
    if whole is not None:
        allocate_state(whole.megatron)
    state = {}
    if context is not None:
        same_size = saved.job["world_size"] == context.plan.world_size
        state = _sharded_state(context, whole, loading=True, random_states=same_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Megatron's, about torch's old names
            loaded: Any = dist_checkpointing.load(state, str(saved.path))
    except _DAMAGE as error:
        raise _unreadable(saved.path, error) from error
    if context is None:
        return
    for number, chunk in enumerate(context.chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    if whole is not None:
        load_state(whole.megatron, loaded["optimizer"])
    elif optimizer is not None:
        optimizer.megatron.reload_model_params()
    if "random" in loaded:
        _set_random_states(loaded["random"], context.device)


def _about(context: Context, optimizer: Optimizer | None) -> dict[str, Any]:
    """What ``job.json`` says of the model."""
    return {
        "model": to_hf_config(context.spec),
        "dtype": context.precision,
        "world_size": context.plan.world_size,
        "has_optimizer": optimizer is not None,
    }


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
        own = context.groups.intra_dist_opt
        values = _random_states(context.device)
        state["random"] = ShardedObject("random", values, (own.size(),), (own.rank(),))
    return state


def _random_states(device: torch.device) -> dict[str, Any]:
    states = {
        "device": device.type,
        "torch": torch.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if states["device"] != device.type:
        # A generator's state is of its own kind of device. Training draws from none of these.
        return
    get_cuda_rng_tracker().set_states(states["tracker"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _claim(folder: Path) -> int | None:
    """Lock ``folder`` (None where its file system has no locks) and clear it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        holds = _lock(lock, folder)
        os.ftruncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    except OSError as error:
        raise ValueError(
            f"checkpoint folder {folder} cannot be written ({error.strerror}): choose another"
            " checkpoint.dir or output_dir"
        ) from error
    for leftover in [*folder.glob(".saving_*"), *folder.glob(".deleting_*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    if not holds:
        os.close(lock)
    return lock if holds else None


def _lock(lock: int, folder: Path) -> bool:
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.read(lock, 200).decode(errors="replace")
                os.close(lock)
                raise ValueError(
                    f"checkpoint folder {folder} is in use by another run ({holder}): end that run,"
                    " or choose another output_dir"
                ) from None
        except OSError:
            return False
        time.sleep(0.2)


def _publish(scratch: Path, final: Path, job: dict[str, Any]) -> None:
    """Check that all ranks' files are here, sync what is not, and give the directory its name."""
    _check_whole(scratch)
    (scratch / "job.json").write_text(json.dumps(job, indent=1))
    for path in (scratch / "job.json", scratch / "common.pt", scratch / "metadata.json", scratch):
        _sync(path)
    if final.exists():  # the same step saved again: what is there is as good
        shutil.rmtree(scratch)
        return
    os.rename(scratch, final)
    _sync(final.parent)


def _check_whole(scratch: Path) -> None:
    """Raise ValueError if a rank wrote its files where this one cannot see them."""
    stored = FileSystemReader(scratch).read_metadata().storage_data.values()
    missing = {info.relative_path for info in stored} - {path.name for path in scratch.iterdir()}
    if missing:
        raise ValueError(
            f"{scratch.parent}: {len(missing)} of the checkpoint's files were written on another"
            " node: put output_dir (or checkpoint.dir) on a file system that all nodes share"
        )


def _delete_older(folder: Path, keep_last: int) -> None:
    for path in _by_step(folder)[:-keep_last]:
        # Renamed first: a kill amid the deletion must not leave half of it under a good name.
        doomed = path.with_name(f".deleting_{path.name}")
        with suppress(OSError):  # one that stays for now is in nobody's way
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _by_step(folder: Path) -> list[Path]:
    named = {p: _NAME.fullmatch(p.name) for p in folder.glob("step_*")}
    return sorted((p for p, match in named.items() if match), key=lambda p: int(p.name[5:]))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: BaseException) -> ValueError:
    return ValueError(
        f"checkpoint {path} is damaged or incomplete ({_cause(error)}): move that directory away,"
        " and the one before it is taken"
    )


def _cause(error: BaseException) -> str:
    """What went wrong, in one short line; of several ranks' errors, the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
