"""The memory estimate against parameter counts of published models and sums made by hand."""

import dataclasses
from typing import Any

import pytest

from puzzle_align.layout.model import ModelOptions, ModelSpec, num_parameters, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory import (
    RankMemory,
    estimate_frozen,
    estimate_preference,
    layer_activation_bytes,
    layer_shard_parameters,
    peak_live_chunks,
    rank_parameters,
    table,
)
from puzzle_align.schedules.actions import Program
from puzzle_align.schedules.lowering import lower
from puzzle_align.schedules.single import interleaved, one_f_one_b
from puzzle_align.schedules.validate import validate

LLAMA_2_7B = ModelSpec(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=4096,
)
MISTRAL_7B = dataclasses.replace(
    LLAMA_2_7B, model_type="mistral", intermediate_size=14336, num_key_value_heads=8
)
QWEN3_0_6B = ModelSpec(
    model_type="qwen3",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=True,
    qk_norm=True,
)
# Small enough to do on paper: q = 8, k = 4, F = 16.
PAPER = ModelSpec(
    model_type="llama",
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=128,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("spec", "published"),
    [(LLAMA_2_7B, 6_738_415_616), (MISTRAL_7B, 7_241_732_096), (QWEN3_0_6B, 596_049_920)],
)
def test_one_rank_holds_the_published_number_of_parameters(spec: ModelSpec, published: int):
    assert rank_parameters(spec, ParallelPlan(), 0) == published == num_parameters(spec)


def test_pipeline_and_tensor_ranks_hold_the_model_once_but_for_what_is_replicated():
    plan = ParallelPlan(pipeline=4, tensor=2)
    held = [2 * rank_parameters(MISTRAL_7B, plan, rank) for rank in range(4)]
    norms = 32 * 2 * 4096 + 4096  # each of two tensor ranks has all of them
    assert sum(held) == 7_241_732_096 + norms
    assert held[1] == held[2] == 2 * 8 * layer_shard_parameters(MISTRAL_7B, 2)


def test_tied_embeddings_lie_on_both_ends_of_a_pipeline():
    plan = ParallelPlan(pipeline=2)
    held = sum(rank_parameters(QWEN3_0_6B, plan, rank) for rank in range(2))
    assert held == 596_049_920 + 151_936 * 1024


def test_vocabulary_rows_are_padded_to_128():
    spec = dataclasses.replace(LLAMA_2_7B, vocab_size=32001)
    more = rank_parameters(spec, ParallelPlan(), 0) - rank_parameters(LLAMA_2_7B, ParallelPlan(), 0)
    assert more == 2 * 128 * 4096


def test_model_state_is_18_bytes_a_parameter_in_bf16_and_16_in_fp32():
    held = 6_738_415_616
    for dtype, shards, expected in (
        ("bf16", 1, 2 + 4 + 12),
        ("bf16", 4, 2 + 4 + 3),
        ("fp32", 1, 4 + 4 + 8),
        ("fp32", 4, 4 + 4 + 2),
    ):
        (memory,) = _estimate(LLAMA_2_7B, ParallelPlan(data=shards), dtype=dtype)
        state = memory.parameters + memory.gradients + memory.optimizer
        assert state == expected * held


