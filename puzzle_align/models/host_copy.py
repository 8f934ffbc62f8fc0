"""Asynchronous copies of host arrays to a device."""

import numpy as np
import torch


def copied(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to ``device`` without waiting; on a CPU the tensor shares its memory.

    On CUDA the copy goes through pinned memory: a copy from pageable memory would wait for all
    earlier work on the CUDA stream.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
