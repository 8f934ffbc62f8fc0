"""Tiny models under several plans of two ranks: built, run on one packed row, compared, saved."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from puzzle_align.layout.model import ModelOptions, ModelSpec, RopeScaling
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment, position_ids
from puzzle_align.layout.rules import extents
from puzzle_align.models.attention import prepare_attention
from puzzle_align.models.build import ModelChunk, Predictions, build_chunk
from puzzle_align.models.hf_weights import RandomSource, load_weights, parameters_of
from puzzle_align.models.pieces import fill, slices, take_apart
from puzzle_align.runtime.checkpoint_writer import InProcessSave
from puzzle_align.runtime.groups import World, build_communicators
from tests.bounds import gradient_bound

LAYOUT = RowLayout(32, (Segment(0, 10, (6, 5)), Segment(21, 4, (3,))))
SINGLE = ParallelPlan()
PLANS = {
    "(1,1,1)": SINGLE,
    "(2,1,1)": ParallelPlan(pipeline=2),
    "(2,1,1) interleaved": ParallelPlan(pipeline=2, virtual_pipeline=2),
    "(2,1,1) uneven": ParallelPlan(pipeline=2, pipeline_layers=(1, 3)),
    "(1,1,2)": ParallelPlan(tensor=2),
    "(1,1,2) sequence parallel": ParallelPlan(tensor=2, sequence_parallel=True),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}
VARIANTS = {
    "llama grouped": ("Llama", {}),
    "llama multi-head": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama 3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama head_dim": ("Llama", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def loaded_chunks(
    spec: ModelSpec, label: str, groups: dict, recompute: str = "none"
) -> list[ModelChunk]:
    """This rank's chunks under plan ``label``, of weights from one seed."""
    chunks = []
    for number in range(PLANS[label].virtual_pipeline):
        options = ModelOptions(recompute=recompute)
        chunks.append(build_chunk(spec, options, PLANS[label], groups[label], chunk=number))
        load_weights(chunks[-1], spec, RandomSource(spec, seed=7))
    return chunks


def random_spec(family: str, *, qk_norm: bool = False, attention_bias: bool = False) -> ModelSpec:
    """A tied model of a family that has what the flags say."""
    scaling = RopeScaling(**{k: v for k, v in LLAMA3.items() if not k.startswith("rope")})
    sizes = {k: v for k, v in SIZES.items() if k != "attn_implementation"}
    return ModelSpec(
        model_type=family,
        head_dim=16,
        rope_scaling=scaling,
        tie_word_embeddings=True,
        **{**sizes, "hidden_size": 32, "intermediate_size": 48},
        qk_norm=qk_norm,
        attention_bias=attention_bias,
    )


def own_groups(plan: ParallelPlan, rank: int):
    """Groups of ``plan`` that this rank is in; a replica on every rank if it needs one rank."""
    ranks = None if plan.world_size > 1 else [rank]
    world = World(rank, dist.get_world_size(), torch.device("cpu"))
    communicators = build_communicators(plan, world, ranks, trained=True)
    assert communicators is not None
    return communicators.groups


def run(
    chunks: list[ModelChunk], tokens: torch.Tensor, asked: Predictions | None
) -> torch.Tensor | None:
    """One forward through the pipeline, which is the world; None where there is no last chunk."""
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    pipeline = chunks[0].pg_collection.pp
    before, behind = ((dist.get_rank() + step) % dist.get_world_size() for step in (-1, 1))
    output = None
    for chunk in chunks:
        chunk.row_state.current = prepare_attention(LAYOUT, "segments", torch.device("cpu"))
        if not chunk.is_first:
            hidden = torch.empty(LAYOUT.num_tokens, 1, chunk.config.hidden_size)
            dist.recv(hidden, before, group=pipeline)
            chunk.set_input_tensor(hidden.requires_grad_())
        output = chunk(tokens, positions, asked)
        if not chunk.is_last:
            dist.send(output.detach(), behind, group=pipeline)
    return output if chunks[-1].is_last else None


