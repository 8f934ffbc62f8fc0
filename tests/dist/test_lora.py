"""Models with adapters against PEFT's, of the same base and adapters: logits and gradients.

The parent process saves tiny models and random adapters with transformers and PEFT, and computes
what they say about each sequence alone; the ranks load the same directories under several plans.
That the gradients do not depend on further plans is in ``test_plans_agree``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.layout.model import LORA_TARGETS, LoraSpec, ModelOptions, without_adapters
from puzzle_align.layout.rows import predictions
from puzzle_align.layout.weights import is_trained
from puzzle_align.models.chunk import ModelChunk, build_chunk
from puzzle_align.models.hf.adapters import adapter_problems, open_adapters
from puzzle_align.models.hf.sources import SafetensorsSource
from puzzle_align.models.hf.weights import load_adapters, load_weights
from puzzle_align.models.inputs import Predictions
from puzzle_align.models.shards import Shards, fill, parameters_of, slices
from tests.bounds import LOGIT_BOUND, gradient_bound
from tests.dist.chunk_runs import (
    LAYOUT,
    PLANS,
    SIZES,
    gathered,
    groups_of_all,
    reduce_gradients,
    run,
    save_model,
    saved_spec,
    sequences,
    train_run,
)
from tests.dist.spawn import run_ranks

peft = pytest.importorskip("peft")  # the extra of that name
pytestmark = pytest.mark.slow

USED = 28
LORA = LoraSpec(r=4, lora_alpha=6.0, target_modules=LORA_TARGETS, use_rslora=True)
SOME = LoraSpec(r=2, lora_alpha=2.0, target_modules=("q_proj", "v_proj", "down_proj"))
CASES = {
    "llama": ("Llama", {}, LORA),
    "llama, some": ("Llama", {}, SOME),
    "qwen3": ("Qwen3", {"head_dim": 32}, LORA),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_pefts(case: str, tmp_path: Path) -> None:
    family, changes, lora = CASES[case]
    _save(tmp_path, family, changes, lora)
    worst = run_ranks(_on_ranks, 2, tmp_path, lora)[1]
    assert worst.keys() == PLANS.keys()
    assert all(error <= LOGIT_BOUND for error in worst.values()), worst


def _save(directory: Path, family: str, changes: dict, lora: LoraSpec) -> None:
    """A model and adapters; logits, logits of the base, and gradients of the mean prediction."""
    base = save_model(directory, family, changes)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, LAYOUT.num_tokens))
    plain = _logits(base, tokens).detach()
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,  # type: ignore[arg-type]  # floats work
        target_modules=list(lora.target_modules),
        use_rslora=lora.use_rslora,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config)
    model.save_pretrained(str(directory / "adapters"))
    logits = _logits(model, tokens)
    source, target = (torch.from_numpy(x) for x in predictions(LAYOUT)[:2])
    mean = 0.0
    for where in sequences():
        output = model(tokens[:, where]).logits[0].log_softmax(-1)
        # Predictions of this sequence's own tokens behind the prompt.
        for place, position in enumerate(where.tolist()):
            for s, t in zip(source.tolist(), target.tolist(), strict=True):
                if s == position and t in where.tolist():
                    mean = mean + output[place, tokens[0, t]] / len(source)
    assert isinstance(mean, torch.Tensor)
    mean.backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    torch.save((tokens, plain, logits.detach(), gradients), directory / "expected.pt")


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = torch.zeros(LAYOUT.num_tokens, SIZES["vocab_size"])
    for where in sequences():
        logits[where] = model(tokens[:, where]).logits[0]
    return logits


def _on_ranks(rank: int, _world_size: int, folder: Path, lora: LoraSpec) -> dict[str, float]:
    """Errors of the logits, by plan; gradients are compared here."""
    worst, groups = {}, groups_of_all(rank)
    tokens, plain, expected, gradients = torch.load(folder / "expected.pt")
    source, target = (torch.from_numpy(x) for x in predictions(LAYOUT)[:2])
    assert not adapter_problems(folder / "adapters", lora, "actor.lora")
    for label in PLANS:
        chunks = _chunks(folder, label, groups, lora)
        with torch.no_grad():
            logits = run(chunks, tokens)
            alone = run(_base_of(chunks, label, groups), tokens)
        if logits is not None and alone is not None:
            worst[label] = max(
                (_whole(made, chunks) - wanted[:USED]).abs().max().item()
                for made, wanted in ((logits, expected), (alone, plain))
            )
        train_run(chunks, tokens, Predictions(source, tokens[0, target]))
        reduce_gradients(chunks, chunks[0].spec)
        _assert_gradients_equal(chunks, gradients)
    return worst


def _whole(logits: torch.Tensor, chunks: list[ModelChunk]) -> torch.Tensor:
    whole = torch.cat(gathered(logits, chunks[0].pg_collection.tp), -1)
    return whole[:USED, : SIZES["vocab_size"]]


def _chunks(folder: Path, label: str, groups: dict, lora: LoraSpec) -> list[ModelChunk]:
    """This rank's chunks, their bases frozen."""
    spec, plan = replace(saved_spec(folder), lora=lora), PLANS[label]
    chunks = []
    for number in range(plan.virtual_pipeline):
        chunk = build_chunk(spec, ModelOptions(), plan, groups[label], chunk=number)
        load_weights(chunk, without_adapters(spec), SafetensorsSource(folder))
        load_adapters(chunk, spec, open_adapters(folder / "adapters"))
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_trained(spec, name))
        chunks.append(chunk)
    return chunks


def _base_of(adapted: list[ModelChunk], label: str, groups: dict) -> list[ModelChunk]:
    """Chunks without adapters, all of them in the memory of those with adapters."""
    spec = without_adapters(adapted[0].spec)
    shards, chunks = Shards(adapted, adapted[0].spec), []
    for number in range(len(adapted)):
        chunk = build_chunk(spec, ModelOptions(), PLANS[label], groups[label], chunk=number)
        lent = shards.lend(Shards([chunk], spec))
        assert lent == {name for name, _ in chunk.named_parameters()}
        chunks.append(chunk)
    return chunks


def _assert_gradients_equal(chunks: list[ModelChunk], whole: dict[str, torch.Tensor]) -> None:
    spec = chunks[0].spec
    bound = gradient_bound(spec.intermediate_size, spec.num_hidden_layers)
    for chunk in chunks:
        for parameter, value in parameters_of(chunk, spec):
            if not value.requires_grad:
                assert value.grad is None
                continue
            assert value.grad is not None, parameter.name
            expected = torch.empty_like(value.grad)
            fill(expected, parameter, lambda name, _, box: whole[name][slices(box)])
            ((name, _),) = parameter.tensors
            error = (value.grad - expected).abs().max() / whole[name].abs().max()
            assert error <= bound, f"{parameter.name} is off by {error:.1e}"
