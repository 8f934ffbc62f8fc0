"""A checkpoint, written under any plan, to a Hugging Face directory, and back; on one process."""

import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from puzzle_align.models.hf_weights import export_hf, load_weights, open_weights
from puzzle_align.runtime.checkpoint import (
    Saved,
    find_latest,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from puzzle_align.runtime.context import Context, build_context
from puzzle_align.runtime.groups import World, init_distributed
from puzzle_align.runtime.reduce import leave
from puzzle_align.spec.job import JobConfig, ModelConfig, RoleConfig
from puzzle_align.spec.model import ModelOptions, ModelSpec, from_hf_config, read_hf_config
from puzzle_align.spec.plan import ParallelPlan

_TIMEOUT_S = 600.0
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

_logger = logging.getLogger(__name__)


def to_hf(checkpoint: Path, out: Path) -> None:
    """Write a checkpoint's weights, in the precision they were trained in, for transformers.

    A reward model becomes a sequence classifier of one label. The tokenizer's files go with the
    weights if the job had them in a directory.

    Args:
        checkpoint: a ``step_*`` directory, or the folder that holds them (the latest is taken).
        out: a new or an empty directory.

    Raises:
        ValueError: if there is no whole checkpoint, or ``out`` is not empty.
    """
    saved = _find(checkpoint)
    _check_free(out)
    spec = from_hf_config(saved.job["model"], f"{saved.path}/job.json")
    world = init_distributed("cpu", _TIMEOUT_S)
    try:
        context = _build(spec, saved.job["dtype"], world)
        load_checkpoint(saved, context, None)
        export_hf(context.chunks, spec, out, saved.job["dtype"])
    finally:
        leave()
    for file in _tokenizer_files(saved.job["config"], _role(spec)):
        shutil.copy(file, out / file.name)
    if spec.head == "scalar":
        _warn_of_padding(spec)


def to_checkpoint(hf_directory: Path, out: Path) -> None:
    """Write a Hugging Face model as a checkpoint of weights alone: ``out/step_00000000``.

    A job whose ``checkpoint.dir`` is ``out`` starts from these weights.

    Args:
        hf_directory: ``config.json`` and safetensors; bf16 stays bf16, all else becomes fp32.
        out: a new or an empty directory.

    Raises:
        ValueError: if the model is not supported or not whole, or ``out`` is not empty.
    """
    config = read_hf_config(hf_directory)
    spec = from_hf_config(config, f"{hf_directory}/config.json")
    source = open_weights(hf_directory)
    _check_free(out)
    dtype = "bf16" if _hf_dtype(config) == "bfloat16" else "fp32"
    role = RoleConfig(model=ModelConfig(path=str(hf_directory.resolve())))
    job = JobConfig(stage="reward", reward=role) if spec.head == "scalar" else JobConfig(actor=role)
    world = init_distributed("cpu", _TIMEOUT_S)
    try:
        context = _build(spec, dtype, world)
        for chunk in context.chunks:
            load_weights(chunk, spec, source)
        save_checkpoint(out, 0, {"config": asdict(job)}, context, None, keep_last=0)
    finally:
        leave()


def _build(spec: ModelSpec, dtype: str, world: World) -> Context:
    """The whole model on this process, its weights still to come."""
    return build_context(
        _role(spec),
        spec,
        ModelOptions(dtype=dtype),
        ParallelPlan(),
        world,
        fill=lambda _: None,
        seed=0,
    )


def _role(spec: ModelSpec) -> str:
    """The role whose training writes checkpoints of such a model."""
    return "reward" if spec.head == "scalar" else "actor"


def _warn_of_padding(spec: ModelSpec) -> None:
    """transformers scores the last token that is not padding: say where that is another one."""
    eos = spec.eos_token_id if isinstance(spec.eos_token_id, tuple) else (spec.eos_token_id,)
    if spec.pad_token_id is None:
        _logger.warning("no pad_token_id in config.json: transformers scores one text at a time")
    elif spec.pad_token_id in eos:
        _logger.warning(
            "pad_token_id=%d also ends a text: transformers scores the token before it, training"
            " scored the end itself; give config.json another pad_token_id",
            spec.pad_token_id,
        )


def _find(checkpoint: Path) -> Saved:
    if (checkpoint / "job.json").is_file():
        return open_checkpoint(checkpoint)
    for folder in (checkpoint, checkpoint / "checkpoints"):
        latest = find_latest(folder)
        if latest is not None:
            return latest
    raise ValueError(
        f"{checkpoint}: no checkpoint there; give a step_* directory, or the folder that holds them"
    )


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and not empty: give a new directory, or clear it")


def _hf_dtype(config: dict[str, Any]) -> str | None:
    """As transformers 5 or 4 names it."""
    return config.get("dtype") or config.get("torch_dtype")


def _tokenizer_files(config: dict[str, Any], role: str) -> list[Path]:
    path = config["tokenizer"]["path"] or config[role]["model"]["path"]
    files = [Path(path) / name for name in _TOKENIZER_FILES] if path else []
    return [file for file in files if file.is_file()]