def test_layer_activations_by_hand():
    # 4H 32, three of q and k 36, 3F 48, angles 4 * 2 = 8: 124 numbers, and 2 scales in float32.
    single = ParallelPlan()

    def kept(plan: ParallelPlan = single, spec: ModelSpec = PAPER, **options: Any) -> int:
        return layer_activation_bytes(spec, plan, ModelOptions(**options), row_tokens=10)

    assert kept(recompute="selective") == 10 * (4 * 124 + 8)
    assert kept(attention="flex") == 10 * (4 * 124 + 8 + 4 * 4)
    assert kept(attention="segments") == 10 * (4 * (124 + 8) + 8 + 4 * 4)
    assert kept(attention="dense") == 10 * (4 * (124 + 10) + 8 + 4 * 4)
    assert kept(attention="flex", dtype="bf16") == 10 * (2 * 124 + 8 + 4 * 4)
    tensor, sequence = ParallelPlan(tensor=2), ParallelPlan(tensor=2, sequence_parallel=True)
    assert kept(tensor, attention="flex") == 10 * (4 * (32 + 42 + 8) + 8 + 4 * 2)
    assert kept(sequence, attention="flex") == 10 * (4 * (16 + 42 + 8) + 4 + 4 * 2)
    # Norms of queries and keys: their inputs (8 + 4) and a scale for each of 4 + 2 heads.
    qk_norm = dataclasses.replace(PAPER, qk_norm=True)
    assert kept(spec=qk_norm, recompute="selective") == 10 * (4 * (124 + 12) + 4 * (2 + 6))


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("num_microbatches", [4, 12])
def test_live_chunks_are_those_of_the_proven_schedule(
    num_ranks: int, num_chunks: int, num_microbatches: int
):
    if num_chunks == 1:
        lists = one_f_one_b("actor", num_ranks, num_microbatches)
    else:
        lists = interleaved("actor", num_ranks, num_microbatches, num_chunks)
    program = Program(
        model="actor", num_microbatches=num_microbatches, num_chunks=num_chunks, backward=True
    )
    proven = validate(lower(lists, [program]), [program])
    plan = ParallelPlan(pipeline=num_ranks, virtual_pipeline=num_chunks)
    found = [peak_live_chunks(plan, rank, num_microbatches) for rank in range(num_ranks)]
    assert found == proven


def test_1f1b_keeps_pipeline_minus_rank_microbatches():
    plan = ParallelPlan(pipeline=4)
    estimates = _estimate(PAPER, plan, num_microbatches=16)
    one = layer_activation_bytes(PAPER, plan, ModelOptions(), 10) + 10 * 8 * 4  # and the output
    head = 10 * 8 * 4
    assert [memory.activations for memory in estimates] == [4 * one, 3 * one, 2 * one, one + head]
    short = _estimate(PAPER, plan, num_microbatches=2)
    assert [memory.activations for memory in short] == [2 * one, 2 * one, 2 * one, one + head]


def test_interleaving_costs_what_the_paper_says():
    # Korthikanti et al. (section 4.2.3): the first rank keeps L (1 + (P - 1) / (P V)) layers.
    spec = dataclasses.replace(PAPER, num_hidden_layers=24)
    plan = ParallelPlan(pipeline=4, virtual_pipeline=3)
    layers = peak_live_chunks(plan, 0, 100) * spec.num_hidden_layers // (4 * 3)
    assert layers == 24 * (1 + 3 / 12)


def test_full_recompute_keeps_layer_inputs_and_works_on_one_layer():
    (kept,) = _estimate(PAPER, ParallelPlan())
    (made_again,) = _estimate(PAPER, ParallelPlan(), recompute="full")
    hidden = 10 * 8 * 4
    assert made_again.activations == (4 + 1) * hidden + hidden
    assert (
        kept.activations
        == 4 * layer_activation_bytes(PAPER, ParallelPlan(), ModelOptions(), 10) + hidden + hidden
    )


def test_workspace_is_the_larger_of_a_layer_and_the_head():
    plan = ParallelPlan(pipeline=2)
    first, last = _estimate(PAPER, plan)
    hidden = 10 * 8 * 4
    assert first.workspace == 2 * hidden + 10 * 3 * 16 * 4
    # 10 predictions (fewer than a chunk) and 8 hidden rows of 128 columns, twice in 4 bytes.
    assert last.workspace == (10 + 8) * 128 * 8 + 2 * hidden


def test_a_scalar_head_is_one_row_on_every_tensor_rank():
    scalar = with_scalar_head(QWEN3_0_6B)  # tied: its head took nothing of its own
    assert rank_parameters(scalar, ParallelPlan(), 0) == 596_049_920 + 1024
    assert rank_parameters(scalar, ParallelPlan(), 0) == num_parameters(scalar)
    plan = ParallelPlan(pipeline=2, tensor=2)
    held = [rank_parameters(scalar, plan, rank) for rank in range(2)]
    assert held[0] - held[1] == 151_936 * 1024 // 2 - 2 * 1024  # less the final norm and the head


