"""tools/bench_dpo.py on one layer: its JSON is whole and its figures agree with each other."""

import importlib
import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.launch import ROOT, run_tool

SMALL = ("--device", "cpu", "--layers", "1", "--tokens", "128", "--pairs", "6", "--threads", "1")
PASSES = {"step": 4, "policy": 3, "reference": 1}  # forwards' worth of linear FLOPs
DATA = ("--data", "lengths:prompt=24,response=6,spread=0.5")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tool(ROOT / "tools" / "bench_dpo.py", *SMALL, *arguments)


def test_figures_of_the_default_variants_agree():
    done = _run(*DATA, "--steps", "1", "--warmup", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = ["shared+packed", "paired+packed", "paired+padded"]
    assert list(result["variants"]) == names
    flops = result["model"]["linear_flops_per_token"]
    assert flops == 2 * (256 * 4 * 64 * 2 + 256 * 2 * 64 * 2 + 3 * 256 * 768)
    used = {}
    for name, found in result["variants"].items():
        # With one step every median is the step itself.
        seconds, phases = found["step_seconds"], found["phase_seconds"]
        assert found["all_step_seconds"] == [seconds]
        assert sum(phases.values()) == pytest.approx(seconds)
        assert found["pairs_per_second"] * seconds == pytest.approx(6)
        row_tokens = found["mean_row_tokens_per_step"]
        assert found["row_tokens_per_second"] * seconds == pytest.approx(row_tokens)
        used[name] = found["used_tokens_per_second"] * seconds
        assert found["fill"] * row_tokens == pytest.approx(used[name])
        for part, passes in PASSES.items():
            done_flops = found["linear_tflops"][part] * 1e12 * {"step": seconds, **phases}[part]
            assert done_flops == pytest.approx(passes * flops * row_tokens)
        assert found["attention"] == "segments"
        assert found["peak_memory"] > 0
    # The same pairs everywhere; the prompt counts twice where it is not shared.
    assert used["shared+packed"] < used["paired+packed"] == pytest.approx(used["paired+padded"])
    packed = result["variants"]["shared+packed"]
    assert packed["mean_row_tokens_per_step"] == 128 * packed["mean_microbatches_per_step"]
    for pair, ratio in result["ratios"].items():
        first, second = (result["variants"][name] for name in pair.split("/"))
        assert ratio == pytest.approx(first["pairs_per_second"] / second["pairs_per_second"])
    assert list(result["ratios"]) == [f"{names[a]}/{names[b]}" for a, b in ((0, 1), (0, 2), (1, 2))]


def test_backends_and_a_preference_file(tmp_path: Path):
    file = tmp_path / "hh.jsonl"
    start = "\n\nHuman: hello {0}\n\nAssistant:"
    lines = (
        {"chosen": start.format(i) + " yes" * i, "rejected": start.format(i) + " no"}
        for i in range(1, 9)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ("--compare", "shared+packed", "shared+padded", "--attention", "varlen", "auto")
    done = _run("--data", f"hh:{file}", *asked, "--steps", "2", "--warmup", "0", "--clock", "cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result["variants"]) == [
        f"shared+{packing}+{attention}"
        for packing in ("packed", "padded")
        for attention in ("varlen", "segments")
    ]
    assert result["data"]["pairs_per_step"] == 6  # the second step has the last two pairs
    assert result["settings"]["clock"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--data", "lengths:prompt=4"), "--data lengths:prompt=4"),
        ((*DATA, "--compare", "shared"), "--compare shared"),
        (("--data", "hh:nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.syspath_prepend(ROOT / "tools")
    main = importlib.import_module("bench_dpo").main
    assert main([*SMALL[:-2], *arguments]) == 1  # threads stay this process's own
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert named in errors
