"""The fastest attention is one of those that work, and what does not work is left out and said."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from puzzle_align.config.load import find_config, load_file, load_job
from puzzle_align.config.saved import Manifest, Saved
from puzzle_align.layout.model import AttentionBackend, ModelOptions
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.profiler import attention as measured
from puzzle_align.runtime.profiler.attention import (
    AttentionCase,
    fastest_attention,
    measure_attention,
)
from puzzle_align.stages import engine as settling
from puzzle_align.stages.engine import (
    Engine,
    attention_case,
    row_of_data,
    settle_attention,
    still_available,
)
from puzzle_align.stages.resuming import attention_of
from puzzle_align.stages.saving import job_metadata
from tests.dist.spawn import run_ranks
from tests.jobs import job_plan, resolved
from tests.unit.test_check import SOUND

CPU = torch.device("cpu")
NO_FILES = Manifest(1, "", {})
CASE = AttentionCase(
    layout=RowLayout(96, (Segment(0, 20, (9, 14)), Segment(50, 3, (8, 8)))),
    num_heads=4,
    num_groups=2,
    head_dim=8,
    dtype=torch.float32,
)
ON_CPU: tuple[AttentionBackend, ...] = ("segments", "dense", "varlen")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_of_the_cpu_is_timed(dtype: torch.dtype) -> None:
    times = measure_attention(replace(CASE, dtype=dtype), ON_CPU, CPU)
    assert list(times) == list(ON_CPU)
    for time in times.values():
        assert time.left_out is None and 0 < time.seconds < 60


def test_one_that_fails_is_left_out() -> None:
    times = measure_attention(CASE, ["flex", "varlen"], CPU)  # flex has no backward here
    assert times["varlen"].left_out is None
    assert math.isinf(times["flex"].seconds)
    reason = times["flex"].left_out or ""
    assert reason.startswith("NotImplementedError: ") and "\n" not in reason


def test_one_with_other_numbers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measured._TOLERANCE, torch.float32, 0.0)
    times = measure_attention(CASE, ["segments", "dense"], CPU)
    assert times["segments"].left_out is None
    assert "its numbers differ by" in (times["dense"].left_out or "")
    assert (times["dense"].left_out or "").endswith("from those of segments")


def test_all_ranks_take_the_same() -> None:
    first, second = run_ranks(_choose, 2, ["flex", "varlen", "segments"])
    assert first[0] == second[0] and first[0] in ("varlen", "segments")
    warning, choice = first[1]
    assert not second[1], "one rank writes the lines"
    assert warning.startswith("attention: flex is left out: NotImplementedError")
    assert f"over 96 tokens: {first[0]} is taken" in choice and "flex" not in choice


def test_where_none_works_the_error_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"ValueError: engine.attention=auto: no backend works"):
        run_ranks(_choose, 1, ["flex"])


def test_one_that_a_rank_has_not_is_left_out() -> None:
    for backends in (["dense"], ["dense", "segments"]), (["segments", "dense"], ["dense"]):
        first, second = run_ranks(_choose_of_rank, 2, backends)
        assert first[0] == second[0] == "dense"
        assert "attention: segments is left out: it is not available on every rank" in first[1]


def _choose_of_rank(
    rank: int, world_size: int, backends: list[list[AttentionBackend]]
) -> tuple[AttentionBackend, list[str]]:
    return _choose(rank, world_size, backends[rank])


def test_a_resumed_run_goes_on_with_its_attention() -> None:
    for kept, expected, line in (
        (None, None, None),
        (
            "segments",
            "segments",
            "attention: using segments again, which the checkpoint's run used",
        ),
        ("varlen", None, "attention: the job was saved with varlen, which does not work here (it"),
    ):
        (first, lines), (second, nothing) = run_ranks(_keep, 2, kept)
        assert first == second == expected and not nothing
        assert len(lines) == (line is not None) and all(text.startswith(line) for text in lines)


def _keep(
    rank: int, world_size: int, kept: AttentionBackend | None
) -> tuple[AttentionBackend | None, list[str]]:
    """On CUDA, in float32, of which varlen has no kernels there: that is asked without a device."""
    engine, records = Engine("cuda", ModelOptions(dtype="fp32")), _records()
    return still_available(kept, engine, World(rank, world_size, CPU)), records


def test_a_checkpoint_names_the_attention_of_cuda_alone(tmp_path: Path) -> None:
    job = load_job(SOUND)
    trainer: Any = SimpleNamespace(
        plan=job_plan(job, ModelOptions(attention="flex"), 1),
        data_fingerprint="",
        stop_token_ids=(),
        num_skipped=0,
        state_dict=dict,
        models={},
    )
    saved = [job_metadata(job, trainer, torch.device(device), {}) for device in ("cuda", "cpu")]
    for of_optimizers, expected in ((True, ["flex", None]), (False, [None, None])):
        models = {"actor": {"has_optimizer": of_optimizers}}
        assert [
            attention_of(Saved(tmp_path, 1, models, record, NO_FILES)) for record in saved
        ] == expected
    assert attention_of(Saved(tmp_path, 1, {}, {}, NO_FILES)) is None  # an older one


def _choose(
    rank: int, world_size: int, backends: list[AttentionBackend]
) -> tuple[AttentionBackend, list[str]]:
    records = _records()
    return fastest_attention(CASE, backends, World(rank, world_size, CPU)), records


def _records() -> list[str]:
    """Lines that are logged in this process from now on."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("puzzle_align")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return records


