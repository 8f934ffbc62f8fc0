"""tools/bench_*.py at their smallest: they run, their JSON is whole and its figures agree."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launch import ROOT, run_tool

WAYS = {"table", "rank 0", "all-gather"}
RESHARD = ("--ranks", "2", "--hidden", "64", "--layers", "2", "--repeats", "1")


def _result(tool: str, *arguments: str) -> Any:
    """What a tool measured."""
    done = run_tool(ROOT / "tools" / f"{tool}.py", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_three_ways_are_measured() -> None:
    found = _result("bench_reshard", "measured", *RESHARD)
    pairs = [(each["from"], each["to"]) for each in found]
    assert pairs[:2] == [([2, 1, 1], [1, 1, 2]), ([1, 1, 2], [1, 2, 1])]
    for each in found:
        assert each["seconds"].keys() == WAYS
        assert each["ratios"].keys() == WAYS - {"table"}
        assert all(ratio > 0 for ratio in each["ratios"].values())
        over = each["received_over_bound"]
        assert over["table"] == 1.0 <= over["all-gather"]
        assert over["rank 0"] > 1.0


def test_paper_is_at_the_bound_and_no_more_than_hybridflow_s() -> None:
    found = {each["case"]: each for each in _result("bench_reshard", "paper", "--case", "7B")}
    assert {each["ranks"] for each in found.values()} == {8, 16, 32}
    for each in found.values():
        assert each["received_gb"] == each["lower_bound_gb"]
        assert each["all_received_gb"] == each["all_lower_bound_gb"]
        assert each["hybridflow_gb"] is None or each["received_gb"] <= each["hybridflow_gb"]
    eighths = found["7B (1, 1, 8) to (1, 4, 2)"]
    assert (eighths["from"], eighths["to"]) == ("(P1, D1, T8)", "(P1, D4, T2)")
    assert eighths["hybridflow_formula_gb"] == pytest.approx(6 / 16 * eighths["model_gb"])
    assert eighths["received_gb"] == pytest.approx(eighths["hybridflow_formula_gb"], rel=1e-3)
    assert eighths["received_gb"] < eighths["hybridflow_formula_gb"]  # all ranks have the norms
    full = eighths["received_gb"] * 1e9 / 2**26  # rounds of 64 MiB, were each full
    assert full <= eighths["rounds"] < 1.2 * full
    assert eighths["declared_seconds"] == pytest.approx(eighths["received_gb"] / 200)
    table_3 = [each for each in found.values() if each["paper_seconds"] is not None]
    assert len(table_3) == 4
    assert all(each["declared_seconds"] < each["paper_seconds"] for each in table_3)


def test_ranks_share_their_node_s_adapters() -> None:
    seconds = []
    for shared in ("1", "8"):
        name = "7B (1, 1, 8) to (1, 4, 8)"  # each new rank's part is sent from another node
        asked = ("paper", "--ranks-per-adapter", shared, "--case", name)
        (case,) = _result("bench_reshard", *asked)
        assert case["inside_nodes_gb"] < 1e-3  # norms, which are too small to be cut
        seconds.append(case["declared_seconds"])
    assert 4 < seconds[1] / seconds[0] <= 8


def test_a_switch_beside_a_step_is_measured() -> None:
    small = ("--hidden", "64", "--layers", "2", "--repeats", "1", "--bucket", "4096")
    found = _result("bench_reshard_beside", *small)
    assert [(each["switch"], each["sharded"], each["dtype"]) for each in found] == [
        (switch, sharded, dtype)
        for switch, sharded in (
            ("P2 to T2", False),
            ("T2 to D2", False),
            ("rank 0 to rank 1", False),
            ("D2 sharded to T2", True),
        )
        for dtype in ("fp32", "bf16")
    ]
    for each in found:
        seconds = each["seconds"]
        assert each["step_over_switch"] == pytest.approx(seconds["step"] / seconds["switch"])
        added = (seconds["both"] - seconds["step"]) / seconds["switch"]
        assert each["rounds"] > 2 and each["added_over_switch"] == pytest.approx(added)


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


def test_a_preparation_and_the_start_after_it_are_measured(tmp_path):
    options = ("--pairs", "20000", "--num-proc", "2", "--folder", str(tmp_path))
    result = _result("bench_prepare", *options)
    case = result["2 processes"]
    assert case["workers"] == 2 and case["pairs_a_second"] > 0
    assert 20 < case["peak_mib_of_a_worker"] < 2048 and 20 < case["peak_mib"] < 2048
    assert result["start of another rank"]["gigabytes_a_second"] == 0
    assert result["start of rank 0"]["seconds"] > 0
    assert not list(tmp_path.iterdir())


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
    arguments: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.syspath_prepend(ROOT / "tools")
    main = importlib.import_module("bench_dpo").main
    assert main([*DPO[:-2], *arguments]) == 1  # threads stay this process's own
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert named in errors
