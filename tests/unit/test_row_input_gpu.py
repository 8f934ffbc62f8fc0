"""Rows get to a CUDA device as they are on the host, and the host waits for none of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import collate_row
from puzzle_align.layout.model import AttentionBackend, Head
from puzzle_align.models.attention.segments import Pieces
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.row_input import Reading, RowInput, to_device
from tests.unit.test_block_mask import TENSORS as BLOCK_TENSORS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error wherever the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tensors(row: RowInput) -> dict[str, torch.Tensor]:
    """All that a row holds on its device, by name."""
    found = {f.name: getattr(row, f.name) for f in fields(row)}
    found |= {f.name: getattr(row.predictions, f.name) for f in fields(row.predictions)}
    structure = row.attention.structure
    if isinstance(structure, BlockMask):
        found |= {name: getattr(structure, name) for name in BLOCK_TENSORS}
        places = torch.arange(row.tokens.size(1), device=row.tokens.device)
        found["mask"] = structure.mask_mod(places, places, places[:, None], places[None])
    elif isinstance(structure, Pieces):
        found |= {str(dtype): mask for dtype, mask in structure.branch_masks.items()}
    else:
        found["mask"] = structure
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_an_array_is_copied_without_waiting(shape: tuple[int, ...], dtype: type) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    with no_waiting():
        tensor = copied(array, CUDA)
    assert tensor.device.type == "cuda"
    assert torch.equal(tensor.cpu(), torch.from_numpy(array))


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("layout", ["shared", "paired"])
@pytest.mark.parametrize("attention", ["flex", "dense", "segments"])
def test_a_row_is_that_of_the_host(attention: AttentionBackend, layout: str, head: Head) -> None:
    generator = np.random.default_rng(0)

    def text(length: int) -> list[int]:
        return generator.integers(0, 100, length).tolist()

    pairs = [(text(200), [text(90), text(140)]), (text(5), [text(300), text(1)])]
    microbatch = collate_row(
        from_examples(pairs, 0), np.arange(2), np.arange(2), layout=layout, num_tokens=1024
    )
    reading = Reading(tail_weight=0.5) if head == "lm" else Reading(output_kind="responses")
    expected = tensors(to_device(microbatch, attention, CPU, reading))
    with no_waiting():
        row = to_device(microbatch, attention, CUDA, reading)
    found = tensors(row)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.device.type == "cuda"
        assert torch.equal(value.cpu(), expected[name]), name
