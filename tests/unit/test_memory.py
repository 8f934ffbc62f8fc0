"""Memory of a model, against parameter counts of published models and sums made by hand."""

import dataclasses
from typing import Any

import pytest
import torch

from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.model import (
    LORA_TARGETS,
    Dtype,
    LoraSpec,
    ModelOptions,
    ModelSpec,
    with_scalar_head,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment
from puzzle_align.layout.weights import num_parameters
from puzzle_align.models.attention import attend, prepare_attention
from puzzle_align.planning.memory.model import (
    chunk_activation_bytes,
    columns_table,
    fp8_weight_bytes,
    head_input_bytes,
    hidden_bytes,
    layer_activation_bytes,
    layer_shard_parameters,
    rank_parameters,
    workspace_bytes,
)
from tests.specs import LLAMA_2_7B, MISTRAL_7B, PAPER, QWEN3_0_6B


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


def test_layer_activations_by_hand():
    # 4H 32, two of q and k 24, 3F 48, angles 4 * 2 = 8: 112 numbers, and 2 scales in float32.
    single = ParallelPlan()

    def kept(plan: ParallelPlan = single, spec: ModelSpec = PAPER, **options: Any) -> int:
        return layer_activation_bytes(spec, plan, ModelOptions(**options), row_tokens=10)

    assert kept(recompute="selective") == 10 * (4 * 112 + 8)
    assert kept(attention="flex") == 10 * (4 * 112 + 8 + 4 * 4)
    assert kept(attention="segments") == 10 * (4 * (112 + 8 + 12) + 8 + 4 * 4)
    assert kept(attention="varlen") == 10 * (4 * (112 + 4) + 8 + 4 * 4)
    assert kept(attention="dense") == 10 * (4 * (112 + 10 + 2 * (8 - 4)) + 8 + 4 * 4)
    assert kept(attention="flex", dtype="bf16") == 10 * (2 * 112 + 8 + 4 * 4)
    tensor, sequence = ParallelPlan(tensor=2), ParallelPlan(tensor=2, sequence_parallel=True)
    assert kept(tensor, attention="flex") == 10 * (4 * (32 + 36 + 8) + 8 + 4 * 2)
    assert kept(sequence, attention="flex") == 10 * (4 * (16 + 36 + 8) + 4 + 4 * 2)
    for attention, own in (("segments", 4 + 6), ("varlen", 2), ("dense", 10 + 2 * (4 - 2))):
        assert kept(tensor, attention=attention) == 10 * (4 * (32 + 36 + 8 + own) + 8 + 4 * 2)
    # Norms of queries and keys: their inputs (8 + 4) and a scale for each of 4 + 2 heads.
    qk_norm = dataclasses.replace(PAPER, qk_norm=True)
    assert kept(spec=qk_norm, recompute="selective") == 10 * (4 * (112 + 12) + 4 * (2 + 6))
    halves = kept(tensor, qk_norm, recompute="selective")
    assert halves == 10 * (4 * (32 + 36 + 8 + 6) + 4 * (2 + 3))


def test_segments_keep_their_joined_keys_and_values():
    """Of two pairs that are half prompts, where every head has keys of its own: as counted."""
    num_tokens, heads, channels = 2048, 8, 64
    pairs = Segment(0, 512, (256, 256)), Segment(1024, 512, (256, 256))
    shape = num_tokens, 1, heads, channels
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    plan = prepare_attention(RowLayout(num_tokens, pairs), "segments", torch.device("cpu"))
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    q, k, v = (x.permute(1, 2, 0, 3) for x in inputs)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend(q, k, v, plan)
    given = {x.untyped_storage().data_ptr() for x in inputs}
    found = sum(storage.nbytes() for at, storage in saved.items() if at not in given)
    width = heads * channels
    counted = 2 * BACKENDS["segments"].kept(heads, width, width, num_tokens) + 4 * heads
    assert counted == 2 * 5 * width // 2 + 4 * heads
    # Beside them, one mask of the longest further response, and the log-sum-exp of each call.
    assert counted <= found / num_tokens <= 1.1 * counted


def test_uneven_ranks_hold_and_keep_their_own_layers():
    five = dataclasses.replace(PAPER, num_hidden_layers=5)
    plan = ParallelPlan(pipeline=2, pipeline_layers=(3, 2))
    held = [rank_parameters(five, plan, rank) for rank in range(2)]
    even = [rank_parameters(PAPER, plan.grid, rank) for rank in range(2)]  # two layers each
    assert held == [even[0] + layer_shard_parameters(PAPER, 1), even[1]]
    options = ModelOptions()
    layer, hidden = layer_activation_bytes(PAPER, plan, options, 10), 10 * 8 * 4
    kept = [chunk_activation_bytes(five, plan, options, position, 10) for position in range(2)]
    assert kept == [3 * layer + hidden, 2 * layer + hidden]
    chunked = ParallelPlan(pipeline=2, virtual_pipeline=2, pipeline_layers=(2, 1, 1, 1))
    assert rank_parameters(five, chunked, 0) == held[0]


def test_full_recompute_keeps_layer_inputs_and_works_on_one_layer():
    plan, hidden = ParallelPlan(), 10 * 8 * 4
    kept, full = ModelOptions(), ModelOptions(recompute="full")
    layer = layer_activation_bytes(PAPER, plan, kept, 10)
    assert chunk_activation_bytes(PAPER, plan, kept, 0, 10) == 4 * layer + hidden
    assert chunk_activation_bytes(PAPER, plan, full, 0, 10) == (4 + 1) * hidden
    # On a rank without the head, of a layer: its gradients, and what is made again.
    two = ParallelPlan(pipeline=2)
    more = layer_activation_bytes(PAPER, two, full, 10)
    workspace = workspace_bytes(PAPER, two, full, 0, 10, trained=True)
    assert workspace == 2 * hidden + 10 * 3 * 16 * 4 + more


def test_under_sequence_parallelism_a_projection_s_input_is_gathered():
    """Two shards of hidden states, the MLP's share of 3F = 48, and ten tokens of H = 8, whole."""
    plan = ParallelPlan(pipeline=2, tensor=2, sequence_parallel=True)
    workspace = workspace_bytes(PAPER, plan, ModelOptions(), 0, 10, trained=True)
    assert workspace == 4 * 10 * (2 * 8 // 2 + 48 // 2 + 8)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_frozen_head_has_no_gradient(tensor: int):
    """Ten predictions' logits in float32 and in the weights' dtype, two rows of hidden states."""
    lora = LoraSpec(r=2, lora_alpha=2.0, target_modules=("q_proj",))
    large = dataclasses.replace(PAPER, vocab_size=4096)

    def workspace(spec: ModelSpec, *, trained: bool) -> int:
        plan = ParallelPlan(tensor=tensor)
        return workspace_bytes(spec, plan, ModelOptions(), 0, 10, trained=trained)

    vocabulary = 4096 // tensor
    logits = 10 * vocabulary * (4 + 4) + 2 * 10 * 8 * 4
    assert workspace(large, trained=False) == logits
    assert workspace(large, trained=True) == logits + vocabulary * 8 * 4
    assert workspace(dataclasses.replace(large, lora=lora), trained=True) == logits


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_adapters_keep_their_inputs_after_dropout_and_a_byte_a_number(dtype: Dtype, size: int):
    """H = 8 for each of q, k, v, gate and up; 8 of the heads and F = 16, cut over tensor ranks."""
    lora = LoraSpec(r=2, lora_alpha=2.0, target_modules=LORA_TARGETS)
    without = dataclasses.replace(PAPER, lora=lora)
    dropped = dataclasses.replace(PAPER, lora=dataclasses.replace(lora, lora_dropout=0.1))
    tensor, sequence = ParallelPlan(tensor=2), ParallelPlan(tensor=2, sequence_parallel=True)
    for plan, width in ((ParallelPlan(), 5 * 8 + 24), (tensor, 5 * 8 + 12), (sequence, 5 * 4 + 12)):
        options = ModelOptions(dtype=dtype)
        kept = [layer_activation_bytes(spec, plan, options, 10) for spec in (dropped, without)]
        assert kept[0] - kept[1] == 10 * (size + 1) * width


def test_hidden_states_are_sharded_with_the_sequence():
    bf16 = ModelOptions(dtype="bf16")
    assert hidden_bytes(PAPER, ParallelPlan(tensor=2), bf16, 10) == 10 * 8 * 2
    plan = ParallelPlan(tensor=2, sequence_parallel=True)
    assert hidden_bytes(PAPER, plan, bf16, 10) == 10 * 8 * 2 // 2


def test_the_head_keeps_the_hidden_states_that_it_reads():
    bf16, scalar = ModelOptions(dtype="bf16"), with_scalar_head(PAPER)
    assert head_input_bytes(PAPER, ModelOptions(), 10) == 10 * 8 * 4
    assert head_input_bytes(PAPER, bf16, 10) == 10 * 8 * 2
    assert head_input_bytes(scalar, bf16, 10) == 0  # the last tokens': next to nothing
    # A value a token: hidden states as they are, and in float32.
    assert head_input_bytes(scalar, bf16, 10, values_tokens=True) == (2 + 4) * 10 * 8


def test_a_scalar_head_is_one_row_on_every_tensor_rank():
    scalar = with_scalar_head(QWEN3_0_6B)  # tied: its head took nothing of its own
    assert rank_parameters(scalar, ParallelPlan(), 0) == 596_049_920 + 1024
    assert rank_parameters(scalar, ParallelPlan(), 0) == num_parameters(scalar)
    plan = ParallelPlan(pipeline=2, tensor=2)
    held = [rank_parameters(scalar, plan, rank) for rank in range(2)]
    assert held[0] - held[1] == 151_936 * 1024 // 2 - 2 * 1024  # less the final norm and the head


def test_the_table_has_a_column_a_set_of_ranks():
    lines = columns_table({"0-3": {"actor": 2**30}, "4": {"actor": 2**20}}).splitlines()
    assert lines[0].split()[-2:] == ["0-3", "4"]
    assert lines[1].split() == ["actor", "1.00", "0.00098"]
    parts = {"actor weights": 2**30, "train": 2**20, "total": 4 * 2**30 + 2**29 + 2**20}
    lines = columns_table({"0-1": parts, "2": parts}).splitlines()
    assert lines[0].split()[-2:] == ["0-1", "2"]
    assert lines[1].split() == ["actor", "weights", "1.00", "1.00"]
    assert lines[2].split() == ["train", "0.00098", "0.00098"]
    assert lines[3].split() == ["total", "4.50", "4.50"]
    assert len({len(line) for line in lines}) == 1


def test_fp8_copies_of_a_layer_s_matrices_lie_beside_its_weights():
    """A layer of PAPER has (16 + 8) * 8 numbers of attention and 3 * 8 * 16 of the MLP: 576."""
    hybrid, two = ModelOptions(dtype="bf16", fp8="hybrid"), ParallelPlan(pipeline=2, tensor=2)
    assert fp8_weight_bytes(PAPER, ParallelPlan(), ModelOptions(), 0, trained=True) == 0
    assert fp8_weight_bytes(PAPER, ParallelPlan(), hybrid, 0, trained=True) == 2 * 4 * 576
    assert fp8_weight_bytes(PAPER, two, hybrid, 1, trained=False) == 2 * 576 // 2
