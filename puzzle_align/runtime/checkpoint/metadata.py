"""Reads a checkpoint's ``.metadata``: where each tensor lies in its files. No code of it runs.

torch writes the file as a pickle, and a pickle can name any function to be called while it is
read. Invariants (the tests assert them):
- only torch's few names are accepted; all but sizes and types of numbers are read as stand-ins, so
  that nothing of torch is called or changed;
- the result is of torch's own classes, every value in it of the type it should have, and names no
  file outside of the checkpoint's directory;
- the chunks of a tensor lie in it, and hold as many numbers as it has.
"""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from puzzle_align.files.messages import shown

METADATA = ".metadata"
_LARGEST = 2**63 - 1
# What a pickle that is cut short or changed can raise; another error is a bug.
_BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


class ForeignError(Exception):
    """The pickle holds something that torch does not write."""


class _StandIn:
    """An object as the pickle describes it: of its arguments nothing is kept."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        # Classes have this too, so a pickle that gives one of them a state changes nothing.
        self.state = state


def _stand_in(name: str) -> type[_StandIn]:
    return type(name, (_StandIn,), {})


_INFO, _INDEX = _stand_in("_StorageInfo"), _stand_in("MetadataIndex")
_METADATA, _CHUNK = _stand_in("Metadata"), _stand_in("ChunkStorageMetadata")
_BYTES, _TENSOR = _stand_in("BytesStorageMetadata"), _stand_in("TensorStorageMetadata")
_PROPERTIES, _UNREAD = _stand_in("TensorProperties"), _stand_in("unread")
_NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _INFO,
    ("torch.serialization", "_get_layout"): _UNREAD,
    ("pathlib", "PosixPath"): _UNREAD,
    ("pathlib._local", "PosixPath"): _UNREAD,
    ("torch.distributed.checkpoint.metadata", "StorageMeta"): _UNREAD,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _UNREAD,
    **{
        ("torch.distributed.checkpoint.metadata", cls.__name__): cls
        for cls in (_BYTES, _CHUNK, _INDEX, _METADATA, _PROPERTIES, _TENSOR)
    },
    **{("torch", name): dtype for name, dtype in vars(torch).items() if type(dtype) is torch.dtype},
}


class _Unpickler(pickle.Unpickler):
    """Python's, which looks up no name outside of the list."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Look a name up in the list; ForeignError unless torch writes it."""
        if (module_name, global_name) not in _NAMES:
            foreign = shown(f"{module_name}.{global_name}")
            raise ForeignError(f"it holds code, or an unknown class ({foreign}): it is refused")
        return _NAMES[module_name, global_name]


def read_metadata(data: bytes) -> Metadata:
    """The content of a file ``.metadata``.

    Raises:
        ValueError: in a few words, if torch did not write it.
    """
    try:
        made = _Unpickler(io.BytesIO(data)).load()
    except ForeignError as error:
        raise ValueError(f"{METADATA}: {error}") from None
    except _BROKEN as error:
        raise ValueError(f"{METADATA} is no whole pickle ({shown(str(error))})") from error
    try:
        return _metadata(made)
    except ForeignError as error:
        raise ValueError(f"{METADATA}: {error}") from None


def _metadata(made: Any) -> Metadata:
    top = _state(made, _METADATA)
    described = _typed(top.get("state_dict_metadata"), dict)
    places = _typed(top.get("storage_data"), dict)
    return Metadata(
        state_dict_metadata={
            _typed(key, str): _described(value) for key, value in described.items()
        },
        storage_data={_index(key): _info(value) for key, value in places.items()},
    )


def _described(made: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(made) is _BYTES:
        return BytesStorageMetadata()
    tensor = _state(made, _TENSOR)
    properties = tensor.get("properties")
    numbers = properties.state if type(properties) is _PROPERTIES else None
    if type(numbers) is not tuple or not numbers:
        raise ForeignError("a tensor has no type of its numbers")
    size, chunks = _size(tensor.get("size")), []
    for item in _typed(tensor.get("chunks"), list):
        chunk = _state(item, _CHUNK)
        chunks.append(ChunkStorageMetadata(_size(chunk.get("offsets")), _size(chunk.get("sizes"))))
        box = zip(chunks[-1].offsets, chunks[-1].sizes, size, strict=False)
        is_inside = all(offset + extent <= whole for offset, extent, whole in box)
        if not is_inside or not len(size) == len(chunks[-1].sizes) == len(chunks[-1].offsets):
            raise ForeignError(f"a tensor's chunk is not in its {shown(tuple(size))}")
    # What no chunk holds would be left as it was before the load.
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ForeignError(f"a tensor's chunks are not all of its {shown(tuple(size))}")
    dtype = _typed(numbers[0], torch.dtype)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _index(made: Any) -> MetadataIndex:
    index = _state(made, _INDEX)
    offset, number = index.get("offset"), index.get("index")
    return MetadataIndex(
        _typed(index.get("fqn"), str),
        None if offset is None else _size(offset),
        None if number is None else _number(number),
    )


def _info(made: Any) -> _StorageInfo:
    info = _state(made, _INFO)
    file = _typed(info.get("relative_path"), str)
    if Path(file).name != file or not file.endswith(".distcp") or "\0" in file:
        raise ForeignError(f"'{shown(file)}' is none of a checkpoint's files")
    if info.get("transform_descriptors"):
        raise ForeignError("a tensor was written through an extension")
    return _StorageInfo(file, _number(info.get("offset")), _number(info.get("length")))


def _state(made: Any, cls: type[_StandIn]) -> dict[str, Any]:
    """The attributes of an object of class ``cls``."""
    return _typed(_typed(made, cls).state, dict)


def _typed(value: Any, cls: type) -> Any:
    if type(value) is not cls:
        name = shown(type(value).__name__)
        raise ForeignError(f"expected {cls.__name__}, got {name}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        got = value if isinstance(value, int) else type(value).__name__
        raise ForeignError(f"expected a number, got {shown(got)}")
    return value


def _size(value: Any) -> torch.Size:
    for extent in _typed(value, torch.Size):
        _number(extent)
    return value
