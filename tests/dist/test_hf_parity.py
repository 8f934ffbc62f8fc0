"""Models on two ranks against Hugging Face's, of the same weights: logits, and what plans share.

The parent process saves tiny random models with transformers and computes what they say about each
sequence alone; the ranks load the same directories under several plans and run one packed,
prefix-shared row.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from puzzle_align.models.attention import prepare
from puzzle_align.models.build import ModelChunk, Predictions, build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.hf_weights import (
    RandomSource,
    _chunk_rules,
    load_weights,
    open_weights,
)
from puzzle_align.models.norm import RMSNorm
from puzzle_align.runtime.checkpoint_writer import InProcessSave
from puzzle_align.runtime.groups import build_groups, forbid_tf32
from puzzle_align.spec.model import (
    ModelOptions,
    ModelSpec,
    RopeScaling,
    from_hf_config,
    read_hf_config,
)
from puzzle_align.spec.plan import ParallelPlan
from puzzle_align.spec.rows import RowLayout, Segment, position_ids, predictions
from tests.dist.spawn import run_ranks

LAYOUT = RowLayout(32, (Segment(0, 10, (6, 5)), Segment(21, 4, (3,))))
USED = 28
SINGLE = ParallelPlan()
PLANS = {
    "(1,1,1)": SINGLE,
    "(2,1,1)": ParallelPlan(pipeline=2),
    "(2,1,1) interleaved": ParallelPlan(pipeline=2, virtual_pipeline=2),
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


def test_logits_equal_hugging_face(tmp_path: Path) -> None:
    for name, (family, changes) in VARIANTS.items():
        _save_reference(tmp_path / name, family, changes)
    worst = run_ranks(_logits_on_ranks, 2, str(tmp_path))[1]
    for case, (logit_error, log_prob_error) in sorted(worst.items()):
        print(f"{case:45s} logits {logit_error:.1e}  log-probabilities {log_prob_error:.1e}")
    assert set(worst) == {f"{name} {plan}" for name in VARIANTS for plan in PLANS}
    assert max(max(errors) for errors in worst.values()) <= 1e-4


def test_gradients_and_checkpoints_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    run_ranks(_gradients_and_checkpoints_on_ranks, 2, str(tmp_path))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("implementation", ["local", "te"])
@pytest.mark.parametrize("name", ["llama grouped", "qwen2", "qwen3"])
def test_layer_implementations_on_a_gpu(name: str, implementation: str, tmp_path: Path) -> None:
    if implementation == "te":
        pytest.importorskip("transformer_engine")
    _save_reference(tmp_path, *VARIANTS[name])
    assert run_ranks(_logits_on_gpu, 1, str(tmp_path), implementation)[0] <= 1e-4


def _logits_on_gpu(_rank: int, _world_size: int, folder: str, implementation: str) -> float:
    forbid_tf32()
    spec = from_hf_config(read_hf_config(folder), folder)
    options = ModelOptions(transformer_impl=implementation)
    chunk = build_chunk(spec, options, SINGLE, build_groups(SINGLE))
    load_weights(chunk, spec, open_weights(folder))
    tokens, expected = torch.load(Path(folder) / "expected.pt")
    chunk.row_state.current = prepare(LAYOUT, "dense", torch.device("cuda"))
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    with torch.no_grad():
        logits = chunk(tokens.cuda(), positions.cuda())[0, :USED, : spec.vocab_size]
    return (logits.cpu() - expected[:USED]).abs().max().item()


def _save_reference(directory: Path, family: str, changes: dict) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    tokens = torch.randint(0, config.vocab_size, (1, LAYOUT.num_tokens))
    logits = torch.zeros(LAYOUT.num_tokens, config.vocab_size)
    with torch.no_grad():
        for segment in LAYOUT.segments:
            prompt = torch.arange(segment.start, segment.prompt_end)
            for start, end in segment.response_spans():
                where = torch.cat((prompt, torch.arange(start, end)))
                logits[where] = model(tokens[:, where]).logits[0]
    torch.save((tokens, logits), directory / "expected.pt")


def _logits_on_ranks(rank: int, _world_size: int, folder: str) -> dict:
    install_cpu_patches()
    worst = {}
    groups = {label: _own_groups(plan, rank) for label, plan in PLANS.items()}
    for name in VARIANTS:
        directory = Path(folder) / name
        spec = from_hf_config(read_hf_config(directory), str(directory))
        tokens, expected = torch.load(directory / "expected.pt")
        source, target = (torch.from_numpy(x) for x in predictions(LAYOUT)[:2])
        asked = Predictions(source, tokens[0, target])
        log_probs = torch.log_softmax(expected, -1)[source, asked.targets]
        for label, plan in PLANS.items():
            chunks = [
                build_chunk(spec, ModelOptions(), plan, groups[label], chunk=number)
                for number in range(plan.virtual_pipeline)
            ]
            for chunk in chunks:
                load_weights(chunk, spec, open_weights(directory))
            with torch.no_grad():
                logits = _run(chunks, tokens, None)
                got = _run(chunks, tokens, asked)
            if logits is not None and got is not None:
                logits = _gathered(logits, chunks[0])[0, :USED, : spec.vocab_size]
                worst[f"{name} {label}"] = (
                    (logits - expected[:USED]).abs().max().item(),
                    (got - log_probs).abs().max().item(),
                )
    return worst


def _gradients_and_checkpoints_on_ranks(rank: int, _world_size: int, folder: str) -> None:
    install_cpu_patches()
    groups = {label: _own_groups(plan, rank) for label, plan in PLANS.items()}
    torch.manual_seed(3)
    tokens = torch.randint(0, 300, (1, LAYOUT.num_tokens))
    source, target = (torch.from_numpy(x) for x in predictions(LAYOUT)[:2])
    asked = Predictions(source, tokens[0, target])
    for spec in (_random_spec("qwen3", qk_norm=True), _random_spec("qwen2", attention_bias=True)):
        full = _loaded_chunks(spec, "(1,1,1)", groups)[0]
        _train_run([full], tokens, asked)
        for label in PLANS:
            for recompute in ("none", "full", "selective"):
                chunks = _loaded_chunks(spec, label, groups, recompute)
                _train_run(chunks, tokens, asked)
                _reduce_gradients(chunks, spec)
                _assert_gradients_equal(chunks, full, spec)
    spec = _random_spec("qwen3", qk_norm=True)
    ring = ["(2,1,1)", "(1,1,2) sequence parallel", "(2,1,1) interleaved", "(1,1,2)", "(2,1,1)"]
    for number, (saved, loaded) in enumerate(pairwise(ring)):
        _assert_checkpoint_moves(Path(folder) / str(number), spec, saved, loaded, groups)
    _assert_extra_state_is_left_out(Path(folder) / "extra", spec, groups)


def _loaded_chunks(
    spec: ModelSpec, label: str, groups: dict, recompute: str = "none"
) -> list[ModelChunk]:
    chunks = []
    for number in range(PLANS[label].virtual_pipeline):
        options = ModelOptions(recompute=recompute)
        chunks.append(build_chunk(spec, options, PLANS[label], groups[label], chunk=number))
        load_weights(chunks[-1], spec, RandomSource(spec, seed=7))
    return chunks


def _random_spec(family: str, **traits: bool) -> ModelSpec:
    scaling = RopeScaling(**{k: v for k, v in LLAMA3.items() if not k.startswith("rope")})
    sizes = {k: v for k, v in SIZES.items() if k != "attn_implementation"}
    return ModelSpec(
        model_type=family,
        head_dim=16,
        rope_scaling=scaling,
        tie_word_embeddings=True,
        **{**sizes, "hidden_size": 32, "intermediate_size": 48},
        **traits,
    )


def _own_groups(plan: ParallelPlan, rank: int):
    """Groups of ``plan`` that this rank is in; two replicas side by side if it needs one rank."""
    if plan.world_size == 2:
        return build_groups(plan)
    return [build_groups(plan, [0]), build_groups(plan, [1])][rank]


def _run(
    chunks: list[ModelChunk], tokens: torch.Tensor, asked: Predictions | None
) -> torch.Tensor | None:
    """One forward through the pipeline; None where this rank has no last chunk."""
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    pipeline = chunks[0].pg_collection.pp
    output = None
    for chunk in chunks:
        chunk.row_state.current = prepare(LAYOUT, "segments", torch.device("cpu"))
        if not chunk.is_first:
            hidden = torch.empty(LAYOUT.num_tokens, 1, chunk.config.hidden_size)
            dist.recv(hidden, 1 - dist.get_rank(), group=pipeline)
            chunk.set_input_tensor(hidden.requires_grad_())
        output = chunk(tokens, positions, asked)
        if not chunk.is_last:
            dist.send(output.detach(), 1 - dist.get_rank(), group=pipeline)
    return output if chunks[-1].is_last else None


def _train_run(chunks: list[ModelChunk], tokens: torch.Tensor, asked: Predictions) -> None:
    """Forward and backward of ``mean(log-probabilities)`` through the pipeline."""
    outputs, inputs = [], []
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    pipeline, peer = chunks[0].pg_collection.pp, 1 - dist.get_rank()
    for chunk in chunks:
        chunk.row_state.current = prepare(LAYOUT, "segments", torch.device("cpu"))
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


def _reduce_gradients(chunks: list[ModelChunk], spec: ModelSpec) -> None:
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


def _assert_gradients_equal(chunks: list[ModelChunk], full: ModelChunk, spec: ModelSpec) -> None:
    whole = {}
    parameters = dict(full.named_parameters())
    for hf_names, name, rule in _chunk_rules(full, spec, set(parameters)):
        gradient = parameters[name].grad
        assert gradient is not None, name
        whole.update(zip(hf_names, rule.operator.split(spec, gradient), strict=True))
    for chunk in chunks:
        own, group = dict(chunk.named_parameters()), chunk.pg_collection.tp
        for hf_names, name, rule in _chunk_rules(chunk, spec, set(own)):
            boxes = rule.operator.boxes(spec, rule.shapes(spec), group.size(), group.rank())
            parts = [
                whole[hf_name][tuple(slice(*span) for span in box)]
                for hf_name, box in zip(hf_names, boxes, strict=True)
            ]
            expected = rule.operator.merge(spec, parts, group.size())
            scale = whole[hf_names[0]].abs().max()
            gradient = own[name].grad
            assert gradient is not None, name
            assert (gradient - expected).abs().max() <= 1e-5 * scale, name


def _sharded(chunks: list[ModelChunk]) -> dict:
    return {f"chunk{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def _assert_checkpoint_moves(
    path: Path, spec: ModelSpec, saved: str, loaded: str, groups: dict
) -> None:
    """A checkpoint written under plan ``saved`` fills the chunks of plan ``loaded``, bitwise."""
    from megatron.core import dist_checkpointing

    path.mkdir(exist_ok=True)
    dist.barrier()
    state = _sharded(_loaded_chunks(spec, saved, groups))
    dist_checkpointing.save(state, str(path), sharded_strategy=InProcessSave())
    chunks = _loaded_chunks(spec, loaded, groups)
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


class _NormWithExtraState(RMSNorm):
    """As Transformer Engine's modules, which have some, empty but under FP8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None:
        raise AssertionError(f"extra state was saved: {state}")


def _assert_extra_state_is_left_out(path: Path, spec: ModelSpec, groups: dict) -> None:
    """Checkpoints of modules with extra state and of those without load into each other."""
    from megatron.core import dist_checkpointing

    plain, extra = (_loaded_chunks(spec, "(1,1,2)", groups)[0] for _ in range(2))
    for module in extra.modules():
        if isinstance(module, RMSNorm):
            module.__class__ = _NormWithExtraState
    assert any(key.endswith("_extra_state") for key in extra.state_dict())
    for number, (source, target) in enumerate([(plain, extra), (extra, plain)]):
        folder = path / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = source.sharded_state_dict()
        dist_checkpointing.save(state, str(folder), sharded_strategy=InProcessSave())
        loaded: Any = dist_checkpointing.load(target.sharded_state_dict(), str(folder))
        target.load_state_dict(loaded)
    weight = next(iter(dict(extra.named_parameters())))
    del loaded[weight]
    with pytest.raises(RuntimeError, match=weight):
        extra.load_state_dict(loaded)


def _gathered(logits: torch.Tensor, chunk: ModelChunk) -> torch.Tensor:
    group = chunk.pg_collection.tp
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)
