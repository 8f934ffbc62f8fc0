"""A checkpoint's metadata: what torch writes is read, and nothing else that is named is called."""

import os
import pickle
import resource
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from puzzle_align.runtime.checkpoint import metadata as checkpoint_metadata
from puzzle_align.runtime.checkpoint import pickle as checkpoint_pickle
from puzzle_align.runtime.checkpoint.metadata import read_metadata

SIZE = torch.Size([4, 3])
MIDDLE = ((1, 2), (1, 2))


def _metadata(file: str = "__0_0.distcp", **others: Any) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), SIZE)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), SIZE, chunks)
    return Metadata(
        state_dict_metadata={"a.weight": tensor, "a.random": BytesStorageMetadata()},
        storage_data={
            MetadataIndex("a.weight", torch.Size([0, 0]), 0): _StorageInfo(file, 7, 900),
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


@pytest.mark.parametrize("function", [os.mkdir, exec, getattr, torch.load, Path.touch, os.system])
def test_what_would_be_called_is_named_and_not_called(function: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hidden = _Calls(function, f"open({str(mark)!r}, 'w')" if function is exec else str(mark))
    for made in (hidden, _metadata(planner_data=hidden), _metadata(version=[hidden])):
        with pytest.raises(ValueError, match=r"holds code, or an unknown class \(.*\)") as told:
            read_metadata(pickle.dumps(made))
        assert function.__name__ in str(told.value)
    assert not mark.exists()


def test_what_is_named_is_made_into_nothing_of_torch() -> None:
    for made in checkpoint_metadata._KNOWN.values():
        assert isinstance(made, torch.dtype) or issubclass(made, checkpoint_pickle.Made)


def _with(name: str, value: Any) -> Metadata:
    metadata = _metadata()
    object.__setattr__(next(iter(metadata.storage_data.values())), name, value)
    return metadata


def _chunks(*offsets: tuple[int, int]) -> Metadata:
    """Of the tensor, in chunks of two rows."""
    metadata = _metadata()
    tensor: Any = metadata.state_dict_metadata["a.weight"]
    size = torch.Size([2, 3])
    tensor.chunks[:] = [ChunkStorageMetadata(torch.Size(offset), size) for offset in offsets]
    return metadata


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (_metadata(file="../../a.distcp"), "'../../a.distcp' is none of a checkpoint's files"),
        (_metadata(file="/etc/passwd"), "'/etc/passwd' is none"),
        (_with("offset", -1), "-1 where a number should be"),
        (_with("length", True), "True where a number should be"),
        (_with("length", 10**400), "where a number should be"),
        (_with("transform_descriptors", ["zstd"]), "was written through an extension"),
        (Metadata(state_dict_metadata=[]), "list where a mapping should be"),  # type: ignore[arg-type]
        (Metadata({"a": 3}, storage_data={}), "int where TensorStorageMetadata should be"),  # type: ignore[dict-item]
        (Metadata({3: BytesStorageMetadata()}, storage_data={}), "int where a text should be"),  # type: ignore[dict-item]
        (_chunks(), "a tensor's chunks are not all of its (4, 3)"),
        (_chunks((0, 0)), "not all of its (4, 3)"),
        (_chunks((0, 0), (0, 0)), "not all of its (4, 3)"),
        (_chunks((0, 0), (3, 0)), "not all of its (4, 3)"),
        (torch.Size([3]), "Size where Metadata should be"),
        ({}, "dict where Metadata should be"),
    ],
)
def test_other_values_are_told_of(made: Any, told: str) -> None:
    with pytest.raises(ValueError, match="^.metadata: ") as found:
        read_metadata(pickle.dumps(made))
    assert told in str(found.value)
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


@pytest.mark.parametrize(
    ("size", "boxes"),
    [
        ((), [(), ()]),
        ((4,), [((0, 3),), ((1, 2),)]),
        ((4,), [((0, 2),), ((1, 3),)]),
        ((5,), [((0, 3),), ((0, 1),), ((0, 1),)]),
        ((2, 2), [((0, 2), (0, 1)), ((0, 1), (0, 2))]),
        ((4, 4), [((0, 2), (0, 4)), ((1, 3), (0, 4))]),
        ((3, 3), [((0, 3), (0, 2)), ((0, 1), (0, 3))]),
        ((2,) * 9, [((0, 1), *[(0, 2)] * 8), ((0, 1), *[(0, 2)] * 8)]),
    ],
)
def test_chunks_that_overlap_leave_a_part_unsaid(size: Any, boxes: Any) -> None:
    with pytest.raises(ValueError, match=r"not all of its|9 dimensions"):
        read_metadata(_boxed(size, *boxes))


def test_many_chunks_of_many_sizes_are_checked_fast() -> None:
    ends = [0, *(3 * n + n % 2 for n in range(1, 20_001))]
    boxes = [(pair, (0, 7)) for pair in pairwise(ends)]
    began = time.process_time()
    read_metadata(_boxed((ends[-1], 7), *boxes))
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("end", [0, 1, 40, -1])
def test_a_part_of_it_is_no_whole_pickle(end: int) -> None:
    with pytest.raises(ValueError, match="no whole pickle"):
        read_metadata(pickle.dumps(_metadata())[:end])


PROTO = b"\x80\x04"


def _doubled(before: bytes, after: bytes) -> bytes:
    """A pickle of a value that holds another 2^60 times over."""
    pairs = b"".join(b"\x94h%c\x86" % number for number in range(60))
    return PROTO + before + b"K\x01" + pairs + after


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (PROTO + b"Nr" + (2**28).to_bytes(4, "little") + b".", "kept out of order"),
        (PROTO + b"Nq\xff.", "kept out of order"),
        (PROTO + b"\x96" + (2**40).to_bytes(8, "little") + b".", "torch does not ask for"),
        (PROTO + b"X" + (2**32 - 1).to_bytes(4, "little") + b".", "it ends early"),
        (PROTO + b"\x95" + (2**60).to_bytes(8, "little") + b"N.", "NoneType where Metadata"),
        (_doubled(b"}", b"Ns."), "items of no mapping"),
        (_doubled(b"", b"."), "tuple where Metadata should be"),
        (PROTO + b"}" + b"K\x01" + 10**5 * b"\x85" + b"Ns.", "items of no mapping"),
        (PROTO + 10**5 * b"(" + b".", "not enough values"),
        (PROTO + b"N)R.", "is no class"),
        (PROTO + b"ctorch\nfloat32\n)R.", "is no class"),
        (PROTO + b"NNb.", "a state of what has none"),
        (PROTO + b"2.", "torch does not ask for"),
    ],
)
def test_a_crafted_pickle_takes_no_more_than_its_length(data: bytes, told: str) -> None:
    """In time and memory: what it announces is not made, and what it repeats is not gone into."""
    began, limits = time.process_time(), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, limits[1]))
    try:
        with pytest.raises(ValueError, match=told):
            read_metadata(data)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.process_time() - began < 2.0


def test_a_number_that_holds_others_is_not_shown() -> None:
    """Its text would be as long as what it holds, however often."""
    pair: Any = 1
    for _ in range(60):
        pair = (pair, pair)
    with pytest.raises(ValueError, match="tuple where a number should be"):
        read_metadata(pickle.dumps(_with("offset", pair)))
