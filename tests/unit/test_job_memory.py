"""Memory of a whole job by ranks, against sums made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from puzzle_align.layout.groups import num_communicators
from puzzle_align.layout.job_plan import ContextPlan, OptimizerStates, Order, Settings
from puzzle_align.layout.model import ModelOptions, ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory.job import (
    MemoryInputs,
    communicator_bytes,
    estimate_memory,
    state_bytes,
)
from puzzle_align.planning.memory.model import (
    chunk_activation_bytes,
    layer_activation_bytes,
    rank_parameters,
    workspace_bytes,
)
from puzzle_align.schedules.lookahead import most_held
from tests.specs import LLAMA_2_7B, MISTRAL_7B, PAPER
from tests.unit.job_plans import ONE, TWO, context, flop_run, phase_of, plan_of

SHARDED = OptimizerStates(sharded=("actor",))


def training(
    *contexts: ContextPlan,
    order: Order | None = None,
    num_microbatches: int = 4,
    row_tokens: int = 10,
    states: OptimizerStates = SHARDED,
    **settings: Any,
) -> list[dict[str, int]]:
    """Columns of a job that trains."""
    phase = phase_of(*contexts, order=order)
    inputs = MemoryInputs(
        settings=Settings(row_tokens=row_tokens, optimizers=states, **settings),
        runs={"train": flop_run(phase, row_tokens, num_microbatches)},
    )
    return list(estimate_memory(plan_of(phase), inputs).values())


def policy(plan: ParallelPlan, model: ModelSpec = PAPER, **options: Any) -> ContextPlan:
    return context("actor", plan, "train", model=model, **options)


def reference(plan: ParallelPlan, first: int = 0, **options: Any) -> ContextPlan:
    return context("reference", plan, "infer", first, **options)


def workspaces(own: ContextPlan) -> list[int]:
    trained = own.workload == "train"
    return [
        workspace_bytes(own.model, own.plan, own.options, rank, 10, trained=trained)
        for rank in range(own.plan.pipeline)
    ]


def activations(own: ContextPlan, num_microbatches: int = 4) -> list[int]:
    """Bytes of the train phase beside its workspace."""
    columns = training(own, num_microbatches=num_microbatches)
    return [
        parts["train"] - workspace
        for parts, workspace in zip(columns, workspaces(own), strict=True)
    ]


def test_model_state_is_18_bytes_a_parameter_in_bf16_and_16_in_fp32() -> None:
    held = 6_738_415_616
    for dtype, shards, expected in (
        ("bf16", 1, 2 + 4 + 12),
        ("bf16", 4, 2 + 4 + 3),
        ("fp32", 1, 4 + 4 + 8),
        ("fp32", 4, 4 + 4 + 2),
    ):
        own = policy(ParallelPlan(data=shards), LLAMA_2_7B, dtype=dtype)
        (parts,) = training(own)
        state = [parts[f"actor {part}"] for part in ("weights", "gradients", "optimizer")]
        assert sum(state) == expected * held
        assert parts["total"] == sum(state) + parts["train"]


def test_optimizer_state_is_sharded_only_where_it_is_said() -> None:
    own = policy(ParallelPlan(data=4), dtype="bf16")
    (whole,) = training(own, states=OptimizerStates())
    assert whole["actor optimizer"] == 12 * rank_parameters(PAPER, ONE, 0)
    assert training(own, states=OptimizerStates(sharded=("critic",))) == [whole]


SMALL = OptimizerStates(small=("actor",))


@pytest.mark.parametrize(
    ("states", "dtype", "shards", "expected"),
    [
        (SMALL, "bf16", 1, 2 + 2 + 2),  # two moments, and the rest of the main weights
        (SMALL, "fp32", 1, 2 + 2),  # the weights are the main weights
        (replace(SMALL, sharded=SMALL.small), "bf16", 2, 3),
        (OptimizerStates(on_host=SMALL.small), "bf16", 1, 0),
        (replace(SMALL, on_host=SMALL.small), "bf16", 1, 0),
        (OptimizerStates(small=("critic",)), "bf16", 1, 12),
    ],
)
def test_small_or_offloaded_state(
    states: OptimizerStates, dtype: str, shards: int, expected: int
) -> None:
    held = 6_738_415_616
    (parts,) = training(policy(ParallelPlan(data=shards), LLAMA_2_7B, dtype=dtype), states=states)
    assert parts["actor optimizer"] == expected * held


@pytest.mark.parametrize(
    ("small", "shards", "expected"),
    [
        ((), 1, 2 * 2**24 * 12),  # two pieces
        (SMALL.small, 1, 2 * 2**24 * 6),
        (SMALL.small, 1000, 2 * 38_863_922),  # a rank has less than a piece
    ],
)
def test_a_step_has_two_pieces_of_the_host_s_state(
    small: tuple[str, ...], shards: int, expected: int
) -> None:
    """Or what a row's pass takes, if that is more, as it is of many tokens."""
    model = replace(LLAMA_2_7B, vocab_size=128)  # 6,477,320,192 parameters
    own = policy(ParallelPlan(data=shards), model, dtype="bf16", recompute="full")
    states = OptimizerStates(small=small, sharded=SMALL.small)
    on_host = replace(states, on_host=SMALL.small)
    for row_tokens, least in ((8, expected), (8192, 4 * 10**9)):
        (before,) = training(own, row_tokens=row_tokens, states=states)
        (parts,) = training(own, row_tokens=row_tokens, states=on_host)
        assert parts["train"] == max(before["train"], expected) >= least
    assert before["train"] == parts["train"]


