"""Models on two ranks against Hugging Face's of the same weights, and what plans share.

The parent process saves tiny random models with transformers and computes what they say about each
sequence alone; the ranks load the same directories under several plans and run one packed,
prefix-shared row. The scores are those of sequence classifiers.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from puzzle_align.layout.model import ModelOptions, ModelSpec, Recompute, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import position_ids, predictions
from puzzle_align.models.attention import prepare_attention
from puzzle_align.models.chunk import build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.hf.sources import SafetensorsSource
from puzzle_align.models.hf.weights import load_weights
from puzzle_align.models.inputs import Predictions
from puzzle_align.models.layers import RMSNorm
from puzzle_align.runtime.checkpoint.writer import write_state
from puzzle_align.runtime.groups.limits import set_cuda_defaults
from tests.bounds import LOGIT_BOUND, fp32_bound
from tests.dist.chunk_runs import (
    FAMILIES,
    LAYOUT,
    PLANS,
    SINGLE,
    SIZES,
    VARIANTS,
    assert_checkpoints_move,
    assert_gradients_agree,
    gathered,
    groups_of_all,
    has_classifier,
    loaded_chunks,
    own_groups,
    run,
    save_model,
    saved_chunks,
    saved_spec,
    sequences,
    small_spec,
)
from tests.dist.spawn import run_ranks

USED = 28
# Others have each part of them: their families, tied tables, ``head_dim`` or Llama's layers.
SLOW = ("llama grouped", "llama tied", "llama head_dim", "mistral", "qwen2")
FAST = tuple(name for name in VARIANTS if name not in SLOW)


@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=len)
def test_logits_equal_hugging_face(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        _save_reference(tmp_path / name, *VARIANTS[name])
    worst = run_ranks(_logits_on_ranks, 2, str(tmp_path), names)[1]
    assert set(worst) == {f"{name} {plan}" for name in names for plan in PLANS}
    assert all(error <= LOGIT_BOUND for errors in worst.values() for error in errors), worst


UNEVEN = {  # by P: number of layers, plan
    2: [
        (5, ParallelPlan(pipeline=2, pipeline_layers=(2, 3))),
        (7, ParallelPlan(pipeline=2, pipeline_layers=(6, 1))),
        (5, ParallelPlan(pipeline=2, virtual_pipeline=2, pipeline_layers=(1, 2, 1, 1))),
        (7, ParallelPlan(pipeline=2, virtual_pipeline=2, pipeline_layers=(3, 1, 1, 2))),
    ],
    3: [
        (5, ParallelPlan(pipeline=3, pipeline_layers=(1, 3, 1))),
        (7, ParallelPlan(pipeline=3, pipeline_layers=(3, 2, 2))),
        (7, ParallelPlan(pipeline=3, virtual_pipeline=2, pipeline_layers=(1, 1, 2, 1, 1, 1))),
    ],
    4: [
        (5, ParallelPlan(pipeline=4, pipeline_layers=(1, 1, 2, 1))),
        (7, ParallelPlan(pipeline=4, pipeline_layers=(2, 1, 1, 3))),
    ],
}


# ``PLANS`` has an uneven pipeline of two.
@pytest.mark.parametrize(
    "pipeline", [3, *(pytest.param(p, marks=pytest.mark.slow) for p in (2, 4))]
)
def test_logits_of_uneven_pipelines_equal_hugging_face(pipeline: int, tmp_path: Path) -> None:
    for number in (5, 7):
        changes = {"num_hidden_layers": number, "tie_word_embeddings": number == 7}
        _save_reference(tmp_path / str(number), "Qwen3", changes)
    worst = run_ranks(_uneven_logits_on_ranks, pipeline, str(tmp_path))[-1]
    assert len(worst) == len(UNEVEN[pipeline])
    assert all(error <= LOGIT_BOUND for error in worst), worst


def _uneven_logits_on_ranks(rank: int, world_size: int, folder: str) -> list[float]:
    install_cpu_patches()
    worst = []
    for number, plan in UNEVEN[world_size]:
        directory = Path(folder) / str(number)
        tokens, expected = torch.load(directory / "expected.pt")
        chunks = saved_chunks(directory, plan, own_groups(plan, rank))
        with torch.no_grad():
            logits = run(chunks, tokens)
        if logits is not None:
            error = logits[:USED, : expected.size(1)] - expected[:USED]
            worst.append(error.abs().max().item())
    return worst


P2, UNEVEN_P2, INTERLEAVED = "(2,1,1)", "(2,1,1) uneven", "(2,1,1) interleaved"
T2, SEQUENCE = "(1,1,2)", "(1,1,2) sequence parallel"
FULL: tuple[Recompute, ...] = ("full",)


def test_gradients_and_checkpoints_do_not_depend_on_the_plan(tmp_path: Path) -> None:
    families = {"qwen2": FULL, "qwen3": (*FULL, "none", "selective"), "phi3": FULL}
    run_ranks(_gradients_on_ranks, 2, families)
    run_ranks(_scalar_head_and_extra_state_on_ranks, 2, tmp_path)


@pytest.mark.slow  # others have each part of them, and ``test_checkpoint`` moves whole runs
def test_and_so_they_do_not_of_other_families(tmp_path: Path) -> None:
    others = dict.fromkeys((family for family in FAMILIES if family not in ("qwen3", "phi3")), FULL)
    run_ranks(_gradients_on_ranks, 2, {**others, "qwen2": ("none", "selective")})
    run_ranks(_checkpoints_on_ranks, 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("implementation", ["local", "te"])
@pytest.mark.parametrize("name", ["llama grouped", "qwen2", "qwen3", "gemma", "phi3", "granite"])
def test_layer_implementations_on_a_gpu(name: str, implementation: str, tmp_path: Path) -> None:
    if implementation == "te":
        pytest.importorskip("transformer_engine")
    _save_reference(tmp_path, *VARIANTS[name])
    arguments = (str(tmp_path), implementation)
    assert run_ranks(_logits_on_gpu, 1, *arguments, fresh=True)[0] <= LOGIT_BOUND


def _logits_on_gpu(
    _rank: int, _world_size: int, folder: str, implementation: Literal["local", "te"]
) -> float:
    set_cuda_defaults()
    spec = saved_spec(Path(folder))
    options = ModelOptions(transformer_impl=implementation)
    chunk = build_chunk(spec, options, SINGLE, own_groups(SINGLE, rank=0))
    load_weights(chunk, spec, SafetensorsSource(folder))
    tokens, expected = torch.load(Path(folder) / "expected.pt")
    chunk.row_state.current = prepare_attention(LAYOUT, "dense", torch.device("cuda"))
    positions = torch.from_numpy(position_ids(LAYOUT))[None]
    asked = Predictions(torch.arange(USED, device="cuda"), targets=None)
    with torch.no_grad():
        logits = chunk(tokens.cuda(), positions.cuda(), asked)[:, : spec.vocab_size]
    return (logits.cpu() - expected[:USED]).abs().max().item()


def _save_reference(directory: Path, family: str, changes: dict) -> None:
    model = save_model(directory, family, changes)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, LAYOUT.num_tokens))
    logits = torch.zeros(LAYOUT.num_tokens, SIZES["vocab_size"])
    with torch.no_grad():
        for where in sequences():
            logits[where] = model(tokens[:, where]).logits[0]
    torch.save((tokens, logits), directory / "expected.pt")


def _logits_on_ranks(rank: int, _world_size: int, folder: str, names: tuple[str, ...]) -> dict:
    worst, groups = {}, groups_of_all(rank)
    for name in names:
        directory = Path(folder) / name
        spec = saved_spec(directory)
        tokens, expected = torch.load(directory / "expected.pt")
        source, target = (torch.from_numpy(x) for x in predictions(LAYOUT)[:2])
        targets = tokens[0, target]
        asked = Predictions(source, targets, temperature=1.5, entropies=True)
        softmax = torch.distributions.Categorical(logits=expected[source] / asked.temperature)
        of_softmax = torch.stack([softmax.log_prob(targets), softmax.entropy()])
        for label, plan in PLANS.items():
            chunks = saved_chunks(directory, plan, groups[label])
            with torch.no_grad():
                logits = run(chunks, tokens)
                some = run(chunks, tokens, Predictions(source, None))
                got = run(chunks, tokens, asked)
            if logits is not None and some is not None and got is not None:
                # The head's kernel may sum in another order for fewer tokens.
                bound = fp32_bound(spec.hidden_size) * logits.abs().max().item()
                torch.testing.assert_close(some, logits[source], rtol=0, atol=bound)
                logits = torch.cat(gathered(logits, chunks[0].pg_collection.tp), -1)
                logits = logits[:USED, : spec.vocab_size]
                worst[f"{name} {label}"] = (
                    (logits - expected[:USED]).abs().max().item(),
                    (got - of_softmax).abs().max().item(),
                )
    return worst


def _gradients_on_ranks(
    rank: int, _world_size: int, families: dict[str, tuple[Recompute, ...]]
) -> None:
    groups, tokens = groups_of_all(rank), _tokens()
    source, target = (torch.from_numpy(x) for x in predictions(LAYOUT)[:2])
    plain = Predictions(source, tokens[0, target])
    tempered = replace(plain, temperature=1.5, entropies=True)
    for family, recompute in families.items():
        asked = plain if family == "qwen3" else tempered
        assert_gradients_agree(small_spec(family), tokens, asked, groups, recompute)


def _tokens() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(0, 300, (1, LAYOUT.num_tokens))


def _scalar_head_and_extra_state_on_ranks(rank: int, _world_size: int, folder: Path) -> None:
    groups, spec = groups_of_all(rank), small_spec("qwen3")
    scalar = with_scalar_head(spec)
    assert_gradients_agree(scalar, _tokens(), _asked(), groups, ("none", "full"))
    ring = [P2, SEQUENCE, INTERLEAVED, UNEVEN_P2, P2]
    assert_checkpoints_move(folder / "scalar", scalar, ring, groups)
    _assert_extra_state_is_left_out(folder / "extra", spec, groups)
    _assert_other_heads_are_refused(
        folder / "language", replace(spec, tie_word_embeddings=False), groups
    )


def _assert_other_heads_are_refused(path: Path, spec: ModelSpec, groups: dict) -> None:
    """A scalar head does not take the first row of a language model's."""
    from megatron.core import dist_checkpointing

    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    write_state(loaded_chunks(spec, T2, groups)[0].sharded_state_dict(), path)
    (scalar,) = loaded_chunks(with_scalar_head(spec), T2, groups)
    with pytest.raises(CheckpointException, match="Global shape mismatch"):
        dist_checkpointing.load(scalar.sharded_state_dict(), str(path))


