"""Where weights come from: a directory of safetensors, or a seed. Both are read by boxes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from puzzle_align.models.weight_map import Box, Shape
from puzzle_align.spec.model import ModelSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ValueError unless the source holds exactly these tensors, in these shapes."""
        ...

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """The ``box`` of tensor ``name``, whose whole shape must be ``shape``."""
        ...


def open_weights(directory: str | Path) -> "SafetensorsSource":
    """The weights of a Hugging Face directory, opened but not read.

    Raises:
        ValueError: if it holds no safetensors, or an index that cannot be read.
    """
    return SafetensorsSource(Path(directory))


class RandomSource:
    """Initial weights from a seed: normal with ``initializer_range``, norms one, biases zero.

    A tensor depends on the seed and its name alone, so a model is the same under every plan.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.standard_deviation = spec.initializer_range
        self.seed = seed

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Nothing can be missing."""

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Generate the whole tensor in float32, return its box."""
        if name.endswith("norm.weight"):
            return _box_of(torch.ones(shape), box)
        if name.endswith(".bias"):
            return _box_of(torch.zeros(shape), box)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return _box_of(torch.randn(shape, generator=generator) * self.standard_deviation, box)


class SafetensorsSource:
    """A Hugging Face directory: ``model.safetensors``, or shards with an index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open_files: dict[Path, Any] = {}
        index = self.directory / INDEX_NAME
        if index.is_file():
            self._files = {name: self.directory / file for name, file in _weight_map(index).items()}
            return
        single = self.directory / SINGLE_NAME
        if not single.is_file():
            raise ValueError(
                f"{self.directory}: neither {SINGLE_NAME} nor {INDEX_NAME} is there:"
                " give a directory with safetensors weights, or random_weights=true"
            )
        self._files = dict.fromkeys(self._open(single).keys(), single)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ValueError naming file and tensor if one is missing, mis-shaped or not expected.

        Reads the files' headers alone.
        """
        for name, shape in shapes.items():
            if name not in self._files:
                raise ValueError(
                    f"{self.directory}: tensor {name} is missing from the weights: give all of the"
                    " model's files"
                )
            self._view(name, shape)
        for name, file in self._files.items():
            tied_copy = name == "lm_head.weight" and name not in shapes
            if name not in shapes and not tied_copy and not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(
                    f"{file}: tensor {name} is not part of the model that config.json describes:"
                    " give the two of one model"
                )

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Read the box from its file; ValueError naming file and tensor if the shape differs."""
        view = self._view(name, shape)
        if any(start == end for start, end in box):
            return torch.empty([end - start for start, end in box])
        return view[tuple(slice(start, end) for start, end in box)]

    def _view(self, name: str, shape: Shape) -> Any:
        """A tensor in its file, unread; ValueError if it is not of ``shape``."""
        path = self._files[name]
        try:
            view = self._open(path).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{path}: tensor {name} cannot be read: {error}") from error
        found = tuple(view.get_shape())
        if found != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {found}, config.json asks for {shape}: give the"
                " two of one model"
            )
        return view

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: not a readable safetensors file: {error}") from error
        return self._open_files[path]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not a safetensors index: {error!r}") from error


def _box_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, end) for start, end in box)]
