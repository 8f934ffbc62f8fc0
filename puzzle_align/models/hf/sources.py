"""Sources of weights, read by boxes: a directory of safetensors, or a seed."""

import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from puzzle_align.files.checksums import FileSum, Stamp, stamp
from puzzle_align.files.json_file import read_object
from puzzle_align.files.messages import quoted, shown
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.rules import HEAD, SCALAR_HEAD, Box, Shape
from puzzle_align.models.shards import slices

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")  # supported in files
_READERS = 8  # threads that hash files
_BUFFER = "rotary_emb.inv_freq"  # end of the name of buffers in old files

_digests: dict[Stamp, bytes] = {}  # of files hashed in this process: several roles read them

_logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Tensors of a model by their Hugging Face names, read by boxes: by default of no files."""

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise a one-line ValueError if a tensor is missing, unexpected or mis-shaped."""

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Read a box of a tensor of this whole shape."""
        ...

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name in files."""
        return False

    def place(self, name: str) -> str:
        """The place of a tensor, for errors."""
        ...

    def fingerprint(self) -> bytes:
        """Identify the weights; ValueError if they cannot be read."""
        ...


class RandomSource(WeightSource):
    """Initial weights from a seed: normal with ``initializer_range``, norms' gains 1, biases 0.

    A tensor depends on the seed and its name alone, so a model is the same under every plan.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.standard_deviation = spec.initializer_range
        self.norm_weight = 1.0 - spec.norm_offset
        self.seed = seed

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Generate the whole tensor in float32; return its box."""
        if name.endswith("norm.weight"):
            return torch.full(shape, self.norm_weight)[slices(box)]
        if name.endswith(".bias"):
            return torch.zeros(shape)[slices(box)]
        whole = torch.randn(shape, generator=generator_of(self.seed, name))
        whole *= self.standard_deviation
        return whole[slices(box)]

    def place(self, name: str) -> str:
        """Describe the source, for errors."""
        return f"random weights of initializer_range={self.standard_deviation:g}"

    def fingerprint(self) -> bytes:
        """Identify the weights: by the seed."""
        return f"random {self.seed}".encode()


