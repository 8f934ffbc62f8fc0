"""A GPU report's sizes, limits and tolerances, without running its parts."""

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from puzzle_align.config.sections.data import SYNTHETIC_LENGTHS
from puzzle_align.layout.flops import flops_per_token
from puzzle_align.layout.model import ModelOptions, ModelSpec
from tests.unit.planner_spaces import tool


def test_a_comparison_takes_8_rows_and_5_steps_at_least() -> None:
    full = tool("report.setting").FULL
    assert full.rows >= 8 and full.steps >= 5


@pytest.mark.parametrize("warmup", [1, 0])
@pytest.mark.parametrize("data", SYNTHETIC_LENGTHS)
def test_rows_of_both_layouts_are_as_their_tokens_within_2_percent(data: str, warmup: int) -> None:
    """By the loader's own rows, at the sizes of the full report, with and without a warm-up."""
    setting, compare = tool("report.setting"), tool("report.compare")
    full = replace(setting.FULL, warmup=warmup)
    pairs = compare.pairs_to_compare(full, data)
    dataset = setting.open_dataset(full, data, full.warmup + full.steps, pairs)
    rows, row_tokens, tokens = {}, {}, {}
    for layout in compare.LAYOUTS:
        loader = setting.make_loader(dataset, layout, True, full.tokens, pairs, setting.ALONE)
        batches = [loader.batch(step) for step in range(warmup, warmup + full.steps)]
        rows[layout] = [len(batch.microbatches) for batch in batches]
        row_tokens[layout] = sum(batch.num_row_tokens for batch in batches)
        tokens[layout] = sum(batch.num_tokens for batch in batches)
    assert min(rows["shared"]) >= 8
    row_ratio = row_tokens["paired"] / row_tokens["shared"]
    token_ratio = tokens["paired"] / tokens["shared"]
    assert row_ratio == pytest.approx(token_ratio, rel=0.02)
    sizes = compare.step_sizes(full, data, pairs)
    assert (sizes.row_ratio, sizes.token_ratio) == pytest.approx((row_ratio, token_ratio))


def test_a_dry_run_refuses_rows_that_differ_by_more_than_2_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting, compare, steps = (tool(f"report.{name}") for name in ("setting", "compare", "steps"))
    compare.check_rows(setting.FULL)
    monkeypatch.setattr(compare, "pairs_to_compare", compare.pairs_of_a_step)
    reason = r"^capybara: paired over shared row tokens [+-]\d+\.\d% off the tokens'$"
    with pytest.raises(RuntimeError, match=reason):
        steps.layouts(setting.DRY, lambda results: None)


def test_a_comparison_takes_the_fewest_pairs_whose_rows_are_even_and_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full, compare = tool("report.setting").FULL, tool("report.compare")

    def sizes(setting: object, data: str, pairs: int) -> SimpleNamespace:
        rows = np.array([[8, 8 if pairs >= 95 else 7], [9, 9]])
        return SimpleNamespace(rows=rows, unevenness=0.01 if pairs < 95 or pairs >= 110 else 0.02)

    def opened(setting: object, data: str, num_steps: int, pairs: int) -> None:
        raise LookupError(f"{pairs} pairs")

    monkeypatch.setattr(compare, "pairs_of_a_step", lambda setting, data: 90)
    monkeypatch.setattr(compare, "step_sizes", sizes)
    monkeypatch.setattr(compare, "open_dataset", opened)
    with pytest.raises(LookupError, match="110 pairs"):
        compare.compare(full, None, "tldr", ["flex"])


