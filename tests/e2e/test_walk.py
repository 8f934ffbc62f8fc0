"""The walk from ``launch/train.py`` to a model's forward: few frames, as few as its ideas."""

import runpy
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch.distributed as dist

from puzzle_align.models.chunk import ModelChunk
from puzzle_align.runtime.groups.world import shutdown_distributed
from tests.e2e.conftest import LAUNCHER

ROOT = Path(__file__).parents[2]
MOST = 8


def _walk(frame: FrameType | None) -> list[str]:
    """Functions of the package and its launch script that lead to a frame, outermost first."""
    names: list[str] = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if any(file.is_relative_to(ROOT / folder) for folder in ("puzzle_align", "launch")):
            names.append(f"{file.stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return names[::-1]


def test_it_is_eight_frames_or_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    script = str(ROOT / "launch/train.py")
    sizes = ("max_steps=1", "global_batch_size=2", "data.num_synthetic=8", "data.eval_fraction=0.5")
    quiet = ("telemetry.progress=false", "telemetry.tensorboard=false")
    arguments = ["--config", "dpo_tiny", *sizes, *quiet, f"output_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    walks: dict[str, list[str]] = {}
    forward = ModelChunk.forward

    def noted(*args, **named):
        walk = _walk(sys._getframe(1))
        walks.setdefault("evaluation" if "trainer.evaluate" in walk else "step", walk)
        return forward(*args, **named)

    monkeypatch.setattr(ModelChunk, "forward", noted)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if dist.is_initialized():
            shutdown_distributed()
    assert walks.keys() == {"evaluation", "step"}
    for walk in walks.values():
        assert walk[0] == "train.<module>" and len(walk) + 1 <= MOST, walk
