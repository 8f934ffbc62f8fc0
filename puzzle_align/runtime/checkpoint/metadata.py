"""What lies where in a checkpoint's files: torch's ``.metadata``, read without running any code.

The file is a pickle, which can name any function to be called while it is read. Here a pickle
makes values of the classes that occur in it, and of stand-ins for them at that: nothing of torch,
or of anything else, is called or changed. Invariants (the tests assert them):
- a pickle that names anything else is refused before it is called;
- what is given back is of torch's own classes, every value in it of the type it should have, and
  names no file outside of the checkpoint's directory;
- the chunks of every tensor are all of it, without overlap.
"""

import math
from itertools import product
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
from puzzle_align.runtime.checkpoint.pickle import ForeignError, Made, NoPickleError, unpickle

METADATA = ".metadata"
_DTYPES = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}  # by all of their names
_LARGEST = 2**63 - 1
_MOST_DIMS = 8  # a box has a corner for every subset of them


def _stand_in(name: str) -> type[Made]:
    return type(name, (Made,), {"__slots__": ()})


_SIZE, _INDEX, _INFO = _stand_in("Size"), _stand_in("MetadataIndex"), _stand_in("_StorageInfo")
_METADATA, _CHUNK = _stand_in("Metadata"), _stand_in("ChunkStorageMetadata")
_BYTES, _TENSOR = _stand_in("BytesStorageMetadata"), _stand_in("TensorStorageMetadata")
_PROPERTIES, _UNREAD = _stand_in("TensorProperties"), _stand_in("unread")
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _SIZE,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _INFO,
    ("torch.serialization", "_get_layout"): _UNREAD,
    ("pathlib", "PosixPath"): _UNREAD,
    ("pathlib._local", "PosixPath"): _UNREAD,
    **{
        ("torch.distributed.checkpoint.metadata", name): own
        for name, own in (
            ("BytesStorageMetadata", _BYTES),
            ("ChunkStorageMetadata", _CHUNK),
            ("Metadata", _METADATA),
            ("MetadataIndex", _INDEX),
            ("StorageMeta", _UNREAD),
            ("TensorProperties", _PROPERTIES),
            ("TensorStorageMetadata", _TENSOR),
            ("_MEM_FORMAT_ENCODING", _UNREAD),
        )
    },
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


def read_metadata(data: bytes) -> Metadata:
    """What is in a file ``.metadata``.

    Raises:
        ValueError: with what is wrong in some words, if it is anything else.
    """
    try:
        return _metadata(unpickle(data, _KNOWN))
    except ForeignError as error:
        raise ValueError(f"{METADATA}: {error}") from None
    except NoPickleError as error:
        raise ValueError(f"{METADATA} is no whole pickle ({error})") from error


def _metadata(made: Any) -> Metadata:
    top = _state(made, _METADATA)
    return Metadata(
        state_dict_metadata={
            _text(key): _described(value)
            for key, value in _mapping(top.get("state_dict_metadata")).items()
        },
        storage_data={
            _index(key): _info(value) for key, value in _mapping(top.get("storage_data")).items()
        },
    )


def _described(made: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(made) is _BYTES:
        return BytesStorageMetadata()
    own = _state(made, _TENSOR)
    chunks = own.get("chunks")
    if type(chunks) is not list:
        raise ForeignError("a tensor has no list of chunks")
    found = TensorStorageMetadata(
        TensorProperties(dtype=_dtype(own.get("properties"))),
        _size(own.get("size")),
        [
            ChunkStorageMetadata(_size(chunk.get("offsets")), _size(chunk.get("sizes")))
            for chunk in (_state(item, _CHUNK) for item in chunks)
        ],
    )
    _check_whole(found)
    return found


def _check_whole(tensor: TensorStorageMetadata) -> None:
    """What no chunk holds would be left as it was before the load."""
    ends = [
        [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        for chunk in tensor.chunks
    ]
    is_inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
        and all(end <= size for end, size in zip(own, tensor.size, strict=True))
        for chunk, own in zip(tensor.chunks, ends, strict=True)
    )
    num_held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if not is_inside or num_held != math.prod(tensor.size) or not _are_apart(tensor):
        raise ForeignError(f"a tensor's chunks are not all of its {shown(tuple(tensor.size))}")


def _are_apart(tensor: TensorStorageMetadata) -> bool:
    """Whether no two chunks overlap, of those that lie in a tensor and are as many numbers as it.

    Of boxes without overlap every corner is that of an even number, but for the tensor's own. And
    if so, each number is in an odd number of boxes, at least in one: as many as it has leave none
    for a second.
    """
    if len({chunk.sizes for chunk in tensor.chunks}) == 1:  # mostly: then places on a grid do
        (size,) = {chunk.sizes for chunk in tensor.chunks}
        places = {chunk.offsets for chunk in tensor.chunks}
        on_grid = all(
            extent and offset % extent == 0
            for offsets in places
            for offset, extent in zip(offsets, size, strict=True)
        )
        if on_grid and len(places) == len(tensor.chunks):
            return True
    if len(tensor.size) > _MOST_DIMS:
        raise ForeignError(f"a tensor has {len(tensor.size)} dimensions, more than any")
    whole = ChunkStorageMetadata(torch.Size([0] * len(tensor.size)), tensor.size)
    odd: set[tuple[int, ...]] = set()
    for box in (whole, *tensor.chunks):
        if math.prod(box.sizes):
            sides = zip(box.offsets, box.sizes, strict=True)
            odd ^= set(product(*((start, start + extent) for start, extent in sides)))
    return not odd


def _dtype(made: Any) -> torch.dtype:
    state = made.state if type(made) is _PROPERTIES else None
    if type(state) is not tuple or not state or type(state[0]) is not torch.dtype:
        raise ForeignError("a tensor has no type of its numbers")
    return state[0]


def _index(made: Any) -> MetadataIndex:
    own = _state(made, _INDEX)
    offset, index = own.get("offset"), own.get("index")
    return MetadataIndex(
        _text(own.get("fqn")),
        None if offset is None else _size(offset),
        None if index is None else _number(index),
    )


def _info(made: Any) -> _StorageInfo:
    own = _state(made, _INFO)
    file = _text(own.get("relative_path"))
    if Path(file).name != file or not file.endswith(".distcp") or "\0" in file:
        raise ForeignError(f"'{shown(file)}' is none of a checkpoint's files")
    if own.get("transform_descriptors"):
        raise ForeignError("a tensor was written through an extension")
    return _StorageInfo(file, _number(own.get("offset")), _number(own.get("length")))


def _state(made: Any, cls: type[Made]) -> dict[str, Any]:
    """The attributes that a pickle gave to a value of a class."""
    if type(made) is not cls:
        raise ForeignError(f"{shown(type(made).__name__)} where {cls.__name__} should be")
    return _mapping(made.state)


def _mapping(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ForeignError(f"{shown(type(value).__name__)} where a mapping should be")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ForeignError(f"{shown(type(value).__name__)} where a text should be")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        what = value if isinstance(value, int) else type(value).__name__
        raise ForeignError(f"{shown(what)} where a number should be")
    return value


def _size(made: Any) -> torch.Size:
    args = made.args if type(made) is _SIZE else ()
    if len(args) != 1 or type(args[0]) is not tuple:
        raise ForeignError(f"{shown(type(made).__name__)} where sizes should be")
    return torch.Size([_number(item) for item in args[0]])
