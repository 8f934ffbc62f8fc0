"""A checkpoint's metadata is read as torch wrote it; no other name in it is called."""

import dataclasses
import enum
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
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

from puzzle_align.runtime.checkpoint import metadata as checkpoint_metadata
from puzzle_align.runtime.checkpoint.metadata import read_metadata

SIZE = torch.Size([4, 3])
ORIGIN = torch.Size([0, 0])
MIDDLE = ((1, 2), (1, 2))


def _metadata(file: str = "__0_0.distcp", **others: Any) -> Metadata:
    chunks = [ChunkStorageMetadata(ORIGIN, SIZE)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), SIZE, chunks)
    return Metadata(
        state_dict_metadata={"a.weight": tensor, "a.random": BytesStorageMetadata()},
        storage_data={
            MetadataIndex("a.weight", ORIGIN, 0): _StorageInfo(file, 7, 900),
            MetadataIndex("a.random"): _StorageInfo(file, 0, 7),
        },
        **others,
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes_is_read(protocol: int) -> None:
    meta = StorageMeta(checkpoint_id=Path("a"), save_id="b")
    written = pickle.dumps(_metadata(storage_meta=meta, version="1.0.0"), protocol=protocol)
    assert read_metadata(written) == _metadata()


class _Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


def test_a_member_written_by_its_name_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.11.0 to 3.11.3 write it, Debian 12's among them."""

    def by_name(member: enum.Enum, _protocol: int) -> Any:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    written = pickle.dumps(_metadata())
    monkeypatch.undo()
    assert b"getattr" in written
    assert read_metadata(written) == _metadata()


@pytest.mark.parametrize(
    ("owner", "name"), [(Metadata, "__init__"), (Metadata, "__dict__"), (torch.Size, "numel")]
)
def test_no_attribute_is_read(owner: type, name: str) -> None:
    reading = _Calls(getattr, owner, name)
    for made in (reading, _metadata(planner_data=reading)):
        with pytest.raises(ValueError, match=r"^\.metadata: it reads an attribute"):
            read_metadata(pickle.dumps(made))


@pytest.mark.parametrize("function", [os.mkdir, exec, torch.load, Path.touch, os.system])
def test_what_would_be_called_is_named_and_not_called(function: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hidden = _Calls(function, f"open({str(mark)!r}, 'w')" if function is exec else str(mark))
    for made in (hidden, _metadata(planner_data=hidden), _metadata(version=[hidden])):
        with pytest.raises(ValueError, match=r"holds code, or an unknown class \(.*\)") as error:
            read_metadata(pickle.dumps(made))
        assert function.__name__ in str(error.value)
    assert not mark.exists()


def test_no_name_stands_for_code() -> None:
    """They are types of plain data, and built-in functions that make a text or look one up."""
    for value in checkpoint_metadata._NAMES.values():
        is_plain = value in (torch.Size, _MEM_FORMAT_ENCODING)
        is_plain |= isinstance(getattr(value, "__self__", None), str | dict)
        is_plain |= isinstance(value, checkpoint_metadata._Member)
        assert is_plain or isinstance(value, torch.dtype) or dataclasses.is_dataclass(value)


def _with(name: str, value: Any) -> Metadata:
    metadata = _metadata()
    object.__setattr__(next(iter(metadata.storage_data.values())), name, value)
    return metadata


def _placed(offset: torch.Size, index: int) -> Metadata:
    """Metadata of the place of the chunk with this offset and index."""
    index_of = MetadataIndex("a.weight", offset, index)
    return Metadata({}, storage_data={index_of: _StorageInfo("__0_0.distcp", 0, 7)})


def _tensor(name: str, value: Any) -> Metadata:
    """Metadata whose tensor is described otherwise."""
    metadata = _metadata()
    setattr(metadata.state_dict_metadata["a.weight"], name, value)
    return metadata


def _chunks(*offsets: tuple[int, int]) -> Metadata:
    """Metadata of the tensor in chunks of two rows."""
    metadata = _metadata()
    tensor: Any = metadata.state_dict_metadata["a.weight"]
    size = torch.Size([2, 3])
    tensor.chunks[:] = [ChunkStorageMetadata(torch.Size(offset), size) for offset in offsets]
    return metadata


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (_metadata(file="../../a.distcp"), "'../../a.distcp' is none of a checkpoint's files"),
        (_metadata(file="/etc/passwd"), "'/etc/passwd' is none"),
        (_with("offset", -1), "expected a number, got -1"),
        (_with("length", True), "expected a number, got True"),
        (_with("length", 10**400), "expected a number, got 1000"),
        (_with("transform_descriptors", ["zstd"]), "was written through an extension"),
        (Metadata(state_dict_metadata=[]), "expected dict, got list"),  # type: ignore[arg-type]
        (Metadata({"a": 3}, storage_data={}), "expected TensorStorageMetadata, got int"),  # type: ignore[dict-item]
        (Metadata({3: BytesStorageMetadata()}, storage_data={}), "expected str, got int"),  # type: ignore[dict-item]
        (_tensor("properties", TensorProperties(dtype=3)), "expected dtype, got int"),  # type: ignore[arg-type]
        (_tensor("size", (4, 3)), "expected Size, got tuple"),
        (_tensor("chunks", [ChunkStorageMetadata(ORIGIN, (4, 3))]), "expected Size, got tuple"),  # type: ignore[arg-type]
        (_tensor("chunks", [ChunkStorageMetadata((0, 0), SIZE)]), "expected Size, got tuple"),  # type: ignore[arg-type]
        (_placed(ORIGIN, -1), "expected a number, got -1"),
        (_placed(torch.Size([-1, 0]), 0), "expected a number, got -1"),
        (_chunks(), "a tensor's chunks are not all of its (4, 3)"),
        (_chunks((0, 0)), "not all of its (4, 3)"),
        (_chunks((0, 0), (3, 0)), "a tensor's chunk is not in its (4, 3)"),
        (torch.Size([3]), "expected Metadata, got Size"),
        ({}, "expected Metadata, got dict"),
    ],
)
def test_other_values_are_an_error(made: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^.metadata: ") as found:
        read_metadata(pickle.dumps(made))
    assert message in str(found.value)
    assert len(str(found.value)) < 200


def _boxed(size: tuple[int, ...], *boxes: tuple[tuple[int, int], ...]) -> bytes:
    """Metadata of one tensor, each of its chunks given as (start, end) by dimension."""
    chunks = [
        ChunkStorageMetadata(torch.Size([a for a, _ in box]), torch.Size([b - a for a, b in box]))
        for box in boxes
    ]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), chunks)
    return pickle.dumps(Metadata({"a": tensor}, storage_data={}))