def test_a_variant_has_median_and_extremes_of_used_tokens() -> None:
    steps, spec = tool("dpo_steps"), tool("report.setting").DRY.spec
    taken = [
        steps.Step(dict.fromkeys(steps.PHASES, seconds), 12, 100, 128, 1, 0)
        for seconds in (0.5, 0.25, 1.0)
    ]
    found = steps.summarize(taken, spec, 1)
    assert found["pairs_per_second"] == 6 and found["used_tokens_per_second"] == 50
    tflop = 4 * flops_per_token(spec) * 100 / 1e12  # of a step
    assert found["linear_tflops"]["step"] == pytest.approx(tflop / 2)
    assert found["extremes"]["pairs_per_second"] == [3, 12]
    assert found["extremes"]["linear_tflops"] == pytest.approx([tflop / 4, tflop])


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [(150, ("none", 8192, False)), (141, ("none", 4096, False)), (85, ("full", 8192, True))],
)
def test_all_32_layers_are_measured(gigabytes: int, expected: tuple[str, int, bool]) -> None:
    """On an H200, and on an H100 with recompute and the optimizer's state on the host."""
    steps, full = tool("report.steps"), tool("report.setting").FULL
    assert full.spec.num_hidden_layers == 32
    options = ModelOptions(dtype="bf16", attention="flex")
    way = steps.first_that_fits(full, options, 0.94e9 * gigabytes)
    assert (way.recompute, way.tokens, way.optimizer.cpu_offload) == expected
    with pytest.raises(RuntimeError, match=r"the whole model needs \d+ GB, and 38 are there"):
        steps.first_that_fits(full, options, 0.94e9 * 40)


def test_fewer_steps_and_data_sets_may_be_asked_for() -> None:
    setting = tool("report.setting")
    chosen = setting.chosen(setting.FULL, 2, ["tldr"])
    assert (chosen.steps, chosen.layout_data, chosen.whole_data) == (2, ("tldr",), ("tldr",))
    assert setting.chosen(setting.FULL, None, None) == setting.FULL


def test_only_the_fastest_variant_of_each_layout_goes_on() -> None:
    seconds = {"shared+flex": 2.0, "shared+varlen": 1.0, "paired+flex": 3.0, "paired+varlen": 4.0}
    measured = {name: [SimpleNamespace(seconds=each)] for name, each in seconds.items()}
    running = tool("report.compare")._fastest_by_layout(measured, list(seconds))
    assert running == ["shared+varlen", "paired+flex"]


def _chosen(*arguments: str) -> list[dict[str, float]]:
    report = tool("gpu_report")
    return report.limits_by_call(report.parse_arguments(list(arguments)))


def test_every_call_has_time_for_all_of_its_parts() -> None:
    report = tool("gpu_report")
    for call in report.CALLS:
        (limits,) = _chosen("--calls", call)
        assert sum(limits.values()) + report.START <= 60 * report.MINUTES < 600


def test_tests_run_first_and_in_a_call_of_their_own() -> None:
    first, *others = _chosen()
    assert list(first) == ["environment", "tests"]
    assert sum(map(len, others)) + len(first) == len(tool("gpu_report").PARTS)
    assert list(_chosen("--calls", "whole")[0]) == ["environment", "whole_model"]
    assert [list(limits) for limits in _chosen("--parts", "host", "layouts")] == [
        ["layouts"],
        ["host"],
    ]


