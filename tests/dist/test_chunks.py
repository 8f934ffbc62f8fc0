"""Chunks that Megatron-core builds: FP8 rows, what layers keep, and names and shapes of weights.

Which rows are computed in FP8, and when the weights' FP8 copies are made anew: without Transformer
Engine, Megatron computes what is asked to be in FP8 as it is, and the flags that its layers would
read are seen all the same. What a layer keeps for its backward is counted, against the estimate of
``planning.memory``; names and shapes are those of the pure layout of weights.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from puzzle_align.algos.logprobs import STATISTICS
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import LORA_TARGETS, LoraSpec, ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment, position_ids
from puzzle_align.layout.weights import parameter_boxes
from puzzle_align.models.attention import AttentionPlan, prepare_attention
from puzzle_align.models.attention.cache import CachedTokens, DecodeRow, KeyValueCache, decode_mask
from puzzle_align.models.chunk import ModelChunk, build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.inputs import Predictions
from puzzle_align.models.layers import rotary_angles
from puzzle_align.planning.memory.model import layer_activation_bytes, rank_parameters
from puzzle_align.runtime.context import build_context, mix_weights
from puzzle_align.runtime.groups.world import Communicators, World, build_communicators
from tests.dist.chunk_runs import own_groups
from tests.dist.random_models import random_context, trainable
from tests.dist.spawn import run_ranks
from tests.specs import LLAMA
from tests.unit.test_weight_layout import MODELS

CPU = torch.device("cpu")


def test_copies_are_made_once_for_weights_as_they_are():
    run_ranks(_check_copies, 1, timeout=120.0)


def _check_copies(rank: int, world_size: int) -> None:
    world = World(rank, world_size, CPU)
    context = random_context(LLAMA, ParallelPlan(), world, seed=1, fp8="hybrid")
    (chunk,) = context.chunks
    optimizer = trainable(context, OptimizerConfig(lr=1e-3))
    layer: Any = chunk.decoder.layers[0].mlp.linear_fc1
    layer.is_first_microbatch = False  # as Transformer Engine's layers leave it
    seen: list[tuple[bool, str | None]] = []
    layer.register_forward_pre_hook(
        lambda module, _: seen.append((module.is_first_microbatch, module.config.fp8))
    )

    def run(num_tokens: int, generates: bool = False) -> tuple[bool, str | None]:
        chunk.row_state.current = _decode_row() if generates else _fp8_row(num_tokens)
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
        places = torch.arange(num_tokens)
        output = chunk(tokens, places[None], Predictions(places, None))
        if not generates:
            output.sum().backward()
        layer.is_first_microbatch = False
        assert chunk.config.fp8 == "hybrid"
        return seen.pop()

    # Rows of generation, and of odd lengths, neither make copies nor take the first one's place.
    assert run(3, generates=True) == (False, None)
    assert run(24) == (False, None)
    assert run(32) == (True, "hybrid")
    assert run(32) == (False, "hybrid")
    optimizer.reduce_gradients()
    assert optimizer.step(1e-3)[0]
    assert run(3, generates=True) == (False, None)
    assert run(32) == (True, "hybrid")
    assert run(32) == (False, "hybrid")
    chunk.load_state_dict(chunk.state_dict())
    assert run(32) == (True, "hybrid")
    mix_weights(context, context, 0.5)
    assert run(32) == (True, "hybrid")


def _fp8_row(num_tokens: int) -> AttentionPlan:
    return prepare_attention(RowLayout(num_tokens, (Segment(0, 10, (8,)),)), "segments", CPU)


def _fits(rank: int, world_size: int) -> list[int]:
    """Lengths of rows that are computed in FP8 where each of two ranks has half of a row."""
    plan, world = ParallelPlan(tensor=2, sequence_parallel=True), World(rank, world_size, CPU)
    (chunk,) = random_context(LLAMA, plan, world, seed=1, fp8="hybrid").chunks
    fitting = []
    for num_tokens in range(16, 97, 8):
        chunk.row_state.current = _fp8_row(num_tokens)
        if chunk._row_fits_fp8():
            fitting.append(num_tokens)
    return fitting


def test_each_rank_s_part_of_a_row_fits_fp8() -> None:
    assert run_ranks(_fits, 2) == [[32, 64, 96]] * 2


def _decode_row() -> DecodeRow:
    """A token for each of three empty sequences."""
    groups, channels = LLAMA.num_key_value_heads, LLAMA.head_dim
    cache = KeyValueCache(LLAMA.num_hidden_layers, (3, groups, channels), 8, torch.float32, CPU)
    cache.reserve(8)
    places = torch.arange(3)
    mask = decode_mask(torch.zeros_like(places), 8, torch.float32)
    return DecodeRow(cache, CachedTokens(slice(3), places, torch.zeros_like(places)), mask)


ROW = RowLayout(256, (Segment(0, 100, (156,)),))
SPEC = replace(LLAMA, num_hidden_layers=1, head_dim=16)  # wider than hidden states


def test_layer_keeps_what_is_estimated():
    run_ranks(_check_all, 2, timeout=120.0)


def _check_all(rank: int, world_size: int) -> None:
    world = World(rank, world_size, torch.device("cpu"))
    for sequence_parallel in (False, True):
        plan = ParallelPlan(tensor=2, sequence_parallel=sequence_parallel)
        groups = build_communicators(plan, world, trained=True)
        # torch's RMSNorm is not fused on CPU and keeps its normalised input besides.
        unfused = 2 * ROW.num_tokens * SPEC.hidden_size * 4 // (2 if sequence_parallel else 1)
        queries = SPEC.num_attention_heads * SPEC.head_dim // plan.tensor
        keys = SPEC.num_key_value_heads * SPEC.head_dim // plan.tensor
        for attention in ("segments", "dense"):
            for recompute in ("none", "selective"):
                options = ModelOptions(attention=attention, recompute=recompute)
                spec = SPEC
                if attention == "dense":  # half of each head is rotated
                    half = {"partial_rotary_factor": 0.5}
                    spec = replace(SPEC, model_type="qwen3", qk_norm=True, **half)
                elif recompute == "selective":
                    spec = replace(SPEC, model_type="qwen2", attention_bias=True)
                context = build_context(
                    "actor", spec, options, plan, world, communicators=groups, fill=_fill
                )
                (chunk,) = context.chunks
                held = sum(parameter.numel() for parameter in chunk.parameters())
                assert held == rank_parameters(spec, plan, 0)
                shape = context.activation_shape(ROW.num_tokens)
                estimate = layer_activation_bytes(spec, plan, options, ROW.num_tokens)
                if attention == "segments" and recompute == "none":  # this row has one response
                    estimate -= ROW.num_tokens * 4 * (3 * queries // 2)
                if attention == "dense" and recompute == "none":  # CPU: nothing is repeated
                    estimate -= ROW.num_tokens * 4 * 2 * (queries - keys)
                estimate += unfused
                if spec.qk_norm:
                    estimate += ROW.num_tokens * 4 * (queries + keys)
                found = _kept_bytes(chunk, attention, torch.ones(shape, requires_grad=True))
                assert found == estimate, f"{plan} {options}: {found} not {estimate}"
        _check_adapters(plan, world, groups)


ADAPTERS = LoraSpec(r=2, lora_alpha=2.0, target_modules=LORA_TARGETS)


def _check_adapters(plan: ParallelPlan, world: World, groups: Communicators | None) -> None:
    """A frozen layer keeps what is estimated, and the few outputs of its adapters' first halves.

    On a CPU a mask is a float a number in place of a byte, keys and values are not repeated, and
    frozen norms and products keep nothing: without dropout the adapters keep the products' inputs.
    """
    options, row_tokens = ModelOptions(attention="dense"), ROW.num_tokens
    hidden = SPEC.hidden_size // plan.sequence_shards
    inner = SPEC.intermediate_size // plan.tensor
    queries = SPEC.num_attention_heads * SPEC.head_dim // plan.tensor
    keys = SPEC.num_key_value_heads * SPEC.head_dim // plan.tensor
    first_halves = 5 * ADAPTERS.r + 2 * ADAPTERS.r // plan.sequence_shards
    for rate in (0.0, 0.5):
        spec = replace(SPEC, lora=replace(ADAPTERS, lora_dropout=rate))
        (chunk,) = build_context(
            "actor", spec, options, plan, world, communicators=groups, fill=_fill
        ).chunks
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad = ".lora." in name
        shape = (row_tokens // plan.sequence_shards, 1, spec.hidden_size)
        found = _kept_bytes(chunk.train(), "dense", torch.ones(shape, requires_grad=True))
        estimate = layer_activation_bytes(spec, plan, options, row_tokens)
        estimate += row_tokens * 4 * (first_halves - 2 * (queries - keys))
        if rate:  # attention keeps its output, o_proj's input, all the same
            estimate += row_tokens * 3 * (5 * hidden + queries + inner)
            estimate -= row_tokens * 4 * (2 * hidden + inner)
        assert found == estimate, (plan, rate, found, estimate)


def _fill(chunk: ModelChunk) -> None:
    for parameter in chunk.parameters():
        torch.nn.init.ones_(parameter)


def _kept_bytes(chunk: ModelChunk, attention: str, hidden: torch.Tensor) -> int:
    """Bytes of all storages the first layer saves for its backward, weights left out."""
    chunk.row_state.current = prepare_attention(ROW, attention, torch.device("cpu"))  # type: ignore[arg-type]
    positions = torch.from_numpy(np.ascontiguousarray(position_ids(ROW)))[None]
    angles = rotary_angles(positions, chunk.inverse_frequencies)
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        # Kept until counted: what nothing holds is freed, and its address used again.
        output = chunk.decoder.layers[0](hidden, None, rotary_pos_emb=angles)
    del output
    sizes = (storage.nbytes() for storage in storages.values())
    return sum(size for size in sizes if size > 64)  # recompute keeps a number of its own


PLANS = (
    ParallelPlan(tensor=4, sequence_parallel=True),
    ParallelPlan(pipeline=4, pipeline_layers=(1, 2, 1, 1)),
    ParallelPlan(pipeline=2, tensor=2, pipeline_layers=(2, 3)),
    ParallelPlan(pipeline=2, tensor=2, virtual_pipeline=2, pipeline_layers=(2, 1, 1, 1)),
    ParallelPlan(pipeline=2, data=2, pipeline_layers=(4, 1)),
)


def test_names_and_shapes_are_those_that_are_built_in_their_order() -> None:
    built = run_ranks(_build, 4)
    for number, plan in enumerate(PLANS):
        for name, spec in MODELS.items():
            places = [rank[number, name] for rank in built]
            found = {place: shapes for own in places for place, shapes in own.items()}
            assert len(found) == plan.num_positions * plan.tensor
            for (position, tensor_rank), shapes in found.items():
                boxes = parameter_boxes(spec, plan, position, tensor_rank)
                own = [(p.name, p.shape) for p in boxes.values()]
                assert own == list(shapes.items()), (plan, name, position)


def _build(rank: int, _world_size: int) -> dict:
    """Shapes of this rank's parameters by plan and model, then by position and tensor rank."""
    install_cpu_patches()
    found = {}
    for number, plan in enumerate(PLANS):
        groups = own_groups(plan, rank)
        for name, spec in MODELS.items():
            found[number, name] = {
                (chunk * plan.pipeline + groups.pp.rank(), groups.tp.rank()): {
                    parameter: tuple(value.shape)
                    for parameter, value in build_chunk(
                        spec, ModelOptions(), plan, groups, chunk=chunk
                    ).named_parameters()
                }
                for chunk in range(plan.virtual_pipeline)
            }
    return found


