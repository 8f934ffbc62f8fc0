"""Arrays of the host on their way to a device."""

import numpy as np
import torch


def copied(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on ``device``; the host goes on before it is there. On a CPU it is the array's own.

    On CUDA through pinned memory: a copy of other memory waits for all that the stream was given.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
