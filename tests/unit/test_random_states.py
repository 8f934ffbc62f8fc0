"""Random states of checkpoints: restored on the kind of device that they are of, and only there."""

import pytest
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from puzzle_align.runtime.checkpoint import models as checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tracker_is_restored_on_its_own_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = CudaRNGStatesTracker()
    tracker.set_states({"model": torch.get_rng_state()})
    monkeypatch.setattr(checkpoint, "get_cuda_rng_tracker", lambda: tracker)
    saved = {**checkpoint._random_states(CPU), "device": device}
    drawn = torch.rand(3)
    tracker.set_states({"model": torch.zeros(0)})
    checkpoint._set_random_states(saved, CPU)
    assert torch.equal(torch.rand(3), drawn)
    restored = len(tracker.get_states()["model"]) > 0
    assert restored == (device == "cpu")
