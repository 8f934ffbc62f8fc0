"""Records, resume, progress and summary of a run."""

import importlib.machinery
import json
import math
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.config.sections.output import TelemetryConfig
from puzzle_align.telemetry import Sample, StepStats, Telemetry, text
from puzzle_align.telemetry.sinks import JsonlSink, TensorBoardSink
from tests.metrics import records
from tests.refusals import refusal

PLAIN = TelemetryConfig(tensorboard=False)


def _open(
    folder: Path, config: TelemetryConfig = PLAIN, rank: int = 0, resumed: int | None = None
) -> Telemetry:
    return Telemetry(
        config,
        output_dir=folder,
        rank=rank,
        world_size=2,
        device=torch.device("cpu"),
        num_steps=6,
        resumed_step=resumed,
        settings={"seed": 1},
    )


def _train(telemetry: Telemetry, steps: range) -> None:
    for step in steps:
        telemetry.log(step, {"loss": 1 / (3 + step)}, StepStats())
        if step % 2 == 0:
            telemetry.eval(step, {"loss": 1 / (7 + step), "rewards/accuracies": step / 10})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_bitwise(tmp_path_factory, value: float):
    folder = tmp_path_factory.mktemp("bits")
    sink = JsonlSink(folder / "metrics.jsonl", None)
    sink.write(1, {"loss": value})
    sink.close()
    assert records(folder)[0]["loss"].hex() == value.hex()


def test_what_is_not_finite_is_null(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    sink.write(1, {"loss": math.nan, "grad_norm": math.inf})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": null, "grad_norm": null}\n'  # flushed, though not closed
    )
    sink.close()


