"""Tiny models under several plans of two ranks: built, run on one packed row, compared, saved."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from puzzle_align.layout.hf_config import from_hf_config, read_hf_config
from puzzle_align.layout.model import ModelOptions, ModelSpec, Recompute
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import RowLayout, Segment, position_ids
from puzzle_align.layout.rules import extents
from puzzle_align.models.attention import prepare_attention
from puzzle_align.models.chunk import ModelChunk, build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.hf.sources import RandomSource, SafetensorsSource, WeightSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.models.inputs import Predictions
from puzzle_align.models.shards import fill, parameters_of, slices, take_apart
from puzzle_align.runtime.checkpoint.writer import write_state
from puzzle_align.runtime.groups.world import World, build_communicators
from tests.bounds import gradient_bound

LAYOUT = RowLayout(32, (Segment(0, 10, (6, 5)), Segment(21, 4, (3,))))
EVERYWHERE = Predictions(torch.arange(LAYOUT.num_tokens), targets=None)
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
# By name: the family's class in transformers, and settings. The last of a family stands for it
# where each family is tested once.
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
    "gemma": ("Gemma", {"head_dim": 32}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.3,
        },
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
}


FAMILIES = {family.lower(): (family, changes) for family, changes in VARIANTS.values()}


def has_classifier(family: str) -> bool:
    """Whether transformers has a sequence classifier of the family."""
    import transformers

    return hasattr(transformers, f"{family}ForSequenceClassification")


def save_model(
    directory: Path, family: str, changes: dict, kind: str = "CausalLM", seed: int = 0
) -> Any:
    """A random Hugging Face model, saved, whose norms and biases are unlike those it starts with.

    Whoever draws tokens for it next draws them from ``seed``, too.
    """
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}For{kind}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return model


def sequences() -> Iterator[torch.Tensor]:
    """Places in the row of every prompt with one of its responses."""
    for segment in LAYOUT.segments:
        prompt = torch.arange(segment.start, segment.prompt_end)
        for span in segment.response_spans():
            yield torch.cat((prompt, torch.arange(*span)))


def saved_spec(directory: Path) -> ModelSpec:
    """Model spec that a saved model records."""
    return from_hf_config(read_hf_config(directory), str(directory))


def saved_chunks(directory: Path, plan: ParallelPlan, groups: Any) -> list[ModelChunk]:
    """This rank's chunks of a saved model under a plan."""
    return _build_chunks(saved_spec(directory), plan, groups, SafetensorsSource(directory))


def _build_chunks(
    spec: ModelSpec,
    plan: ParallelPlan,
    groups: Any,
    weights: WeightSource,
    recompute: Recompute = "none",
) -> list[ModelChunk]:
    options, chunks = ModelOptions(recompute=recompute), []
    for number in range(plan.virtual_pipeline):
        chunks.append(build_chunk(spec, options, plan, groups, chunk=number))
        load_weights(chunks[-1], spec, weights)
    return chunks


def loaded_chunks(
    spec: ModelSpec, label: str, groups: dict, recompute: Recompute = "none"
) -> list[ModelChunk]:
    """This rank's chunks under plan ``label``, of weights from one seed."""
    weights = RandomSource(spec, seed=7)
    return _build_chunks(spec, PLANS[label], groups[label], weights, recompute)


def small_spec(family: str) -> ModelSpec:
    """A tied model of a family, smaller than those that are saved."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    other = {"tie_word_embeddings": True, "rope_scaling": LLAMA3}
    changes = FAMILIES[family][1]
    return from_hf_config({**SIZES, **changes, **sizes, **other, "model_type": family}, family)


def own_groups(plan: ParallelPlan, rank: int):
    """Groups of ``plan`` that this rank is in; a replica on every rank if it needs one rank."""
    ranks = None if plan.world_size > 1 else [rank]
    world = World(rank, dist.get_world_size(), torch.device("cpu"))
    communicators = build_communicators(plan, world, ranks, trained=True)
    assert communicators is not None
    return communicators.groups


def groups_of_all(rank: int) -> dict[str, Any]:
    """This rank's groups of every plan, for models that are then built."""
    install_cpu_patches()
    return {label: own_groups(plan, rank) for label, plan in PLANS.items()}


def run(
    chunks: list[ModelChunk], tokens: torch.Tensor, asked: Predictions = EVERYWHERE
) -> torch.Tensor | None:
    """One forward through the pipeline, which is the world; None where there is no last chunk."""
    _, outputs = _forward(chunks, tokens, asked)
    return outputs[-1] if chunks[-1].is_last else None


def _neighbours() -> tuple[int, int]:
    """The pipeline's ranks before this one and behind it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


def _forward(
    chunks: list[ModelChunk], tokens: torch.Tensor, asked: Predictions
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Inputs of each chunk, and its outputs."""
    inputs, outputs = [], []
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    pipeline, (before, behind) = chunks[0].pg_collection.pp, _neighbours()
    for chunk in chunks:
        chunk.row_state.current = prepare_attention(LAYOUT, "segments", torch.device("cpu"))
        hidden = None
        if not chunk.is_first:
            hidden = torch.empty(LAYOUT.num_tokens, 1, chunk.config.hidden_size)
            dist.recv(hidden, before, group=pipeline)
            chunk.set_input_tensor(hidden.requires_grad_())
        inputs.append(hidden)
        outputs.append(chunk(tokens, positions, asked))
        assert chunk.decoder.input_tensor is None  # nor held until the next forward
        if not chunk.is_last:
            dist.send(outputs[-1].detach(), behind, group=pipeline)
    return inputs, outputs


