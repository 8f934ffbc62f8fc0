"""Tools at their smallest, on a CPU: they run, their JSON is whole and its figures agree.

The text of ``tools/gpu_report.py`` holds figures against goals.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from puzzle_align.layout.flops import flops_per_token
from tests.cluster.hosts import missing
from tests.e2e.launch import ROOT, run_tool
from tests.unit.planner_spaces import tool

WAYS = {"table", "rank 0", "all-gather"}
RESHARD = ("--ranks", "2", "--hidden", "64", "--layers", "2", "--repeats", "1")


def _result(tool: str, *arguments: str) -> Any:
    done = run_tool(ROOT / "tools" / f"{tool}.py", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_three_ways_are_measured() -> None:
    found = _result("bench_reshard", *RESHARD)
    pairs = [(each["from"], each["to"]) for each in found]
    assert pairs[:2] == [([2, 1, 1], [1, 1, 2]), ([1, 1, 2], [1, 2, 1])]
    for each in found:
        assert each["seconds"].keys() == WAYS
        assert each["ratios"].keys() == WAYS - {"table"}
        assert all(ratio > 0 for ratio in each["ratios"].values())
        over = each["received_over_bound"]
        assert over["table"] == 1.0 <= over["all-gather"]
        assert over["rank 0"] > 1.0


WHY = missing()
# What torch's gloo sends more than has to cross: a reduce-scatter is an all-reduce to it, and its
# broadcast crosses a link between hosts twice.
EXTRA = {"reduce-scatter": 2.0, "rank 0": 2.0}


@pytest.mark.slow  # two minutes
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_links_carry_what_is_counted(tmp_path: Path) -> None:
    parts, tables = tool("bench_links").PARTS, tmp_path / "tables.md"
    asked = ("--dry-run", "--markdown", str(tables), "--parts", *parts)
    rows = _result("bench_links", *asked)["rows"]
    assert {row["part"] for row in rows} == {*parts}
    for row in rows:
        extra = next((more for word, more in EXTRA.items() if word in row["case"]), 1.0)
        for sent, counted in zip(row["bytes"], row["counted"], strict=True):
            # Headers, heartbeats and small sums, such as a gradient's norm, come on top.
            assert counted <= sent < 1.02 * extra * counted + 2**16, row
        assert row["seconds"] > row["least_seconds"]
        for role in ("reference", "actor") if row["part"] == "hidden" else ():
            assert 0 <= row[role]["hidden_seconds"] <= row[role]["transfer_seconds"] > 0
    switched = [row["case"] for row in rows if row["part"] == "switch"]
    assert [case.rsplit(", ", 1)[1] for case in switched[3:7]] == [
        "routing table",
        "Megatron's refit",
        "all-gather",
        "rank 0",
    ]
    lines = tables.read_text().splitlines()
    assert all(any(line.startswith(f"| {row['case']} |") for line in lines) for row in rows)


def test_links_need_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tool("bench_links")
    monkeypatch.setattr(bench, "missing", lambda: "hosts on one machine need root")
    assert bench.main(["--dry-run"]) == 1
    assert capsys.readouterr().err == "error: hosts on one machine need root\n"


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_a_switch_uses_a_slow_link_both_ways_at_once() -> None:
    small = ("--hidden", "64", "--layers", "4")
    rows = _result("bench_links", "--parts", "switch", "--rates", "20", *small)["rows"]
    (row,) = (row for row in rows if row["case"].endswith("P2 T2 to D2 T2, routing table"))
    assert row["least_seconds"] > 3  # so that what this machine does besides matters little
    assert row["seconds"] < 1.4 * row["least_seconds"]


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_plans_run_on_two_hosts_as_the_planner_prices_them() -> None:
    asked = ("--rates", "1600mbit", "--best", "1", "--drawn", "1", "--repeats", "1", "--steps", "3")
    asked = (*asked, "--tries", "1")
    few = ("--set", "data.num_synthetic=64", "data.eval_fraction=0", "telemetry.eval_every=0")
    found = _result("bench_hosts", "--config", "dpo_tiny", *asked, *few)["1600mbit"]
    first, second = found["plans"]
    assert first["plan"] == found["choice"] and first["predicted"] <= second["predicted"]
    assert first["plan"] != second["plan"] and {first["ranks"], second["ranks"]} == {4}
    assert 0 <= first["stolen"] < 1
    fastest = min(first["measured"], second["measured"])
    assert found["choice_over_fastest"] == first["measured"] / fastest


GENERATE = "--prompt-length 16 --max-new-tokens 12 --layers 1 --hidden 64 --vocabulary 300"


def test_both_answer_alike_and_figures_agree() -> None:
    asked = ("--prompts", "5", "2", "--repeats", "1", "--threads", "1", "--decode-batch-size", "2")
    result, other = _result("bench_generate", *GENERATE.split(), *asked)["runs"]
    assert (result["prompts"], other["prompts"]) == (5, 2)
    assert other["same_responses"] == len(other["response_lengths"]) == 2
    assert result["same_responses"] == len(result["response_lengths"]) == 5
    assert len(set(result["response_lengths"])) > 2
    assert result["response_tokens"] == sum(result["response_lengths"])
    for name, (seconds,) in result["seconds"].items():
        rate = result["tokens_per_second"][name]
        assert rate * seconds == pytest.approx(result["response_tokens"])
    (ours,), (theirs,) = result["seconds"].values()
    assert result["ratio"] == pytest.approx(theirs / ours)


@pytest.mark.slow
def test_a_preparation_and_the_start_after_it_are_measured(tmp_path):
    options = ("--pairs", "20000", "--num-proc", "2", "--folder", str(tmp_path))
    result = _result("bench_prepare", *options)
    case = result["2 processes"]
    assert case["workers"] == 2 and case["pairs_a_second"] > 0
    assert 20 < case["peak_mib_of_a_worker"] < 2048 and 20 < case["peak_mib"] < 2048
    assert result["start of another rank"]["gigabytes_a_second"] == 0
    assert result["start of rank 0"]["seconds"] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_switches_and_checkpoints_of_adapters_are_smaller() -> None:
    found = _result("bench_adapters", "--hidden", "128", "--layers", "2", "--steps", "3")
    full, adapters = found["full"], found["adapters"]
    assert full["parameters"] == adapters["parameters"] == full["trained"]
    first, *later = adapters["switch_mb"]
    assert len(set(full["switch_mb"])) == 1 and first > full["switch_mb"][0]
    assert later == [later[0]] * 2 and 0 < later[0] <= 4 * adapters["trained"] / 1e6
    assert adapters["checkpoint_mb"] < full["checkpoint_mb"]


DPO = ("--device", "cpu", "--layers", "1", "--tokens", "128", "--pairs", "6", "--threads", "1")
PASSES = {"step": 4, "policy": 3, "reference": 1}  # forwards' worth of linear FLOPs
LENGTHS = ("--data", "lengths:prompt=24,response=6,spread=0.5")


def test_figures_of_the_default_variants_agree():
    result = _result("bench_dpo", *DPO, *LENGTHS, "--steps", "1", "--warmup", "1")
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
            assert done_flops == pytest.approx(passes * flops * used[name])
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
    run = ("--data", f"hh:{file}", "--steps", "2", "--warmup", "0", "--clock", "cpu")
    result = _result("bench_dpo", *DPO, *run, *asked)
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
        ((*LENGTHS, "--compare", "shared"), "--compare shared"),
        (("--data", "hh:nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
):
    assert tool("bench_dpo").main([*DPO[:-2], *arguments]) == 1  # threads stay this process's own
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith("error: ") and named in errors


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a whole report on a CPU, by part."""
    folder = tmp_path_factory.mktemp("report")
    done = run_tool(ROOT / "tools" / "gpu_report.py", "--dry-run", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    text = (folder / "gpu_report.md").read_text()
    assert "A dry run on a CPU" in text
    if find_spec("trl") is None:
        assert "TRL is not installed." in text.splitlines()
    assert "not found" not in text.split("## Parts")[0].split("shared over paired")[1]
    return json.loads((folder / "gpu_report.json").read_text())


def test_a_dry_run_does_every_part(dry_run: dict[str, Any]):
    assert dry_run.keys() == tool("gpu_report").PARTS.keys()
    assert {part["status"] for part in dry_run.values()} == {"done"}
    assert all(part["counts"]["data"] for part in dry_run.values())
    compared = dry_run["losses"]["differences"]["bf16"]["all"]  # both precisions learn
    assert abs(compared["difference"]) < 0.05 and compared["tolerance"] >= 0.005
    for name in ("losses", "host", "generation", "kernels"):
        assert dry_run[name]["attention"] == "segments"
    tests = dry_run["tests"]
    assert tests["failed"] == 0 < tests["skipped"] + tests["passed"]


def test_a_dry_run_measures_what_a_cpu_can_show(dry_run: dict[str, Any]):
    # Estimates are what tensors take.
    memory = dry_run["whole_model"]["memory"]["held/estimated"]
    assert list(memory.values()) == pytest.approx([1.0] * 4, rel=1e-3)
    fastest = dry_run["whole_model"]["attention"]  # measured: on a busy machine any of them
    whole, bare = (
        found["data"]["hh_rlhf"]
        for found in (dry_run["whole_model"], dry_run["whole_model"]["bare"])
    )
    for layout in ("shared", "paired"):
        ours, theirs = (
            found["variants"][f"{layout}+{name}"]
            for found, name in ((whole, fastest), (bare, "dense"))
        )
        for figure in ("steps", "fill", "mean_row_tokens_per_step"):  # of the same pairs
            assert ours[figure] == theirs[figure]
    assert whole["variants"].keys() == {f"shared+{fastest}", f"paired+{fastest}"}
    assert whole["pairs_per_step"] == bare["pairs_per_step"]
    for ways in dry_run["generation"]["sequences"].values():
        assert list(ways) == ["ours, eager", "transformers", "transformers, static cache"]
        assert not any("error" in found for found in ways.values())
    for name in ("sdpa", "sdpa_ours"):
        assert dry_run["generation"][name] == ["flash_attention_for_cpu"]
    for link in ("reshard", "offload"):
        assert min(dry_run["ceilings"][f"{link}_gb_per_second"].values()) > 0
    dry, layers = tool("report.setting").DRY, dry_run["layers"]["variants"]["local"]
    assert layers["fill"] < 1  # padding does not count: forward and backward are three forwards
    flops = 3 * flops_per_token(dry.model()) * layers["fill"] * dry.tokens
    assert layers["linear_tflops"] * layers["seconds"] * 1e12 == pytest.approx(flops)
    shared, paired = (
        dry_run["layouts"]["data"]["tldr"]["variants"][f"{layout}+segments"]
        for layout in ("shared", "paired")
    )
    assert shared["pairs_per_second"] > 0 < paired["pairs_per_second"]


def variant(rate: float) -> dict[str, Any]:
    """A variant of 64 pairs a step, in 2 rows; in five steps, one of them faster."""
    return {
        "steps": 5,
        "pairs_per_second": rate,
        "extremes": {
            "pairs_per_second": [rate, 1.1 * rate],
            "linear_tflops": [9 * rate, 11 * rate],
        },
        "linear_tflops": {"step": 10 * rate, "policy": 11 * rate},
        "step_seconds": 64 / rate,
        "mean_microbatches_per_step": 2,
        "peak_memory": 2**34,
        "fill": 1.0,
    }


def _lines(parts: dict[str, Any]) -> list[str]:
    """The report's Markdown, line by line."""
    markdown = tool("report.text").markdown
    return markdown(parts, dict.fromkeys(parts, "Title"), dry_run=False).splitlines()


def test_figures_meet_their_goals_or_do_not():
    data = {
        "pairs_per_step": 96,
        "token_ratio": 1.5,
        "row_ratio": 1.56,
        "shared_over_paired": {"minimum": 1.47, "median": 1.5, "maximum": 1.53},
        "variants": {
            "shared+flex": {**variant(70), "steps": 1},  # slower than the other in the same step
            "shared+varlen": variant(60),
            "paired+a": variant(40),
        },
        "failed": {"paired+b": "out of memory"},
    }
    done = {"status": "done", "seconds": 3.0}
    way = {"layers": 32, "tokens": 4096, "recompute": "full", "optimizer_on_host": True}
    parts = {
        "layouts": {**done, "data": {"hh_rlhf": data}, "missing": {}},
        "whole_model": {**done, **way, "data": {"hh_rlhf": data}},
        "host": {
            "status": "failed",
            "error": "it hung",
            "share_of_data": 0.02,
            "last_output": ["step 3", "```"],
        },
    }
    lines = _lines(parts)
    name = "shared over paired, hh_rlhf"
    assert f"| {name} |  | > 1.41 | 1.50 (1.47 to 1.53) | yes |" in lines
    assert f"| {name}, over tokens' |  | >= 0.97 | 1.000 (0.980 to 1.020) | yes |" in lines
    rows = "rows of paired over shared, hh_rlhf, over tokens'"
    assert f"| {rows} |  | 0.98 to 1.02 | 1.040 | **no** |" in lines
    # 60 pairs/s with their prompts shared, by the backend that ran all steps.
    way = "32 layers, rows of 4096, recompute full, optimizer state on the host"
    title = f"whole step, bf16, {way}, linear TFLOP/s"
    assert f"| {title} | 520 to 545 | > 545 | 600 (540 to 660) | yes |" in lines
    name, here = "pairs/s, hh_rlhf, shared packed", "60.0 (60.0 to 66.0)"
    assert f"| {name} | 41.7 | >= 43 | {here} | yes |" in lines
    assert "| hh_rlhf over TRL's 10.8 pairs/s |  | >= 4 | 5.6 | yes |" in lines
    assert "| host work before a step |  | <= 1% | 2.00% | **no** |" in lines
    assert "| shared over paired, tldr |  | > 1.35 | not found | |" in lines
    assert "| Title | failed: it hung | 0 |" in lines
    assert "| hh_rlhf | paired+b | out of memory | | | | |" in lines
    assert "| hh_rlhf | shared+varlen | 5 | 60.0 (60.0 to 66.0) | 600 (540 to 660)" in "".join(
        lines
    )
    place = lines.index("Last output of part host, which failed:")
    assert lines[place + 1 : place + 4] == ["", "    step 3", "    ```"]
    # No line on what was not asked for.
    assert not any(line.startswith(("| mean loss", "| tests", "| bf16")) for line in lines)


def test_other_stacks_stand_beside_ours():
    here = {"pairs_per_step": 96, "variants": {"shared+a": variant(60)}, "failed": {}}
    gpu = {"sm_mhz": {"minimum": 1500, "median": 1600, "maximum": 1980}}
    there = {"variants": {"shared+flex": variant(50)}, "failed": {}, "gpu": gpu}
    bare = {"recompute": "none", "attention": "flex", "sdpa": [], "data": {"hh_rlhf": there}}
    trl = {"version": "1.16.0", "pairs_per_second": 12.0, "extremes": [11.0, 13.0]}
    slow, fast, theirs = (
        {"ms_per_step": ms, "tokens_per_second": 1.0, "prefill_seconds": 0.1}
        for ms in (15.0, 10.0, 25.0)
    )
    ways: dict[str, Any] = {"ours, eager": slow, "ours, graphs": fast, "transformers": theirs}
    ways["transformers, static cache"] = {"error": "no compiler"}
    done = {"status": "done", "seconds": 3.0, "counts": {"model": "7B", "counted": "FLOPs"}}
    parts = {
        "whole_model": {**done, "data": {"hh_rlhf": here}, "bare": bare, "trl": trl},
        "generation": {
            **done,
            "layers": 32,
            "sequences": {"32": ways, "64": {"ours, eager": slow}},
        },
    }
    lines = _lines(parts)
    # Bare PyTorch has no paired variant.
    assert "| ours over bare PyTorch, hh_rlhf, shared packed |  |  | 1.20 |  |" in lines
    assert "| pairs/s of bare PyTorch, hh_rlhf, paired packed |  |  | not found | |" in lines
    assert "| shared over TRL 1.16.0, hh_rlhf |  | >= 4 | 5.0 | yes |" in lines
    assert "Attention: flex; SDPA kernels in a profile: none." in lines
    assert "hh_rlhf: sm_mhz 1600 (1500 to 1980)" in lines
    step = "decode step, 32 layers"
    assert f"| {step}, 32 sequences, ms |  | <= 11 | 10.00 | yes |" in lines
    assert f"| {step}, 32 sequences, transformers over ours |  |  | 2.50 |  |" in lines
    assert f"| {step}, 64 sequences, ms |  |  | 15.00 |  |" in lines
    assert "| 32 | transformers, static cache | no compiler | | |" in lines
    assert "| Title | 7B |  | hh_rlhf 96 |  | FLOPs |" in lines
