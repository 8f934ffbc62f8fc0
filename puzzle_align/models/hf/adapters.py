"""Adapters: new ones, and PEFT's directories of them.

Tensors have the names of ``layout.rules.adapter_rules``; in PEFT's files a prefix goes before them.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from puzzle_align.config.saved import Start
from puzzle_align.files.json_file import read_object
from puzzle_align.files.messages import shown
from puzzle_align.layout.model import LoraSpec, ModelSpec
from puzzle_align.layout.rules import Box, Shape
from puzzle_align.models.hf.sources import SafetensorsSource, WeightSource, generator_of
from puzzle_align.models.hf.weights import trained_tensors
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.shards import slices

if TYPE_CHECKING:
    from puzzle_align.models.chunk import ModelChunk

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_HASH = "base_xxh3"  # in the file's metadata: begins with the hash of the adapters' base
_CURE = "give a directory that PEFT's save_pretrained wrote"
_DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False}  # PEFT's, of keys that are not there
# Values of PEFT's configuration that would change what an adapter computes, where they are not so.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None, []),
    # With others (PiSSA, OLoRA, CorDA, LoftQ) PEFT changes the base when it loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}


class NewAdapters(WeightSource):
    """Adapters that add nothing yet: B is 0, A is drawn from PEFT's distributions.

    A is uniform within ``1 / sqrt(inputs)`` (``init_lora_weights=true``), or normal with a standard
    deviation of ``1 / r`` (``gaussian``). A tensor depends on the seed and its name alone.
    """

    def __init__(self, is_gaussian: bool, seed: int) -> None:
        self._is_gaussian, self._seed = is_gaussian, seed

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Draw a whole tensor in float32; return its box."""
        whole = torch.zeros(shape)
        if name.endswith("lora_A.weight"):
            rank, inputs = shape
            generator = generator_of(self._seed, name)
            if self._is_gaussian:
                whole.normal_(0.0, 1 / rank, generator=generator)
            else:
                whole.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
        return whole[slices(box)]

    def place(self, name: str) -> str:
        """Describe the source, for errors."""
        return "new adapters"

    def fingerprint(self) -> bytes:
        """Identify the adapters: by distribution and seed."""
        return f"gaussian={self._is_gaussian} {self._seed}".encode()


def open_adapters(directory: str | Path) -> SafetensorsSource:
    """Open a PEFT directory's adapters; ValueError if it has none."""
    if not (Path(directory) / WEIGHTS_NAME).is_file():
        raise ValueError(f"{directory}: no {WEIGHTS_NAME} is there; {_CURE}")
    return SafetensorsSource(directory, single=WEIGHTS_NAME, prefix=PREFIX)


def adapter_problems(directory: str | Path, spec: LoraSpec, key: str) -> list[str]:
    """Lines on a PEFT directory's configuration that is not that of the adapters of ``key``."""
    file = Path(directory) / CONFIG_NAME
    try:
        config = read_object(file, _CURE)
    except ValueError as error:
        return [f"{key}.path: {error}"]
    lines = [
        f"{key}.path: {file} has {name}={shown(config[name])}, which is not supported; give another"
        for name, plain in _PLAIN.items()
        if name in config and config[name] not in plain
    ]
    targets, ours = config.get("target_modules"), {*spec.target_modules}
    if isinstance(targets, list):  # names, maybe with those of the modules around them
        targets = {str(target).rpartition(".")[2] for target in targets}
    else:  # a pattern: the files' names tell which
        targets = ours
    there = {**_DEFAULTS, **config, "target_modules": targets}
    for name, wanted in (
        ("r", spec.r),
        ("lora_alpha", spec.lora_alpha),
        ("use_rslora", spec.use_rslora),
        ("target_modules", ours),
    ):
        theirs = there[name]
        if theirs != wanted:
            theirs = sorted(theirs) if isinstance(theirs, set) else theirs
            lines.append(f"{key}.{name}: {file} has {shown(theirs)}; set it to this")
    return lines


def save_adapters(
    chunks: Sequence["ModelChunk"],
    spec: ModelSpec,
    directory: Path,
    dtype: str,
    start: Start,
) -> None:
    """Write adapters, and a scalar head, as a PEFT directory.

    Args:
        chunks: all chunks of the model, on one pipeline and tensor rank.
        directory: created if absent; the caller adds tokenizer files.
        dtype: of the file, ``fp32`` or ``bf16``.
        start: of their training: the base's path, for PEFT, and its hash.
    """
    lora = spec.lora
    assert lora is not None
    is_scalar = spec.head == "scalar"
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_scalar else "CAUSAL_LM",
        "base_model_name_or_path": start.path,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": list(lora.target_modules),
        "use_rslora": lora.use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": ["score"] if is_scalar else None,
    }
    content = {
        f"{PREFIX}{name}": tensor.detach().to("cpu", DTYPES[dtype]).contiguous()
        for name, tensor in trained_tensors(chunks, spec)
    }
    directory.mkdir(parents=True, exist_ok=True)
    about = {"format": "pt", BASE_HASH: start.weights_xxh3}
    save_file(content, directory / WEIGHTS_NAME, metadata=about)
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2))