def train_run(chunks: list[ModelChunk], tokens: torch.Tensor, asked: Predictions) -> None:
    """Forward and backward of the predictions' mean through the pipeline."""
    outputs, inputs = [], []
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    pipeline, peer = chunks[0].pg_collection.pp, 1 - dist.get_rank()
    for chunk in chunks:
        chunk.row_state.current = prepare_attention(LAYOUT, "segments", torch.device("cpu"))
        hidden = None
        if not chunk.is_first:
            hidden = torch.empty(LAYOUT.num_tokens, 1, chunk.config.hidden_size)
            dist.recv(hidden, peer, group=pipeline)
            chunk.set_input_tensor(hidden.requires_grad_())
        inputs.append(hidden)
        outputs.append(chunk(tokens, positions, asked))
        if not chunk.is_last:
            dist.send(outputs[-1].detach(), peer, group=pipeline)
    for chunk, hidden, output in zip(chunks[::-1], inputs[::-1], outputs[::-1], strict=True):
        if chunk.is_last:
            output.mean().backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, peer, group=pipeline)
            output.backward(gradient)
        if not chunk.is_first:
            dist.send(hidden.grad, peer, group=pipeline)


def reduce_gradients(chunks: list[ModelChunk], spec: ModelSpec) -> None:
    """What Megatron's ``finalize_model_grads`` does: shared norms over T, tied tables over P."""
    groups = chunks[0].pg_collection
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            by_head = name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
            if by_head or getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=groups.tp)
    if spec.tie_word_embeddings and groups.pp.size() == 2:
        end = chunks[0] if groups.pp.rank() == 0 else chunks[-1]
        dist.all_reduce(end.shared_embedding_or_output_weight().grad, group=groups.embd)


def assert_gradients_equal(chunks: list[ModelChunk], full: ModelChunk, spec: ModelSpec) -> None:
    """The chunks' gradients are their shards of those of ``full``, which has the whole model.

    Relative to the largest of each Hugging Face tensor: of a fused bias, the queries' gradients are
    twenty times smaller than the values', and have an error twenty times smaller.
    """
    bound = gradient_bound(spec.intermediate_size, spec.num_hidden_layers)
    whole = {}
    values = dict(full.named_parameters())
    for parameter in parameters_of(full, spec, 1, 0):
        gradient = values[parameter.name].grad
        assert gradient is not None, parameter.name
        whole |= dict(take_apart(gradient, parameter))
    for chunk in chunks:
        values, group = dict(chunk.named_parameters()), chunk.pg_collection.tp
        for parameter in parameters_of(chunk, spec, group.size(), group.rank()):
            gradient = values.pop(parameter.name).grad
            assert gradient is not None, parameter.name
            expected, scale = torch.empty_like(gradient), torch.empty_like(gradient)
            fill(expected, parameter, lambda name, _, box: whole[name][slices(box)])
            largest = {name: whole[name].abs().max() for name, _ in parameter.tensors}
            fill(scale, parameter, lambda name, _, box, m=largest: m[name].expand(extents(box)))
            assert ((gradient - expected).abs() <= bound * scale).all(), parameter.name
        assert not values


def sharded(chunks: list[ModelChunk]) -> dict:
    """What a checkpoint takes of them."""
    return {f"chunk{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def assert_checkpoint_moves(
    path: Path, spec: ModelSpec, saved: str, loaded: str, groups: dict
) -> None:
    """A checkpoint written under plan ``saved`` fills the chunks of plan ``loaded``, bitwise."""
    from megatron.core import dist_checkpointing

    path.mkdir(exist_ok=True)
    dist.barrier()
    state = sharded(loaded_chunks(spec, saved, groups))
    dist_checkpointing.save(state, str(path), sharded_strategy=InProcessSave())
    chunks = loaded_chunks(spec, loaded, groups)
    expected = [{n: p.clone() for n, p in chunk.named_parameters()} for chunk in chunks]
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    loaded_state: Any = dist_checkpointing.load(sharded(chunks), str(path))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded_state[f"chunk{number}"])
        for name, parameter in chunk.named_parameters():
            assert torch.equal(parameter, expected[number][name]), f"{saved} -> {loaded}: {name}"