@pytest.mark.parametrize(
    ("recompute", "states", "expected"),
    [
        ("full", OptimizerStates(), 149_104_508_928),
        ("full", SMALL, 105_654_116_352),
        ("none", SMALL, 139_168_636_928),
        ("none", OptimizerStates(on_host=SMALL.small), 95_718_244_352),
    ],
)
def test_a_7b_policy_and_its_reference(
    recompute: str, states: OptimizerStates, expected: int
) -> None:
    """Rows of 8,192 tokens: on an H200 (141e9 bytes; it reports 150e9), with small state it fits.

    Of 7,241,732,096 parameters are, in bytes: weights 2, gradients 4, state 12 or 6 or 0; the
    reference 2; the rest is the train phase's: 37.8e9 with what all layers keep, 4.3e9 recomputed.
    """
    options: dict[str, Any] = {"dtype": "bf16", "attention": "flex", "recompute": recompute}
    beside = reference(ONE, model=MISTRAL_7B, **options)
    (parts,) = training(beside, policy(ONE, MISTRAL_7B, **options), row_tokens=8192, states=states)
    assert parts["total"] == expected


def test_fp8_copies_are_beside_the_weights_of_models_that_train_or_score() -> None:
    """Of 4 layers' 576 numbers; those that train have transposed ones, too."""
    fp8: dict[str, Any] = {"dtype": "bf16", "fp8": "hybrid"}
    (parts,) = training(reference(ONE, **fp8), policy(ONE, **fp8))
    held = rank_parameters(PAPER, ONE, 0)
    assert parts["actor weights"] == 2 * held + 2 * 4 * 576
    assert parts["reference weights"] == 2 * held + 4 * 576
    sampling = context("actor", ONE, "generate", **fp8)
    assert state_bytes(sampling, 0, OptimizerStates()) == {"weights": 2 * held}


def test_where_nothing_samples_nothing_is_set_aside_or_filled() -> None:
    own = policy(TWO, dtype="bf16")
    asked = training(own, overlap_switch=True, set_aside=("gradients", "optimizer"))
    assert asked == training(own)


def test_1f1b_keeps_pipeline_minus_rank_microbatches() -> None:
    own = policy(ParallelPlan(pipeline=4))
    one = layer_activation_bytes(PAPER, own.plan, ModelOptions(), 10) + 10 * 8 * 4  # and the output
    head = 10 * 8 * 4
    assert activations(own, num_microbatches=16) == [4 * one, 3 * one, 2 * one, one + head]
    assert activations(own, num_microbatches=2) == [2 * one, 2 * one, 2 * one, one + head]


