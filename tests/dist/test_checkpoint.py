"""Resuming: bit for bit on the same plan, to 1e-5 on another."""

from functools import partial
from pathlib import Path

import pytest
from megatron.core.optimizer import distrib_optimizer

from puzzle_align.config.sections.models import LoraConfig, ParallelConfig
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.runtime.optimizer import state as optimizer_state
from puzzle_align.stages.saving import Saving
from tests.bounds import LOSS_BOUND
from tests.dist.resumed_run import SAVED, Case, Numbers, job, run, run_from
from tests.dist.spawn import asked, marked, run_ranks


def plan(
    pipeline: int,
    tensor: int,
    chunks: int = 1,
    sp: bool = False,
    layers: list[int] | None = None,
) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=pipeline,
        tensor_model_parallel_size=tensor,
        virtual_pipeline_model_parallel_size=chunks,
        sequence_parallel=sp,
        pipeline_layers=layers,
    )


# By hand: a warm-up of 2, then 3 steps of a cosine to 0.
RATES = [0.005, 0.01, 0.01, 0.0075, 0.0025]
SPARED = tuple(range(SAVED))  # every step until the save: the optimizer is saved untouched
LORA = LoraConfig(r=4, lora_alpha=16.0, target_modules=["q_proj", "o_proj", "up_proj"])
Small = partial(Case, distributed_optimizer=True, state_dtype="bf16")
OnHost = partial(Case, distributed_optimizer=True, cpu_offload=True)
CASES = {
    1: [
        Case("one"),
        Case("one_tied", tied=True),
        Case("one_sharded", distributed_optimizer=True),
        Case("one_untouched", skipped=SPARED),
        Case("one_adapters", lora=LORA),
        Small("one_small"),
        Small("one_bf16_small", dtype="bf16", tied=True),
    ],
    2: [
        Case("data"),
        Case("data_sharded", distributed_optimizer=True),
        Case("data_bf16", dtype="bf16"),
        Case("data_bf16_sharded", dtype="bf16", distributed_optimizer=True),
        Case("data_bf16_untouched", dtype="bf16", skipped=SPARED),
        Case("data_sharded_untouched", skipped=SPARED, distributed_optimizer=True),
        Case("pipeline", plan(2, 1)),
        Case("pipeline_sharded", plan(2, 1), distributed_optimizer=True),
        Case("uneven", plan(2, 1, layers=[3, 1])),
        Case("uneven_sharded", plan(2, 1, layers=[1, 3]), distributed_optimizer=True),
        Case("interleaved_tied", plan(2, 1, chunks=2), tied=True),
        Case("tensor", plan(1, 2)),
        Case("sequence_tied", plan(1, 2, sp=True), tied=True),
        Small("data_small"),
        Small("data_bf16_small", dtype="bf16"),
        Small("data_bf16_small_untouched", dtype="bf16", skipped=SPARED),
        Small("pipeline_tied_small", plan(2, 1, chunks=2), tied=True, dtype="bf16"),
        Small("tensor_small", plan(1, 2)),
        Case("data_adapters", lora=LORA, distributed_optimizer=True),
        Case("pipeline_adapters", plan(2, 1), lora=LORA),
        Case("sequence_adapters", plan(1, 2, sp=True), lora=LORA, dtype="bf16", tied=True),
        OnHost("data_host"),
        OnHost("data_bf16_host", dtype="bf16"),
        OnHost("data_bf16_small_host", dtype="bf16", state_dtype="bf16"),
    ],
}
BY_NAME = {case.name: case for cases in CASES.values() for case in cases}
ACROSS = {  # saved under, resumed under
    2: [
        ("one", "data"),
        ("one", "pipeline"),
        ("one_tied", "interleaved_tied"),
        ("one_sharded", "data_sharded"),
        ("pipeline", "tensor"),
        ("data", "pipeline"),
        ("tensor", "data"),
        ("interleaved_tied", "sequence_tied"),
        ("sequence_tied", "interleaved_tied"),
        ("data_sharded", "pipeline_sharded"),
        ("pipeline_sharded", "data_sharded"),
        ("pipeline", "uneven"),
        ("uneven", "pipeline"),
        ("uneven", "tensor"),
        ("pipeline_sharded", "uneven_sharded"),
        ("uneven_sharded", "pipeline_sharded"),
        ("one_adapters", "pipeline_adapters"),
        ("one_small", "data_small"),
        ("data_small", "tensor_small"),
        ("data_host", "pipeline_sharded"),
        ("uneven_sharded", "data_host"),
    ],
    1: [
        ("tensor", "one"),
        ("pipeline_adapters", "one_adapters"),
        ("sequence_tied", "one_tied"),
        ("pipeline_sharded", "one_sharded"),
        ("uneven", "one"),
        ("tensor_small", "one_small"),
    ],
}
# Saved with state of one kind, resumed with another: whether nothing is lost by it.
KINDS = {
    ("data_sharded", "data_host"): True,
    ("data_host", "data_sharded"): True,
    ("data_bf16_sharded", "data_bf16_host"): True,
    ("data_bf16_host", "data_bf16_sharded"): True,
    ("data_bf16_small", "data_bf16_small_host"): True,
    ("data_sharded", "data_small"): False,
    ("data_small", "data_sharded"): False,
    ("data_bf16_sharded", "data_bf16_small"): False,
    ("data_bf16_small", "data_bf16_sharded"): False,
}