def _checkpoints_on_ranks(rank: int, _world_size: int, folder: Path) -> None:
    ring = [P2, UNEVEN_P2, SEQUENCE, INTERLEAVED, UNEVEN_P2, T2, P2]
    assert_checkpoints_move(folder, small_spec("qwen3"), ring, groups_of_all(rank))


class _NormWithExtraState(RMSNorm):
    """Norm with extra state, as Transformer Engine's modules have: empty but under FP8."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None:
        raise AssertionError(f"extra state was saved: {state}")


def _assert_extra_state_is_left_out(path: Path, spec: ModelSpec, groups: dict) -> None:
    """Checkpoints of modules with extra state and of those without load into each other."""
    from megatron.core import dist_checkpointing

    plain, extra = (loaded_chunks(spec, "(1,1,2)", groups)[0] for _ in range(2))
    for module in extra.modules():
        if isinstance(module, RMSNorm):
            module.__class__ = _NormWithExtraState
    assert any(key.endswith("_extra_state") for key in extra.state_dict())
    for number, (source, target) in enumerate([(plain, extra), (extra, plain)]):
        folder = path / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        write_state(source.sharded_state_dict(), folder)
        loaded: Any = dist_checkpointing.load(target.sharded_state_dict(), str(folder))
        target.load_state_dict(loaded)
    weight = next(iter(dict(extra.named_parameters())))
    del loaded[weight]
    with pytest.raises(RuntimeError, match=weight):
        extra.load_state_dict(loaded)


CLASSIFIERS = {name: variant for name, variant in VARIANTS.items() if has_classifier(variant[0])}
LAST_TOKENS = [15, 20, 27]  # of the row's responses: 10 + 6, 5 more, 21 + 4 + 3


# Logits prove the layers, and these the head.
HEADS = ("qwen2 tied", "gemma", "phi3")
OTHERS = tuple(name for name in CLASSIFIERS if name not in HEADS)


@pytest.mark.parametrize("names", [HEADS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_rewards_equal_hugging_face(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        _save_classifier(tmp_path / name, *CLASSIFIERS[name])
    worst = run_ranks(_rewards_on_ranks, 2, str(tmp_path), names)[1]
    assert set(worst) == {f"{name} {plan}" for name in names for plan in PLANS}
    assert all(error <= LOGIT_BOUND for error in worst.values()), worst


def _save_classifier(directory: Path, family: str, changes: dict) -> None:
    changes = {**changes, "num_labels": 1}
    model = save_model(directory, family, changes, "SequenceClassification")
    tokens = torch.randint(0, SIZES["vocab_size"], (1, LAYOUT.num_tokens))
    with torch.no_grad():
        scores = [model(tokens[:, where]).logits[0, 0] for where in sequences()]
    torch.save((tokens, torch.stack(scores)), directory / "expected.pt")


def _asked() -> Predictions:
    return Predictions(torch.tensor(LAST_TOKENS), torch.zeros(len(LAST_TOKENS), dtype=torch.int64))


def _rewards_on_ranks(
    rank: int, _world_size: int, folder: str, names: tuple[str, ...]
) -> dict[str, float]:
    worst, groups = {}, groups_of_all(rank)
    for name in names:
        directory = Path(folder) / name
        spec = saved_spec(directory)
        assert spec.head == "scalar"
        tokens, expected = torch.load(directory / "expected.pt")
        assert expected.std() > 0.01
        for label, plan in PLANS.items():
            chunks = saved_chunks(directory, plan, groups[label])
            with torch.no_grad():
                everywhere = run(chunks, tokens)
                rewards = run(chunks, tokens, _asked())
            if everywhere is not None and rewards is not None:
                assert (rewards.dtype, rewards.shape) == (torch.float32, (3,))
                # The head's kernel may sum in another order for fewer tokens.
                bound = fp32_bound(spec.hidden_size) * everywhere.abs().max().item()
                torch.testing.assert_close(everywhere[LAST_TOKENS], rewards, rtol=0, atol=bound)
                worst[f"{name} {label}"] = (rewards - expected).abs().max().item()
    return worst