def test_interleaving_keeps_the_chunks_of_its_lists() -> None:
    """Korthikanti et al. (section 4.2.3): the first rank has L (1 + (P - 1) / (P V)) layers."""
    spec = replace(PAPER, num_hidden_layers=24)
    own = policy(ParallelPlan(pipeline=4, virtual_pipeline=3), spec)
    chunk = chunk_activation_bytes(spec, own.plan, ModelOptions(), 0, 10)  # of two layers
    assert 2 * 15 == 24 * (1 + 3 / 12)
    head = 10 * 8 * 4
    found = activations(own, num_microbatches=100)
    assert found == [15 * chunk, 13 * chunk, 11 * chunk, 9 * chunk + head]


def test_uneven_ranks_keep_their_own_layers() -> None:
    five = replace(PAPER, num_hidden_layers=5)
    layer, hidden = layer_activation_bytes(PAPER, TWO, ModelOptions(), 10), 10 * 8 * 4
    own = policy(replace(TWO, pipeline_layers=(3, 2)), five)
    assert activations(own) == [2 * (3 * layer + hidden), 2 * layer + hidden + hidden]
    # Five chunks are live at most: of four rows the first, and of one row the second.
    chunked = policy(replace(TWO, virtual_pipeline=2, pipeline_layers=(2, 1, 1, 1)), five)
    assert activations(chunked)[0] == 4 * (2 * layer + hidden) + (layer + hidden)


def test_the_train_phase_takes_the_larger_of_a_layer_and_the_head() -> None:
    first, last = training(policy(TWO))
    chunk = chunk_activation_bytes(PAPER, TWO, ModelOptions(), 0, 10)
    hidden = 10 * 8 * 4
    assert first["train"] == 2 * chunk + 2 * hidden + 10 * 3 * 16 * 4
    # 10 predictions (fewer than a chunk) of 128 columns, twice in 4 bytes, and 8 hidden rows once.
    assert last["train"] == chunk + hidden + (10 * 8 + 8 * 4) * 128 + 2 * hidden


def test_a_scalar_head_keeps_and_computes_next_to_nothing() -> None:
    own = policy(TWO, with_scalar_head(PAPER))
    one = 2 * layer_activation_bytes(PAPER, TWO, ModelOptions(), 10) + 10 * 8 * 4
    assert activations(own) == [2 * one, one]
    first, last = training(own)
    assert first["train"] - last["train"] == one  # the same workspace


def test_a_reference_has_the_weights_of_its_own_plan() -> None:
    held = rank_parameters(PAPER, ONE, 0)
    halves = [4 * rank_parameters(PAPER, TWO, rank) for rank in range(2)]

    def weights(*plans: ParallelPlan) -> list[int]:
        own, others = plans
        columns = training(reference(others), policy(own))
        return [parts["reference weights"] for parts in columns]

    assert weights(TWO, ParallelPlan(data=2)) == [4 * held, 4 * held]
    assert weights(ParallelPlan(data=2), TWO) == halves  # ranks that hold the same policy
    assert weights(TWO, TWO) == halves


def test_a_reference_before_training_takes_no_more_than_that() -> None:
    alone, beside = training(policy(TWO)), training(reference(TWO), policy(TWO))
    assert [parts["train"] for parts in beside] == [parts["train"] for parts in alone]
    for parts, own in zip(beside, alone, strict=True):
        assert parts["total"] == own["total"] + parts["reference weights"]


