"""The copies of masks that CUDA's kernels read: the same numbers, at aligned places."""

import pytest
import torch

from puzzle_align.models.attention.mask import aligned


@pytest.mark.parametrize("num_keys", [1, 8, 13])
def test_a_window_s_copy_is_the_window_with_aligned_rows(num_keys: int) -> None:
    mask = torch.arange(5 * 20.0).view(5, 20)
    window = mask[:3, 3 : 3 + num_keys]
    copy = aligned(window)
    assert torch.equal(copy, window)
    assert copy.stride(1) == 1 and copy.stride(0) % 8 == 0
    assert copy.storage_offset() == 0 and copy.data_ptr() != window.data_ptr()
