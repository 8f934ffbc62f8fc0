"""Values of a checkpoint that are in no tensors: plain ones, and of no class that runs anything."""

import argparse
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.rerun_state_machine import RerunState

from puzzle_align.config.saved import DamagedError
from puzzle_align.runtime.checkpoint.reader import _plain

STEP = Path("step_00000003")


def _stream(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def test_what_is_saved_of_a_model_is_read() -> None:
    saved = OrderedDict(a=[torch.ones(3), {"lr": 1e-3, 1: (None, True)}], b=torch.bfloat16)
    assert str(_plain(_stream(saved), STEP, "common.pt")) == str(saved)


@pytest.mark.parametrize(
    "value",
    [OptimizerConfig(), np.float64(1.0), Path("a"), argparse.Namespace(a=1), RerunState(0)],
    ids=lambda value: type(value).__name__,
)
def test_classes_that_packages_declare_safe_are_refused(value: Any) -> None:
    """They are on the list when this runs: it is Megatron that adds them."""
    added = torch.serialization.get_safe_globals()
    assert OptimizerConfig in added
    with pytest.raises(DamagedError, match=r"common.pt holds code, or an unknown class \("):
        _plain(_stream({"actor": value}), STEP, "common.pt")
    # Of others' loading nothing is taken away.
    assert set(map(str, torch.serialization.get_safe_globals())) == set(map(str, added))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02N.", b"x" * 100, b"\x80\x04]r"])
def test_what_holds_no_values_is_damaged(data: bytes) -> None:
    with pytest.raises(DamagedError, match="step_00000003 is damaged or incomplete .common.pt"):
        _plain(io.BytesIO(data), STEP, "common.pt")