@pytest.mark.parametrize(
    ("num_microbatches", "num_chunks", "held"), [(3, 1, 3), (9, 1, 4), (10, 2, 8)]
)
def test_a_reference_that_runs_ahead_holds_inputs(
    num_microbatches: int, num_chunks: int, held: int
) -> None:
    plan = replace(TWO, virtual_pipeline=num_chunks)
    contexts = (reference(plan, dtype="bf16"), policy(plan, dtype="bf16"))
    assert most_held(2) == 4
    beside, ahead = (
        training(*contexts, order=order, num_microbatches=num_microbatches)
        for order in ("sequential", "time_shared")
    )
    # No more rows than 2P = 4 at each of a rank's chunks. Ten tokens each, two bytes a number.
    row = 2 * 10 * PAPER.hidden_size
    found = [later["train"] - sooner["train"] for later, sooner in zip(ahead, beside, strict=True)]
    assert found == [held * row] * 2
    for later, sooner in zip(ahead, beside, strict=True):
        assert later["total"] == sooner["total"] + held * row
        assert later["reference weights"] == sooner["reference weights"]


def test_a_model_on_ranks_of_its_own_holds_its_weights_and_two_rows_of_hidden_states() -> None:
    plan = ParallelPlan(pipeline=2, tensor=2)
    frozen = context("reference", plan, "infer", 1, LLAMA_2_7B, dtype="bf16")
    phase = phase_of(frozen, policy(ONE, dtype="bf16"))
    assert phase.order == "concurrent"
    inputs = MemoryInputs(
        settings=Settings(row_tokens=4096), runs={"train": flop_run(phase, 4096, 4)}
    )
    columns = estimate_memory(plan_of(phase), inputs)
    assert list(columns) == ["0", "1-2", "3-4"]
    trained, first, last = columns.values()
    held = [rank_parameters(LLAMA_2_7B, plan, rank) for rank in range(2)]
    assert [p["reference weights"] for p in (first, last)] == [2 * number for number in held]
    for rank, parts in enumerate((first, last)):
        workspace = workspace_bytes(LLAMA_2_7B, plan, frozen.options, rank, 4096, trained=False)
        assert workspace > 0
        assert parts["train"] == 2 * 2 * 4096 * 4096 + workspace
        assert parts["actor weights"] == parts["actor gradients"] == parts["actor optimizer"] == 0
        assert parts["total"] == 2 * held[rank] + parts["train"]
    assert trained["reference weights"] == 0


def test_a_phase_that_runs_once_holds_its_models_alone() -> None:
    def estimate(rows: int, model: ModelSpec) -> tuple[dict[str, int], ContextPlan]:
        before = context("reference", ONE, "infer", model=model)
        once = replace(phase_of(before, name="precompute"), once=True)
        train = phase_of(policy(ONE))
        inputs = MemoryInputs(
            settings=Settings(row_tokens=rows), runs={"train": flop_run(train, rows, 4)}
        )
        (parts,) = estimate_memory(plan_of(once, train), inputs).values()
        return parts, before

    parts, before = estimate(10, PAPER)
    weights, workspace = 4 * rank_parameters(PAPER, ONE, 0), workspaces(before)[0]
    assert "reference weights" not in parts
    assert parts["precompute"] == weights + 2 * 10 * 8 * 4 + workspace
    states = [parts[f"actor {part}"] for part in ("weights", "gradients", "optimizer")]
    assert parts["total"] == sum(states) + parts["train"] > parts["precompute"]
    # The larger of the two is the peak: of a reference that is far larger than the policy, its own.
    parts, _ = estimate(10, LLAMA_2_7B)
    assert parts["total"] == parts["precompute"] > 4 * 6_738_415_616


def test_ranks_that_hold_the_same_count_the_most_communicators_of_any() -> None:
    """A model beside, a rank further on: tensor and data groups are others, of some ranks more."""
    plan = ParallelPlan(data=2, tensor=2)
    score, train = phase_of(reference(plan, first=1), name="score"), phase_of(policy(plan))
    runs = {"train": flop_run(train, 10, 4)}
    inputs = MemoryInputs(settings=Settings(row_tokens=10), runs=runs, cuda=True)
    whole = plan_of(score, train)
    counts = [communicator_bytes(number) for number in num_communicators(whole)]
    assert counts[2] > counts[1] == counts[3]
    columns = estimate_memory(whole, inputs)
    assert list(columns) == ["0", "1-3", "4"]
    assert [parts["communicators"] for parts in columns.values()] == [counts[0], *counts[2::2]]