def test_a_scalar_head_keeps_and_computes_next_to_nothing():
    plan = ParallelPlan(pipeline=2)
    first, last = _estimate(with_scalar_head(PAPER), plan)
    one = 2 * layer_activation_bytes(PAPER, plan, ModelOptions(), 10) + 10 * 8 * 4
    assert (first.activations, last.activations) == (2 * one, one)
    assert last.workspace == first.workspace


def test_reference_counts_the_weights_of_its_own_plan():
    held = rank_parameters(PAPER, ParallelPlan(), 0)
    plan, its_plan = ParallelPlan(pipeline=2), ParallelPlan(data=2)
    estimates = _estimate(PAPER, plan, reference=(PAPER, its_plan))
    assert [memory.reference for memory in estimates] == [4 * held, 4 * held]
    halves = [4 * rank_parameters(PAPER, plan, rank) for rank in range(2)]
    estimates = _estimate(PAPER, ParallelPlan(data=2), reference=(PAPER, plan))
    assert [memory.reference for memory in estimates] == [max(halves)]
    estimates = _estimate(PAPER, plan, reference=(PAPER, plan))
    assert [memory.reference for memory in estimates] == halves


def test_a_reference_that_runs_ahead_holds_inputs():
    plan = ParallelPlan(pipeline=2)
    beside, ahead = (
        [
            memory.reference
            for memory in estimate_preference(
                PAPER,
                plan,
                ModelOptions(dtype="bf16"),
                row_tokens=10,
                num_microbatches=num_microbatches,
                distributed_optimizer=True,
                reference=(PAPER, plan),
                reference_ahead=num_microbatches > 0,
            )
        ]
        for num_microbatches in (0, 3)
    )
    # Three rows (no more than four: 2P) of ten tokens, in two bytes a number.
    row = 2 * 10 * PAPER.hidden_size
    assert ahead == [weights + 3 * row for weights in beside]


def test_a_frozen_model_holds_its_weights_and_two_rows_of_hidden_states():
    options = ModelOptions(dtype="bf16")
    plan = ParallelPlan(pipeline=2, tensor=2)
    first, last = estimate_frozen(LLAMA_2_7B, plan, options, row_tokens=4096)
    held = [rank_parameters(LLAMA_2_7B, plan, rank) for rank in range(2)]
    assert [first.parameters, last.parameters] == [2 * number for number in held]
    assert first.activations == last.activations == 2 * 2 * 4096 * 4096
    assert first.gradients == first.optimizer == first.reference == 0
    assert first.workspace > 0 and last.workspace > 0


def test_table_has_a_column_a_rank_and_adds_up():
    part = dict.fromkeys(("parameters", "gradients", "optimizer", "reference"), 2**30)
    memory = RankMemory(**part, activations=2**29, workspace=2**20)
    assert memory.total == 4 * 2**30 + 2**29 + 2**20
    lines = table([memory, memory]).splitlines()
    assert lines[0].split()[-2:] == ["P0", "P1"]
    assert lines[1].split() == ["parameters", "1.00", "GiB", "1.00", "GiB"]
    assert lines[6].split() == ["workspace", "1.00", "MiB", "1.00", "MiB"]
    assert lines[7].split() == ["total", "4.50", "GiB", "4.50", "GiB"]
    assert len({len(line) for line in lines}) == 1


def _estimate(
    spec: ModelSpec,
    plan: ParallelPlan,
    num_microbatches: int = 4,
    reference: tuple[ModelSpec, ParallelPlan] | None = None,
    **options: Any,
) -> list[RankMemory]:
    return estimate_preference(
        spec,
        plan,
        ModelOptions(**options),
        row_tokens=10,
        num_microbatches=num_microbatches,
        distributed_optimizer=True,
        reference=reference,
    )