def test_a_reward_s_own_step_is_not_the_run_s(tmp_path):
    """``log_metric("step", ...)``: the file could not be read, and the run not be resumed."""
    JsonlSink(tmp_path / "metrics.jsonl", None).write(3, {"loss": 0.5, "step": 1.5})
    assert records(tmp_path) == [{"step": 3, "loss": 0.5}]


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', "{", '{"step": 5, "loss": 0.5}'])
@pytest.mark.parametrize("killed_at", [2, 3, 5])
def test_a_resumed_file_is_that_of_an_undisturbed_run(tmp_path, torn, killed_at):
    undisturbed, resumed = tmp_path / "whole", tmp_path / "resumed"
    telemetry = _open(undisturbed)
    telemetry.eval(0, {"loss": 0.7, "rewards/accuracies": 0.5})
    _train(telemetry, range(1, 7))

    telemetry = _open(resumed)
    telemetry.eval(0, {"loss": 0.7, "rewards/accuracies": 0.5})
    _train(telemetry, range(1, killed_at + 1))
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(torn)
    _train(_open(resumed, resumed=2), range(3, 7))
    whole = (undisturbed / "metrics.jsonl").read_bytes()
    assert (resumed / "metrics.jsonl").read_bytes() == whole


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    _train(_open(tmp_path), range(1, 4))
    _train(_open(tmp_path), range(1, 2))
    assert [record["step"] for record in records(tmp_path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("bad", ["not json", "[1]", '{"loss": 1.0}', '{"step": "1"}'])
def test_a_foreign_line_is_named(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n')
    line = refusal(lambda: _open(tmp_path, resumed=2))
    assert re.search(r"metrics\.jsonl:2: not a record .*remove the line", line)


def test_log_every_keeps_first_last_and_multiples(tmp_path):
    telemetry = _open(tmp_path, TelemetryConfig(tensorboard=False, log_every=4))
    for step in range(1, 7):
        telemetry.log(step, {"loss": 0.5}, StepStats())
    assert [record["step"] for record in records(tmp_path)] == [1, 4, 6]


def test_records_carry_rates_that_no_metric_replaces(tmp_path):
    telemetry = _open(tmp_path, TelemetryConfig(tensorboard=False, peak_tflops=1e-9))
    stats = StepStats(seconds=0.5, num_pairs=4, num_tokens=60, num_row_tokens=80, num_flops=400.0)
    telemetry.log(1, {"loss": 0.5}, stats)
    telemetry.log(2, {"loss": 0.5, "peak_memory": 7, "step_time": 7.0}, stats)
    first, second = records(tmp_path)
    assert first.pop("peak_memory") > 2**20
    assert first == {
        "step": 1,
        "pairs_per_second": 8.0,
        "tokens_per_second": 120.0,
        "step_time": 0.5,
        "fill": 0.75,
        "mfu": pytest.approx(0.4),  # 800 FLOP/s on two devices of 1000
        "loss": 0.5,
    }
    assert second["peak_memory"] > 2**20 and second["step_time"] == 0.5


def test_evaluation_metrics_have_a_prefix_that_is_not_shown(tmp_path, capfd):
    _open(tmp_path).eval(0, {"loss": 0.7, "rewards/accuracies": 0.5})
    assert records(tmp_path) == [{"step": 0, "eval_loss": 0.7, "eval_rewards/accuracies": 0.5}]
    shown = "eval at step 0: loss 0.7000 rewards/accuracies 0.50\n"
    assert capfd.readouterr().err == shown


def test_other_ranks_write_and_say_nothing(tmp_path, capfd):
    telemetry = _open(tmp_path, TelemetryConfig(), rank=1)
    _train(telemetry, range(1, 4))
    telemetry.close([("skipped steps", "0")])
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


SAMPLES = [
    Sample("a\nlong prompt that is cut " * 2 + "kdRbq:", "é\x1b|", 0.5),
    Sample("p", "", math.inf),
    Sample("<|user|>Sky?<|end|><|assistant|>", "Blue.", 1.0, prompt_end="Sky?"),
]


def test_samples_are_kept_whole_and_shown_short(tmp_path, capfd):
    _open(tmp_path).log_samples(3, SAMPLES)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    first = {"step": 3, "prompt": SAMPLES[0].prompt, "response": "é\x1b|", "score": 0.5}
    second = {"step": 3, "prompt": "p", "response": "", "score": None}
    last = {"step": 3, "prompt": SAMPLES[2].prompt, "response": "Blue.", "score": 1.0}
    assert [json.loads(line) for line in lines] == [first, second, last]
    assert capfd.readouterr().err == (
        "samples at step 3: score, prompt, response\n"
        "  0.5000  ...ng prompt that is cut kdRbq:'  'é\\x1b|'\n"
        "  inf     'p'                               ''\n"
        "  1.0000  'Sky?'                            'Blue.'\n"
    )


def test_samples_after_the_resumed_step_are_cut_off(tmp_path):
    for resumed, steps, kept in ((None, (1, 2, 3), [1, 2, 3]), (2, (3, 4), [1, 2, 3, 4])):
        telemetry = _open(tmp_path, resumed=resumed)
        for step in steps:
            telemetry.log_samples(step, SAMPLES)
        lines = (tmp_path / "samples.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [s for s in kept for _ in SAMPLES]
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 4, "pro')
    _open(tmp_path, resumed=1)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(SAMPLES)
    _open(tmp_path)
    assert not (tmp_path / "samples.jsonl").exists()


def test_samples_in_tensorboard(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path, None)
    sink.write_samples(7, SAMPLES)
    sink.close()
    found = accumulators.EventAccumulator(str(tmp_path)).Reload()
    (tag,) = found.Tags()["tensors"]
    (event,) = found.Tensors(tag)
    shown = event.tensor_proto.string_val[0].decode()
    assert tag.startswith("train/samples") and event.step == 7
    assert "**score 0.5000**" in shown and "\n    long prompt" in shown and "kdRbq:" in shown


def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoardSink(tmp_path, None)
    for step in range(1, 6):
        first.write(step, {"loss": float(step), "eval_loss": 0.5})
    time.sleep(1.01 - time.time() % 1)  # files are ordered by the second they were made in
    second = TensorBoardSink(tmp_path, 3)
    second.write(4, {"loss": 40.0})
    second.close()
    found = accumulators.EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == {"train/loss", "eval/loss"}
    curve = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert curve == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


class _FakeWandb(types.ModuleType):
    """Records what a run is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.inits: list[dict] = []
        self.logged: list[dict] = []
        self.axes: dict[str, str | None] = {}
        self.finished: list[str] = []

    def init(self, **settings) -> types.SimpleNamespace:
        self.inits.append(settings)
        name = settings["id"] or f"run{len(self.inits)}"
        return types.SimpleNamespace(
            id=name,
            define_metric=lambda name, step_metric=None: self.axes.update({name: step_metric}),
            log=self.logged.append,
            finish=lambda: self.finished.append(name),
        )

    def Table(self, *, allow_mixed_types: bool = False, **content) -> dict:
        for column in zip(*content["data"], strict=True):
            if len({type(value) for value in column} - {type(None)}) > 1 and not allow_mixed_types:
                raise TypeError("Data row contained incompatible types")
        return content


def test_wandb_run_goes_on_after_a_resume(tmp_path, monkeypatch):
    fake = _FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TelemetryConfig(tensorboard=False, wandb_project="p")
    telemetry = _open(tmp_path, config)
    telemetry.log(1, {"loss": 0.5}, StepStats())
    telemetry.eval(1, {"loss": 0.6})
    telemetry.log_samples(1, SAMPLES[1:2])
    telemetry.close()
    _open(tmp_path, config, resumed=1).close()
    _open(tmp_path, config).close()
    _open(tmp_path / "run", config, resumed=1).close()  # W&B was not there before
    table = {"columns": ["prompt", "response", "score"], "data": [["p", "", math.inf]]}
    assert fake.logged[0].pop("train/peak_memory") > 0
    assert fake.logged == [
        {"step": 1, "train/loss": 0.5},
        {"step": 1, "eval/loss": 0.6},
        {"step": 1, "train/samples": table},
    ]
    assert [(run["id"], run["resume"]) for run in fake.inits] == [
        (None, None),
        ("run1", "allow"),
        (None, None),
        (None, None),
    ]
    assert fake.inits[0]["project"] == "p" and fake.inits[0]["config"] == {"seed": 1}
    assert [run["dir"] for run in fake.inits] == [*[str(tmp_path)] * 3, str(tmp_path / "run")]
    assert fake.axes == {"step": None, "*": "step"}
    assert fake.finished == ["run1", "run1", "run3", "run4"]


def test_wandb_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    fake = _FakeWandb()
    monkeypatch.setattr(fake, "init", lambda **settings: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TelemetryConfig(tensorboard=False, wandb_project="p")
    line = refusal(lambda: _open(tmp_path, config))
    assert line.startswith("telemetry.wandb_project=p: W&B does not start (division by zero); run ")


@pytest.mark.parametrize("rank", [0, 1])
def test_wandb_that_is_not_installed_is_one_line_on_every_rank(tmp_path, monkeypatch, rank):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = TelemetryConfig(wandb_project="p" * 1000)
    line = refusal(lambda: _open(tmp_path, config, rank=rank))
    assert re.search(r"telemetry\.wandb_project=p{77}\.{3}: .*pip install", line)


def test_importing_telemetry_imports_no_sink():
    code = (
        "import sys, puzzle_align.telemetry\n"
        "print({'tensorboard', 'torch.utils.tensorboard', 'wandb'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def _summary(err: str) -> dict[str, str]:
    """The rows of the summary, but for the peak memory, which no test knows."""
    lines = err.splitlines()
    rows = (line.strip().split("  ", 1) for line in lines[lines.index("summary") + 1 :])
    summary = {name: value.strip() for name, value in rows}
    assert summary.pop("peak memory").endswith("iB")
    return summary


def test_summary_of_a_ppo_run(tmp_path, capfd):
    telemetry = _open(tmp_path)
    phases = {"generate": 1.0, "score": 0.5, "learn": 0.5}
    for step in range(1, 7):
        tokens = 4000 * (1 + step % 2)
        stats = StepStats(seconds=2.0, num_responses=64, num_tokens=tokens, phases=phases)
        telemetry.log(step, {"objective/scores": step / 10, "objective/kl": step / 100}, stats)
    telemetry.close()
    assert _summary(capfd.readouterr().err) == {
        "steps": "6 of 6",
        "time": "0s",
        "scores": "0.1000 -> 0.6000",
        "kl": "0.0100 -> 0.0600",
        "responses/s": "32",
        "tokens/s": "3k",
        "tokens/s, generate": "6k",
        "phases": "generate 50.0%, score 25.0%, learn 25.0%",
    }
    assert records(tmp_path)[0]["time/score"] == 0.5


@pytest.mark.parametrize("accuracy", ["rewards/accuracies", "accuracy"])
def test_summary_of_a_resumed_run(tmp_path, capfd, accuracy):
    telemetry = _open(tmp_path)
    telemetry.eval(0, {accuracy: 0.5})
    telemetry.log(1, {"loss": 0.6931}, StepStats())
    capfd.readouterr()
    telemetry = _open(tmp_path, resumed=1)
    stats = StepStats(seconds=2.0, num_pairs=64, num_tokens=8000, num_row_tokens=10000)
    for step in range(2, 7):
        telemetry.log(step, {"loss": 0.7 - step / 100}, stats)
    telemetry.eval(6, {accuracy: 0.93})
    telemetry.close([("skipped steps", "2")])
    out, err = capfd.readouterr()
    assert out == ""
    assert _summary(err) == {
        "steps": "6 of 6",
        "time": "0s",
        "loss": "0.6931 -> 0.6400",
        "eval accuracy": "0.500 -> 0.930",
        "pairs/s": "32",
        "tokens/s": "4k",
        "fill": "80.0%",
        "skipped steps": "2",
    }


def test_durations_quantities_and_sizes():
    durations = {0: "0s", 59.4: "59s", 59.6: "1m00s", 62: "1m02s", 3661: "1h01m", 183600: "2d03h"}
    durations |= {3600: "1h00m", 86400: "1d00h"}
    assert {seconds: text.duration(seconds) for seconds in durations} == durations
    short = {35.12: "35.1", 999.6: "1k", 4100: "4.1k", 12.34e6: "12.3M", 1e9: "1G"}
    short |= {0.25: "0.25", 0: "0"}
    assert {value: text.quantity(value) for value in short} == short
    sizes = {512: "512 B", 2**10: "1.0 KiB", 3 * 2**20: "3.0 MiB", 1.5 * 2**30: "1.5 GiB"}
    sizes |= {2**40: "1.0 TiB", 2**40 - 2**20: "1024.0 GiB"}
    assert {size: text.num_bytes(size) for size in sizes} == sizes


def test_percentiles_of_lengths():
    """Each is a length that occurs, the next one up; the last is the longest."""
    assert [*text.length_lines({"prompt": np.arange(1, 201)})] == [
        "  tokens                50%      90%      99%  longest",
        "  prompt                101      181      199      200",
    ]