Pair = tuple[str, str]
FAST = {  # of the others, these have each part
    "one_untouched",
    "data_bf16",
    "data_sharded",
    "interleaved_tied",
    "sequence_tied",
    "data_bf16_small",
    "pipeline_adapters",
    "data_host",
    ("pipeline", "uneven"),
    ("sequence_tied", "interleaved_tied"),
    ("data_host", "pipeline_sharded"),
    ("pipeline_adapters", "one_adapters"),
    ("data_sharded", "data_host"),
    ("data_sharded", "data_small"),
}
SLOW = {*BY_NAME, *ACROSS[2], *ACROSS[1], *KINDS} - FAST


def _save_once() -> None:
    """Save the step to resume from alone: each save takes as long as some steps.

    Its state is gathered in many pieces, the last ones shorter.
    """
    optimizer_state._GATHERED = 1000
    save = Saving.save

    def save_early(self: Saving, step: int) -> None:
        if step == SAVED:
            save(self, step)

    Saving.save = save_early


def _same_plan(
    rank: int, world_size: int, folder: Path, names: set[str], pairs: set[Pair]
) -> dict[str, tuple[Numbers, Numbers | None]]:
    """Whole runs of cases and sources; the cases' are resumed, too."""
    _save_once()
    results, sources = {}, {source for source, _ in pairs}
    for case in (case for case in CASES[world_size] if case.name in names | sources):
        whole, resumed = run(case, job(case, folder, case.name), rank, world_size), None
        if case.name in names:
            to = f"{case.name}_resumed"
            resumed = run_from(folder / case.name, case, folder, to, rank, world_size)
        results[case.name] = whole, resumed
    return results


def _other_plan(rank: int, world_size: int, folder: Path, pairs: set[Pair]) -> dict[Pair, Numbers]:
    _save_once()
    asked_here = [*ACROSS[world_size], *(KINDS if world_size == 2 else ())]
    return {
        (source, target): run_from(
            folder / source, BY_NAME[target], folder, f"{source}_to_{target}", rank, world_size
        )
        for source, target in asked_here
        if (source, target) in pairs
    }


def _both(
    rank: int, world_size: int, folder: Path, names: set[str], pairs: set[Pair]
) -> tuple[dict[str, tuple[Numbers, Numbers | None]], dict[Pair, Numbers]]:
    return (
        _same_plan(rank, world_size, folder, names, pairs),
        _other_plan(rank, world_size, folder, pairs),
    )


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[dict, dict]:
    """(whole, resumed) of each rank by case name; rank 0's by (source, target)."""
    folder, pairs = tmp_path_factory.mktemp("runs"), asked(request, "source", "target")
    names = asked(request, "name")
    alone = run_ranks(_same_plan, 1, folder, names, pairs)
    both = run_ranks(_both, 2, folder, names, pairs)
    (back,) = run_ranks(_other_plan, 1, folder, pairs)
    same = {
        name: [rank[name] for rank in ranks]
        for ranks in (alone, [of_rank for of_rank, _ in both])
        for name in ranks[0]
    }
    return same, both[0][1] | back


@pytest.mark.parametrize("name", marked(BY_NAME, SLOW))
def test_on_the_same_plan_every_number_is_bitwise(results: tuple[dict, dict], name: str) -> None:
    for whole, resumed in results[0][name]:
        assert [step["learning_rate"] for step in whole.steps] == pytest.approx(RATES, rel=1e-12)
        assert resumed == whole.since(SAVED)
        assert whole.num_skipped == len(BY_NAME[name].skipped)


@pytest.mark.parametrize(("source", "target"), marked([*ACROSS[2], *ACROSS[1]], SLOW))
def test_on_another_plan_losses_agree(results: tuple[dict, dict], source: str, target: str) -> None:
    same, other = results
    whole, resumed = same[source][0][0].since(SAVED), other[source, target]
    assert resumed.num_skipped == whole.num_skipped
    for ours, theirs in zip(resumed.steps, whole.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=LOSS_BOUND)
        assert ours["learning_rate"] == theirs["learning_rate"]
    assert whole.steps[0]["loss"] != pytest.approx(whole.steps[-1]["loss"], rel=1e-2)


@pytest.mark.parametrize(("source", "target"), marked(KINDS, SLOW))
def test_state_of_another_kind_goes_on(
    results: tuple[dict, dict], source: str, target: str
) -> None:
    """Bitwise, unless moments are rounded: then as near as bf16 moments are."""
    whole, resumed = results[0][source][0][0].since(SAVED), results[1][source, target]
    if KINDS[source, target]:
        assert resumed.steps == whole.steps
        return
    assert resumed.steps[0]["loss"] == whole.steps[0]["loss"]
    for ours, theirs in zip(resumed.steps, whole.steps, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
    assert resumed.steps != whole.steps


def _where_te_is(rank: int, world_size: int, folder: Path) -> list[tuple[Numbers, Numbers]]:
    """Whole and resumed runs, whose steps Megatron looks for where Transformer Engine has them."""
    _save_once()
    install_cpu_patches()
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    found = []
    for case in (Small("bf16", dtype="bf16"), OnHost("host"), Small("untouched", skipped=SPARED)):
        whole = run(case, job(case, folder, case.name), rank, world_size)
        to = f"{case.name}_resumed"
        found.append((whole, run_from(folder / case.name, case, folder, to, rank, world_size)))
    return found


def test_state_in_pieces_resumes_where_transformer_engine_is(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(_where_te_is, 1, tmp_path)[0]:
        assert resumed == whole.since(SAVED)
