"""tools/gpu_report.py: all of it runs, tiny, on a CPU; its text holds figures against goals."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import ROOT, run_tool


def _dry_run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The parts of a dry run, all done."""
    asked = ("--dry-run", "--output", str(folder), *arguments)
    done = run_tool(ROOT / "tools" / "gpu_report.py", *asked)
    assert done.returncode == 0, done.stderr
    parts = json.loads((folder / "gpu_report.json").read_text())
    assert {found["status"] for found in parts.values()} == {"done"}
    return parts


def test_a_dry_run_of_some_parts(tmp_path: Path):
    assert len(_dry_run(tmp_path, "--parts", "environment", "whole_model", "switches")) == 3


@pytest.mark.slow
def test_a_dry_run_does_every_part(tmp_path: Path):
    parts = _dry_run(tmp_path)
    # What a CPU can show: the estimate's parts are what tensors take, and both precisions learn.
    memory = parts["whole_model"]["memory"]["held/estimated"]
    assert list(memory.values()) == pytest.approx([1.0] * 4, rel=1e-3)
    assert abs(parts["losses"]["differences"]["bf16"]["all"]) < 0.05
    assert parts["tests"]["failed"] == 0 < parts["tests"]["skipped"] + parts["tests"]["passed"]
    shared, paired = (
        parts["layouts"]["data"]["tldr"]["variants"][f"{layout}+segments"]
        for layout in ("shared", "paired")
    )
    assert shared["pairs_per_second"] > 0 < paired["pairs_per_second"]
    text = (tmp_path / "gpu_report.md").read_text()
    assert "A dry run on a CPU" in text
    assert "not found" not in text.split("## Parts")[0].split("shared over paired")[1]


@pytest.fixture
def markdown(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("report.text").markdown


def variant(rate: float) -> dict[str, Any]:
    """A variant of 64 pairs a step, in 2 rows."""
    return {
        "pairs_per_second": rate,
        "linear_tflops": {"step": 10 * rate, "policy": 11 * rate},
        "step_seconds": 64 / rate,
        "mean_microbatches_per_step": 2,
        "peak_memory": 2**34,
        "fill": 1.0,
    }


def test_figures_meet_their_goals_or_do_not(markdown: Any):
    data = {
        "token_ratio": 1.5,
        "variants": {
            "shared+flex": variant(50),
            "shared+varlen": variant(60),
            "paired+a": variant(40),
        },
        "failed": {"paired+b": "out of memory"},
    }
    done = {"status": "done", "seconds": 3.0}
    parts = {
        "layouts": {**done, "data": {"hh_rlhf": data}, "missing": {}},
        "whole_model": {**done, "layers": 16, "of": 32, "data": {"hh_rlhf": data}},
        "host": {"status": "failed", "error": "it hung", "share_of_data": 0.02},
    }
    lines = markdown(parts, dict.fromkeys(parts, "Title"), dry_run=False).splitlines()
    # 60 pairs/s with their prompts shared, the better backend's, over 40 without; of half a model.
    assert "| shared over paired, hh_rlhf |  | > 1.41 | 1.50 | yes |" in lines
    assert "| shared over paired, hh_rlhf, over tokens' |  | >= 0.97 | 1.000 | yes |" in lines
    assert (
        "| whole step, bf16, 16 of 32 layers, linear TFLOP/s | 520 to 545 | > 545 | 600 | yes |"
        in lines
    )
    halved = "times 0.50 for the layers left out"
    assert f"| pairs/s, hh_rlhf, shared packed, {halved} | 41.7 | >= 43 | 30.0 | **no** |" in lines
    assert f"| hh_rlhf over TRL's 10.8 pairs/s, {halved} |  | >= 4 | 2.8 | **no** |" in lines
    assert "| host work before a step |  | <= 1% | 2.00% | **no** |" in lines
    assert "| shared over paired, tldr |  | > 1.35 | not found | |" in lines
    assert "| Title | failed: it hung | 0 |" in lines
    assert "| hh_rlhf | paired+b | out of memory | | | |" in lines