def _embed(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of 24 tokens as a Gemma's first layer gets them, and their embeddings."""
    spec = replace(LLAMA, hidden_size=48, head_dim=12, embedding_multiplier=48**0.5)
    world = World(rank, world_size, CPU)
    (chunk,) = random_context(spec, ParallelPlan(), world, seed=1, dtype="bf16").chunks
    seen: list[torch.Tensor] = []
    chunk.decoder.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["hidden_states"]), with_kwargs=True
    )
    chunk.row_state.current, tokens = _fp8_row(24), torch.arange(24)
    chunk(tokens[None], tokens[None], Predictions(tokens, None))
    return seen[0].detach()[:, 0], chunk.embedding.word_embeddings.weight.detach()[:24]


def test_embeddings_are_multiplied_as_in_transformers() -> None:
    """By the square root of the hidden size rounded to the model's precision."""
    [(hidden, embeddings)] = run_ranks(_embed, 1)
    assert hidden.dtype == torch.bfloat16
    assert torch.equal(hidden, embeddings * torch.tensor(48**0.5, dtype=torch.bfloat16))


def _mean_logit_of(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean logits of a row's predictions among their statistics, and of all their logits."""
    world = World(rank, world_size, CPU)
    (chunk,) = random_context(LLAMA, ParallelPlan(), world, seed=1).chunks
    chunk.row_state.current, tokens = _fp8_row(24), torch.arange(24)
    predictions = Predictions(tokens[:18], tokens[1:19])
    with torch.no_grad():
        logits = chunk(tokens[None], tokens[None], replace(predictions, targets=None))
        chunk.statistics = True
        found = chunk(tokens[None], tokens[None], predictions)
    assert logits.size(1) > LLAMA.vocab_size  # the vocabulary is padded
    return found[1 + STATISTICS.index("mean_logit")], logits[:, : LLAMA.vocab_size].mean(1)


def test_statistics_leave_the_vocabulary_s_padding_out() -> None:
    [(found, expected)] = run_ranks(_mean_logit_of, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class _Logits(TorchDispatchMode):
    """Notes of how many predictions LLAMA's logits are computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and made.size(1) == LLAMA.vocab_size:
            self.rows.append(made.size(0))
        return made


def _chunked(rank: int, world_size: int) -> list[int]:
    """Predictions whose logits are computed at once, of 18 in a forward and its backward."""
    world = World(rank, world_size, CPU)
    (chunk,) = random_context(LLAMA, ParallelPlan(), world, seed=1, logprob_chunk_size=7).chunks
    chunk.row_state.current, tokens = _fp8_row(24), torch.arange(24)
    with _Logits() as logits:
        chunk(tokens[None], tokens[None], Predictions(tokens[:18], tokens[1:19])).sum().backward()
    return logits.rows


def test_no_more_logits_exist_at_once_than_are_allowed() -> None:
    assert run_ranks(_chunked, 1) == [[7, 7, 4, 7, 7, 4]]
