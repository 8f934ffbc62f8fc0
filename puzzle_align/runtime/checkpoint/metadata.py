"""Reader of a checkpoint's ``.metadata``, the place of each tensor in its files; runs no code.

torch writes the file as a pickle, and a pickle can name any function to be called while it is
read. Invariants (the tests assert them):
- only names that torch writes are accepted: plain data classes, dtypes, and lookups (a crafted file
  may set attributes of these classes, but has no code to set them to);
- every value in the result has its expected type, and none names a file outside the checkpoint's
  directory;
- a tensor's chunks lie within it, and together have as many elements.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from puzzle_align.files.messages import shown

METADATA = ".metadata"
# Content of metadata.json as Megatron-core 0.16 writes it; 0.17 and later leave the last two out.
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LARGEST = 2**63 - 1


class ForeignError(Exception):
    """Error for a pickle with something that torch does not write."""


class _Member:
    """Lookup of the one enum's members by name."""

    def __call__(self, cls: Any, name: Any) -> Any:
        if cls is not _MEM_FORMAT_ENCODING:
            raise ForeignError("it reads an attribute: it is refused")
        return _MEM_FORMAT_ENCODING[name]


_NAMES: dict[tuple[str, str], Any] = {
    ("pathlib", "PosixPath"): "".format,  # its value is not read
    ("pathlib._local", "PosixPath"): "".format,
    # Python 3.11.0 to 3.11.3 write an enum's member as getattr(its class, its name).
    ("builtins", "getattr"): _Member(),
    ("__builtin__", "getattr"): _Member(),
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    **{
        (cls.__module__, cls.__name__): cls
        for cls in (
            torch.Size,
            _StorageInfo,
            _MEM_FORMAT_ENCODING,
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )
    },
    **{("torch", name): dtype for name, dtype in vars(torch).items() if type(dtype) is torch.dtype},
}


class _Unpickler(pickle.Unpickler):
    """Python's unpickler, restricted to the names in ``_NAMES``."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Look up a name in ``_NAMES``; ForeignError if it is not there."""
        if (module_name, global_name) not in _NAMES:
            foreign = shown(f"{module_name}.{global_name}")
            raise ForeignError(f"it holds code, or an unknown class ({foreign}): it is refused")
        return _NAMES[module_name, global_name]


def read_metadata(data: bytes) -> Metadata:
    """Read a ``.metadata`` file's content; a one-line ValueError if torch did not write it."""
    try:
        made = _typed(_Unpickler(io.BytesIO(data)).load(), Metadata)
        tensors, places = _typed(made.state_dict_metadata, dict), _typed(made.storage_data, dict)
        for key, described in tensors.items():
            _typed(key, str)
            if type(described) is not BytesStorageMetadata:
                _check_tensor(_typed(described, TensorStorageMetadata))
        for index, info in places.items():
            _check_place(_typed(index, MetadataIndex), _typed(info, _StorageInfo))
    except ForeignError as error:
        raise ValueError(f"{METADATA}: {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{METADATA} is no whole pickle ({shown(str(error))})") from error
    return Metadata(tensors, storage_data=places)


def _check_tensor(tensor: TensorStorageMetadata) -> None:
    _typed(_typed(tensor.properties, TensorProperties).dtype, torch.dtype)
    _check_size(tensor.size)
    for chunk in _typed(tensor.chunks, list):
        _check_size(_typed(chunk, ChunkStorageMetadata).sizes)
        _check_size(chunk.offsets)
        box = zip(chunk.offsets, chunk.sizes, tensor.size, strict=False)
        is_inside = all(offset + extent <= whole for offset, extent, whole in box)
        if not is_inside or not len(tensor.size) == len(chunk.sizes) == len(chunk.offsets):
            raise ForeignError(f"a tensor's chunk is not in its {shown(tuple(tensor.size))}")
    # An element in no chunk would keep its value from before the load.
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
        raise ForeignError(f"a tensor's chunks are not all of its {shown(tuple(tensor.size))}")


def _check_place(index: MetadataIndex, info: _StorageInfo) -> None:
    _typed(index.fqn, str)
    if index.offset is not None:
        _check_size(index.offset)
    if index.index is not None:
        _check_number(index.index)
    file = _typed(info.relative_path, str)
    if Path(file).name != file or not file.endswith(".distcp") or "\0" in file:
        raise ForeignError(f"'{shown(file)}' is none of a checkpoint's files")
    if info.transform_descriptors:
        raise ForeignError("a tensor was written through an extension")
    _check_number(info.offset)
    _check_number(info.length)


def _typed(value: Any, cls: type) -> Any:
    if type(value) is not cls:
        name = shown(type(value).__name__)
        raise ForeignError(f"expected {cls.__name__}, got {name}")
    return value


def _check_number(value: Any) -> None:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        got = value if isinstance(value, int) else type(value).__name__
        raise ForeignError(f"expected a number, got {shown(got)}")


def _check_size(value: Any) -> None:
    for extent in _typed(value, torch.Size):
        _check_number(extent)