def test_the_case_has_a_tensor_ranks_heads() -> None:
    job = load_job(SOUND, ["actor.parallel.tensor_model_parallel_size=2"])
    case = attention_case(job_plan(job, ModelOptions(dtype="bf16"), 2), CASE.layout)
    assert (case.num_heads, case.num_groups) == (2, 1)
    assert case.dtype == torch.bfloat16 and case.layout == CASE.layout


@pytest.mark.parametrize(
    ("name", "together", "overrides"),
    [
        ("dpo_tiny", 2, ["data.synthetic_length=24"]),
        ("kto_tiny", 1, ["data.synthetic_length=24"]),
        (
            "ppo_tiny",
            4,
            ["data.synthetic_length=40", "data.max_length=64", "packing.row_tokens=4096"],
        ),
    ],
)
def test_the_row_is_one_of_the_jobs_data(
    name: str, together: int, overrides: list[str], tmp_path: Path
) -> None:
    """Its examples differ, as the data's do: many lengths cost other time than one."""
    own = [f"output_dir={tmp_path}", "data.num_synthetic=64", *overrides]
    job = resolved(load_file(find_config(name), own))
    layout = row_of_data(job)
    assert layout.num_tokens <= job.config.packing.row_tokens
    assert {len(segment.response_lengths) for segment in layout.segments} == {together}
    assert len({segment.end - segment.start for segment in layout.segments}) > 1


def test_on_cuda_auto_measures_that_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved(load_file(find_config("dpo_tiny"), [f"output_dir={tmp_path}"]))
    job = replace(job, engine=replace(job.engine, device="cuda"))
    cases: list[AttentionCase] = []

    def fastest(case: AttentionCase, *_: object) -> AttentionBackend:
        cases.append(case)
        return "dense"

    monkeypatch.setattr(settling, "use_flash_attention", lambda wanted, device: "fa2")
    monkeypatch.setattr(settling, "from_rank_zero", lambda make: make())
    monkeypatch.setattr(settling, "fastest_attention", fastest)
    settle_attention(job, World(0, 1, CPU))
    assert [case.layout for case in cases] == [row_of_data(job)]


def test_without_data_the_row_is_of_equal_examples(tmp_path: Path) -> None:
    own = ["data.format=auto", f"data.train={tmp_path}/none.jsonl", f"output_dir={tmp_path}"]
    job = resolved(load_file(find_config("dpo_tiny"), own))
    layout = row_of_data(job)
    assert layout.num_tokens == layout.segments[-1].end == job.config.packing.row_tokens
    assert all(len(segment.response_lengths) == 2 for segment in layout.segments)


@pytest.mark.parametrize("attention", ["auto", "varlen"])
def test_on_cpu_nothing_is_measured(attention: str) -> None:
    """There is not even a process group here."""
    config = load_job(SOUND, ["engine.device=cpu", f"engine.attention={attention}"])
    job = resolved(config)
    assert settle_attention(job, World(0, 1, CPU)) is job
    assert job.engine.options.attention == {"auto": "segments"}.get(attention, attention)


@pytest.mark.parametrize(
    ("overrides", "kept", "fastest", "chosen", "flash", "measured"),
    [
        ([], None, "varlen", "varlen", ["fa3"], [["flex", "segments", "varlen"]]),
        ([], None, "flex", "flex", ["fa3", "fa2"], [["flex", "segments", "varlen"]]),
        (["engine.dtype=fp32"], None, "flex", "flex", ["fa3", "fa2"], [["flex", "segments"]]),
        ([], "segments", "flex", "segments", ["fa3"], []),
        (["engine.attention=varlen"], "segments", "flex", "varlen", ["fa3"], []),
        (["engine.attention=flex"], "segments", "varlen", "flex", [], []),
    ],
)
def test_on_cuda_attention_is_measured_unless_it_is_named_or_kept(
    overrides: list[str],
    kept: str | None,
    fastest: str,
    chosen: str,
    flash: list[str],
    measured: list[list[str]],
) -> None:
    """And a newer FlashAttention stays only with what computes through it."""
    found = run_ranks(_settle, 1, overrides, kept, fastest)
    assert found == [((chosen, chosen), flash, measured)]


def _settle(
    rank: int, world_size: int, overrides: list[str], kept: str | None, fastest: str
) -> tuple[tuple[str, str], list[str], list[list[str]]]:
    """Attention of a job for CUDA, FlashAttentions asked for, and backends "measured"."""
    flash: list[str] = []
    measured: list[list[str]] = []

    def use(wanted: str, _device: torch.device) -> str:
        flash.append(wanted)
        return wanted

    def choose(_case: AttentionCase, backends: list[str], _world: World) -> str:
        measured.append([name for name in backends if name != "flex_flash"])  # not always installed
        return fastest

    settling.use_flash_attention, settling.fastest_attention = use, choose
    given = ["engine.device=cuda", "engine.flash_attention=fa3", *overrides]
    job = resolved(load_job(SOUND, given), elsewhere=True)
    settled = settle_attention(job, World(rank, world_size, CPU), kept)
    of_actor = settled.plan.models["actor"].options.attention
    return (settled.engine.options.attention, of_actor), flash, measured