def train_run(chunks: list[ModelChunk], tokens: torch.Tensor, asked: Predictions) -> None:
    """Forward and backward of the predictions' mean through the pipeline."""
    inputs, outputs = _forward(chunks, tokens, asked)
    pipeline, (before, behind) = chunks[0].pg_collection.pp, _neighbours()
    for chunk, hidden, output in zip(chunks[::-1], inputs[::-1], outputs[::-1], strict=True):
        if chunk.is_last:
            output.mean().backward()
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, behind, group=pipeline)
            output.backward(gradient)
        if hidden is not None:
            assert hidden.grad is not None
            dist.send(hidden.grad, before, group=pipeline)


def reduce_gradients(chunks: list[ModelChunk], spec: ModelSpec) -> None:
    """Reduce like Megatron's ``finalize_model_grads``: shared norms over T, tied tables over P."""
    groups = chunks[0].pg_collection
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            by_head = name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
            partial = by_head or getattr(parameter, "sequence_parallel", False)
            if partial and parameter.requires_grad:
                dist.all_reduce(parameter.grad, group=groups.tp)
    if spec.tie_word_embeddings and groups.pp.size() == 2:
        end = chunks[0] if groups.pp.rank() == 0 else chunks[-1]
        dist.all_reduce(end.shared_embedding_or_output_weight().grad, group=groups.embd)


def assert_gradients_agree(
    spec: ModelSpec,
    tokens: torch.Tensor,
    asked: Predictions,
    groups: dict,
    recompute: tuple[Recompute, ...],
) -> None:
    """Gradients under every plan and kind of recompute are those of the whole model on one rank."""
    (full,) = loaded_chunks(spec, "(1,1,1)", groups)
    train_run([full], tokens, asked)
    for label in PLANS:
        for kind in recompute:
            chunks = loaded_chunks(spec, label, groups, kind)
            train_run(chunks, tokens, asked)
            reduce_gradients(chunks, spec)
            _assert_gradients_equal(chunks, full, spec)


def _assert_gradients_equal(chunks: list[ModelChunk], full: ModelChunk, spec: ModelSpec) -> None:
    """The chunks' gradients are their shards of those of ``full``, which has the whole model.

    Relative to the largest of each Hugging Face tensor: of a fused bias, the queries' gradients are
    twenty times smaller than the values', and have an error twenty times smaller.
    """
    bound = gradient_bound(spec.intermediate_size, spec.num_hidden_layers)
    whole = {}
    for parameter, value in parameters_of(full, spec):
        gradient = value.grad
        assert gradient is not None, parameter.name
        whole |= dict(take_apart(gradient, parameter))
    for chunk in chunks:
        for parameter, value in parameters_of(chunk, spec):
            gradient = value.grad
            assert gradient is not None, parameter.name
            expected, scale = torch.empty_like(gradient), torch.empty_like(gradient)
            fill(expected, parameter, lambda name, _, box: whole[name][slices(box)])
            largest = {name: whole[name].abs().max() for name, _ in parameter.tensors}
            fill(scale, parameter, lambda name, _, box, m=largest: m[name].expand(extents(box)))
            assert ((gradient - expected).abs() <= bound * scale).all(), parameter.name
        if chunk.is_last and spec.head == "scalar":  # whose copies must never drift apart: bitwise
            gradient = chunk.head_weight.grad
            assert gradient is not None
            assert all(map(gradient.equal, gathered(gradient, chunk.pg_collection.tp)))


def gathered(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return parts


def _sharded(chunks: list[ModelChunk]) -> dict:
    """State of the chunks that a checkpoint takes."""
    return {f"chunk{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def assert_checkpoints_move(folder: Path, spec: ModelSpec, ring: list[str], groups: dict) -> None:
    for number, (saved, loaded) in enumerate(pairwise(ring)):
        _assert_checkpoint_moves(folder / str(number), spec, saved, loaded, groups)


def _assert_checkpoint_moves(
    path: Path, spec: ModelSpec, saved: str, loaded: str, groups: dict
) -> None:
    """A checkpoint written under plan ``saved`` fills the chunks of plan ``loaded``, bitwise."""
    from megatron.core import dist_checkpointing

    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    write_state(_sharded(loaded_chunks(spec, saved, groups)), path)
    chunks = loaded_chunks(spec, loaded, groups)
    expected = [{n: p.clone() for n, p in chunk.named_parameters()} for chunk in chunks]
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    loaded_state: Any = dist_checkpointing.load(_sharded(chunks), str(path))
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded_state[f"chunk{number}"])
        for name, parameter in chunk.named_parameters():
            assert torch.equal(parameter, expected[number][name]), f"{saved} -> {loaded}: {name}"