def test_without_pytest_the_tests_part_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tool("report.runs")
    monkeypatch.setattr(runs, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pytest is not installed, so no test ran"):
        runs.tests(argparse.Namespace(), lambda results: None)


def test_trainings_are_the_first_tests_of_the_gpu(tmp_path: Path) -> None:
    for name, text in (("dist/test_a", "gpu"), ("unit/test_b", "slow"), ("e2e/test_c", "gpu")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.py").write_text(f"pytestmark = pytest.mark.{text}")
    chosen = tool("report.runs").gpu_tests(tmp_path, "test_*.py")
    assert [Path(file).stem for file in chosen] == ["test_c", "test_a"]


def test_clock_and_power_are_read_while_a_block_runs(tmp_path: Path) -> None:
    watch, printed = tool("report.watch"), tmp_path / "printed"
    lines = ["1500, 300.5", "[N/A], 2", "1980, 650.25", "1600, 310"]
    query = ["sh", "-c", f"echo '{chr(10).join(lines)}'; touch {printed}; exec sleep 60"]
    with watch.watched(query) as spreads:
        while not printed.exists():
            time.sleep(0.01)
    assert spreads["sm_mhz"] == {"minimum": 1500, "median": 1600, "maximum": 1980}
    assert spreads["watts"] == {"minimum": 300.5, "median": 310, "maximum": 650.25}
    with watch.watched(watch.gpu_query("cpu")) as nothing:
        pass
    assert nothing == {}


@pytest.mark.parametrize(
    ("backend", "name"),
    [("FLASH_ATTENTION", "flash_attention_for_cpu"), ("MATH", "attention_math")],
)
def test_the_attention_kernel_that_ran_is_named(backend: str, name: str) -> None:
    q = torch.ones(1, 2, 8, 16)

    def work() -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            scaled_dot_product_attention(q, q, q)

    assert tool("report.watch").sdpa_kernels(work) == [name]


def test_counts_follow_the_setting_and_cover_every_part() -> None:
    counts_of, full = tool("report.counts").counts_of, tool("report.setting").FULL
    whole = counts_of(full)["whole_model"]
    assert whole.model == "policy and reference, each 32 layers, 7.24e9 parameters"
    # 2 FLOPs for each weight of 32 layers' matrices, 218,103,808 a layer.
    assert "4 x forward of the layers' matrices (13.96 GFLOP)" in whole.counted
    counts = counts_of(
        replace(full, few_layers=3, steps=7, varied_batches=11, sequences=(2, 5), matrix=1000)
    )
    assert counts.keys() == tool("gpu_report").PARTS.keys()
    assert "3 layers" in counts["layouts"].model
    assert "3 x forward" in counts["layers"].counted
    assert "7 steps" in counts["whole_model"].data
    assert "11 steps" in counts["host"].data
    assert "2, 5 prompts of 512 tokens, each 128 new tokens" in counts["generation"].data
    assert "2 GFLOP" in counts["ceilings"].counted


def test_a_small_loss_is_compared_by_an_absolute_tolerance() -> None:
    difference = tool("report.runs")._difference
    learnt = difference([0.7, 0.002, 0.001, 0.001], [0.7, 0.004, 0.003, 0.002])
    assert learnt["last"]["difference"] == pytest.approx(0.001)  # twice the loss, yet little
    assert learnt["last"]["tolerance"] == 0.005
    high = difference([2.0, 2.0], [2.03, 2.03])["all"]
    assert (high["difference"], high["tolerance"]) == pytest.approx((0.03, 0.02))


def test_losses_are_by_the_attention_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    full, runs, commands = tool("report.setting").FULL, tool("report.runs"), []
    ended = SimpleNamespace(returncode=1, stdout="", stderr="")
    monkeypatch.setattr(
        runs.subprocess, "run", lambda command, **named: commands.append(command) or ended
    )
    with pytest.raises(RuntimeError, match=r"training with \('x=1',\) ended with 1"):
        runs._losses(full, ("x=1",))
    assert {"engine.attention=flex", "x=1", "max_steps=200"} <= {*commands[0]}


def test_both_stacks_generate_by_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    dry, generation = tool("report.setting").DRY, tool("report.generation")
    monkeypatch.setattr(
        generation, "world", lambda device: SimpleNamespace(device=torch.device(device))
    )
    assert dry.few_layers < dry.spec.num_hidden_layers
    theirs = generation.transformers_model(dry)
    assert theirs.config.num_hidden_layers == dry.spec.num_hidden_layers

    def made(role: str, spec: ModelSpec, *_: object, **__: object) -> None:
        raise LookupError(spec)

    monkeypatch.setattr(generation, "random_model", made)
    with pytest.raises(LookupError) as found:
        next(generation._ours(dry, lambda results: None))
    assert found.value.args == (dry.spec,)


def test_steps_and_generation_have_clock_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    dry, compare, generation = map(tool, ("report.setting", "report.compare", "report.generation"))
    figures, saved = {"watts": {"median": 700.0}}, {}
    for module in (compare, generation):
        monkeypatch.setattr(module, "watched", lambda query: nullcontext(figures))
    turns = compare._Turns(dry.DRY, None, {}, {})
    turns.run(2)
    for stack in ("_ours", "_theirs"):
        monkeypatch.setattr(generation, stack, lambda setting, save: ())
    generation.generation(dry.DRY, saved.update)
    assert turns.gpu == saved["gpu"] == figures