def generator_of(seed: int, name: str) -> torch.Generator:
    """Generator of a tensor's random numbers, from the seed and its name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


class SafetensorsSource(WeightSource):
    """A Hugging Face directory: ``model.safetensors``, or shards with an index.

    Invariant: a tensor is in only one file, and read from it.
    """

    def __init__(
        self,
        directory: str | Path,
        new_head: RandomSource | None = None,
        *,
        single: str = SINGLE_NAME,
        prefix: str = "",
    ) -> None:
        """Open the files of a language model or a sequence classifier; no tensor is read.

        Args:
            single: name of the file, if there is only one.
            prefix: of the names in the files, which names here do not have.
            new_head: source of a scalar head (``score.weight``) if the directory, a language
                model's, has none; None: a missing head is an error.

        Raises:
            ValueError: if the directory has no safetensors, or a broken index.
        """
        directory = Path(directory)
        self.directory, self._prefix = directory, prefix
        self._open_files: dict[Path, Any] = {}
        index, file = directory / INDEX_NAME, directory / single
        self._index = [index] if index.is_file() else []
        if index.is_file():
            self._files = {name: directory / file for name, file in _weight_map(index).items()}
            if file.is_file() and file not in self._files.values():
                raise ValueError(
                    f"{directory}: both {single} and {INDEX_NAME}, of other files, are there:"
                    " move away what is not meant"
                )
        elif file.is_file():
            self._files = dict.fromkeys(self._names(self._open(file)), file)
        else:
            raise ValueError(
                f"{directory}: neither {single} nor {INDEX_NAME} is there:"
                " give a directory with safetensors weights, or random_weights=true"
            )
        self._new_head = None if self.holds(*SCALAR_HEAD.hf) else new_head

    def metadata(self) -> dict[str, str]:
        """Read the texts by name in the header of the first file; none if no file has a tensor."""
        first = next(iter(self._files.values()), None)
        return {} if first is None else self._open(first).metadata() or {}

    @property
    def is_bf16(self) -> bool:
        """Whether all tensors are in bfloat16."""
        return all(
            self._open(file).get_slice(f"{self._prefix}{name}").get_dtype() == "BF16"
            for name, file in self._files.items()
            if not name.endswith(_BUFFER)
        )

    def holds(self, name: str) -> bool:
        """Whether one of the files has the tensor."""
        return name in self._files

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ValueError with file and tensor if a tensor is missing, unexpected or mis-shaped.

        Reads only headers.
        """
        for name, shape in shapes.items():
            if (head := self._drawn_from(name)) is not None:
                log_new_head(self.directory, head.seed)
                continue
            if name not in self._files:
                raise ValueError(
                    f"{self.directory}: tensor {name} is missing from the weights: give all of the"
                    " model's files"
                )
            self._view(name, shape)
        for name, file in self._held():
            if name.endswith(_BUFFER):
                continue
            # A model's output head may be there though unused: a tied embedding's copy, or one that
            # a scalar head replaces. Among adapters it was trained (modules_to_save).
            if name not in shapes and (name not in HEAD.hf or self._prefix):
                what = "adapters that adapter_config.json describes"
                raise ValueError(
                    f"{file}: tensor {shown(name)} is not part of the"
                    f" {what if self._prefix else 'model that config.json describes'}: give the two"
                    " of one model"
                )
            if file != self._files.get(name):
                raise ValueError(
                    f"{file}: tensor {name} is here, where {INDEX_NAME} does not say it is: give"
                    " index and files of one model"
                )

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Read a box of a tensor of this whole shape; ValueError as ``check``."""
        if (head := self._drawn_from(name)) is not None:
            return head.read(name, shape, box)
        return self._view(name, shape)[slices(box)]

    def place(self, name: str) -> str:
        """The tensor's file, or the seed, for errors."""
        head = self._drawn_from(name)
        return str(self._files[name]) if head is None else head.place(name)

    def fingerprint(self) -> bytes:
        """Hash names and bytes of the files, and the head's seed; ValueError if unreadable."""
        files = sorted({*self._files.values(), *self._index})
        files_stamp = stamp(files)
        if files_stamp is None or (digest := _digests.get(files_stamp)) is None:
            digest = self._hash(files)
            if files_stamp is not None:
                _digests[files_stamp] = digest
        return digest if self._new_head is None else digest + self._new_head.fingerprint()

    def _hash(self, files: Sequence[Path]) -> bytes:
        try:
            with ThreadPoolExecutor(_READERS) as pool:
                sums = [file_sum.xxh3_64 for file_sum in pool.map(FileSum.of, files)]
        except OSError as error:
            raise ValueError(
                f"{error.filename or self.directory} cannot be read ({error.strerror}): see to its"
                " disk, and run the same command again"
            ) from error
        named = [(file.name, checksum) for file, checksum in zip(files, sums, strict=True)]
        return xxhash.xxh3_128_digest(repr(named).encode())

    def _drawn_from(self, name: str) -> RandomSource | None:
        """Random source of a tensor; None if it is in the files."""
        return self._new_head if name in SCALAR_HEAD.hf else None

    def _held(self) -> Iterator[tuple[str, Path]]:
        """Tensors of the index, and all tensors in the files opened so far, each with its file."""
        yield from self._files.items()
        for file, content in self._open_files.items():
            yield from ((name, file) for name in self._names(content))

    def _names(self, content: Any) -> Iterator[str]:
        """Names of a file's tensors, without the prefix."""
        for name in content.keys():  # noqa: SIM118 - no mapping
            yield name.removeprefix(self._prefix)

    def _view(self, name: str, shape: Shape) -> Any:
        """A lazy slice of a tensor; ValueError for another shape or dtype.

        Eight-bit floats come with scales, and float64 would lose bits: both are refused.
        """
        path = self._files[name]
        try:
            view = self._open(path).get_slice(f"{self._prefix}{name}")
        except SafetensorError as error:
            raise ValueError(
                f"{path}: tensor {name} cannot be read ({shown(str(error))}): give index and files"
                " of one model"
            ) from error
        file_shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if file_shape != shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {shown(file_shape)}, config.json asks for"
                f" {shape}: give the two of one model"
            )
        if dtype not in _DTYPES:
            raise ValueError(
                f"{path}: tensor {name} is of {dtype}, not of {', '.join(_DTYPES)}: save the model"
                " in one of these"
            )
        return view

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            try:
                if path.exists() and not path.is_file():
                    raise ValueError(f"{path}: not a file: give a safetensors file")
                self._open_files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"{path}: not a readable safetensors file ({shown(str(error))}): copy it again"
                ) from error
        return self._open_files[path]


@functools.cache
def log_new_head(directory: Path, seed: int) -> None:
    """Log a new head once a process: every chunk checks its source."""
    _logger.info("%s has no %s: it starts from seed %d", directory, *SCALAR_HEAD.hf, seed)


def _weight_map(index: Path) -> dict[str, str]:
    """File of every tensor by the index; each must be a plain name, in the index's folder."""
    cure = "give the index that goes with the files"
    files = read_object(index, cure).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index}: not a safetensors index (no weight_map); {cure}")
    for name, file in files.items():
        # Names must not lead to other folders; symbolic links may.
        plain = isinstance(file, str) and file.isprintable() and "/" not in file
        if not plain or file in ("", ".", "..") or len(file) > 255:
            what = f"{quoted(file)}, which is no file name"
            raise ValueError(f"{index}: weight_map.{shown(name)} is {what}; {cure}")
    return files
