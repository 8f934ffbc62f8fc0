"""Where weights come from: a directory of safetensors, or a seed. Both are read by boxes."""

import functools
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.rules import SCALAR_HEAD, Box, Shape
from puzzle_align.models.pieces import slices

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ValueError unless the source holds exactly these tensors, in these shapes."""
        ...

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """The ``box`` of tensor ``name``, whose whole shape must be ``shape``."""
        ...


def open_weights(directory: str | Path, new_head: "RandomSource | None" = None) -> WeightSource:
    """The weights of a Hugging Face directory, opened but not read.

    Args:
        directory: of a language model or a sequence classifier.
        new_head: what a scalar head (``score.weight``) starts from where the directory has none,
            as a language model's has not; None makes that an error.

    Raises:
        ValueError: if it holds no safetensors, or an index that cannot be read.
    """
    source = SafetensorsSource(Path(directory))
    if new_head is None or source.holds(*SCALAR_HEAD.hf):
        return source
    return _WithNewHead(source, new_head)


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

    def holds(self, name: str) -> bool:
        """Whether the files have a tensor of that name."""
        return name in self._files

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
            # A tied model's copy of its embedding, or what a scalar head replaces; old buffers.
            spare = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
            if name not in shapes and not spare:
                raise ValueError(
                    f"{file}: tensor {name} is not part of the model that config.json describes:"
                    " give the two of one model"
                )

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Read the box from its file; ValueError naming file and tensor if the shape differs."""
        view = self._view(name, shape)
        return view[slices(box)]

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


class _WithNewHead:
    """The files of a model without a scalar head, and a head from a seed."""

    def __init__(self, source: SafetensorsSource, new_head: RandomSource) -> None:
        self._source = source
        self._new_head = new_head

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """See WeightSource; the head cannot be missing."""
        (head,) = SCALAR_HEAD.hf
        if head in shapes:
            tell_of_new_head(self._source.directory, self._new_head.seed)
        self._source.check({name: shape for name, shape in shapes.items() if name != head})

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """See WeightSource."""
        source = self._new_head if name in SCALAR_HEAD.hf else self._source
        return source.read(name, shape, box)


@functools.cache
def tell_of_new_head(directory: Path, seed: int) -> None:
    """Once a process, however many chunks ask."""
    _logger.info("%s has no %s: it starts from seed %d", directory, *SCALAR_HEAD.hf, seed)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not a safetensors index: {error!r}") from error


def _box_of(tensor: Tensor, box: Box) -> Tensor:
    return tensor[slices(box)]