@pytest.mark.parametrize(
    ("size", "boxes"),
    [
        ((), [()]),
        ((0, 3), [((0, 0), (0, 3))]),
        ((4,), [((0, 3),), ((3, 4),)]),
        ((4,), [((2, 4),), ((0, 2),), ((4, 4),)]),
        # A pinwheel, which no straight cut parts.
        ((3, 3), [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), MIDDLE]),
    ],
)
def test_chunks_of_all_sizes_may_make_a_tensor(size: Any, boxes: Any) -> None:
    tensor: Any = read_metadata(_boxed(size, *boxes)).state_dict_metadata["a"]
    assert tensor.size == torch.Size(size) and len(tensor.chunks) == len(boxes)


def test_chunks_must_be_as_much_as_the_tensor_and_in_it() -> None:
    for size, *boxes in (
        ((), (), ()),
        ((4,), ((0, 3),), ((1, 2),), ((1, 2),)),
        ((4,), ((0, 2),), ((3, 5),)),
        ((2, 2), ((0, 2),), ((0, 2),)),
    ):
        with pytest.raises(ValueError, match=r"are not all of its|is not in its"):
            read_metadata(_boxed(size, *boxes))


@pytest.mark.parametrize("end", [0, 1, 40, -1])
def test_a_part_of_it_is_no_whole_pickle(end: int) -> None:
    with pytest.raises(ValueError, match="no whole pickle"):
        read_metadata(pickle.dumps(_metadata())[:end])


PROTO = b"\x80\x04"
CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PROTO + b"\x95" + (2**60).to_bytes(8, "little") + b"N.", "is no whole pickle"),
        (PROTO + b"N)R.", "is no whole pickle"),
        (PROTO + b"ctorch\nfloat32\n)R.", "is no whole pickle"),
        (PROTO + b"\x82\x01.", "is no whole pickle"),  # copyreg's extensions
        (PROTO + b"Vname\nQ.", "is no whole pickle"),  # a persistent id
        (PROTO + CLASS + b".", "expected Metadata, got type"),
        (PROTO + CLASS + b")R}b.", "is no whole pickle"),
        (PROTO + CLASS + b")\x81.", "is no whole pickle"),  # without its attributes
        # Attributes of the class itself, as a mapping.
        (PROTO + CLASS + b"}Vread\nK\x01sb.", "is no whole pickle"),
        (PROTO + CLASS + b"Vread\nK\x01s.", "is no whole pickle"),
        (PROTO + b"ctorch\nSize\nN}Vread\nK\x01s\x86b.", "is no whole pickle"),
        (PROTO + b"\x8c\x07pathlib\x8c\x0aPath.touch\x93.", r"unknown class \(pathlib.Path.tou"),
        (PROTO + b"ctorch\n__builtins__\n.", r"unknown class \(torch.__builtins__\)"),
    ],
)
def test_a_crafted_pickle_ends_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_metadata(data)
    assert not hasattr(Metadata, "read") and not hasattr(torch.Size, "read")
