"""Rows get to a CUDA device as they are on the host, and the host waits for none of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from puzzle_align.data.dataset import from_examples
from puzzle_align.data.loader import collate_row
from puzzle_align.layout.model import AttentionBackend, Head
from puzzle_align.models.host_copy import copied
from puzzle_align.runtime.row_input import Reading, to_device
from tests.unit.row_tensors import row_tensors

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
@pytest.mark.parametrize("attention", ["flex", "dense", "segments", "varlen"])
def test_a_row_is_that_of_the_host(attention: AttentionBackend, layout: str, head: Head) -> None:
    generator = np.random.default_rng(0)

    def text(length: int) -> list[int]:
        return generator.integers(0, 100, length).tolist()

    pairs = [(text(200), [text(90), text(140)]), (text(5), [text(300), text(1)])]
    microbatch = collate_row(
        from_examples(pairs, 0), np.arange(2), np.arange(2), layout=layout, num_tokens=1024
    )
    reading = Reading(tail_weight=0.5) if head == "lm" else Reading(output_kind="responses")
    expected = row_tensors(to_device(microbatch, attention, CPU, reading))
    with no_waiting():
        row = to_device(microbatch, attention, CUDA, reading)
    on_device = row_tensors(row)
    assert on_device.keys() == expected.keys()
    for name, value in on_device.items():
        assert value.device.type == "cuda"
        assert torch.equal(value.cpu(), expected[name]), name
