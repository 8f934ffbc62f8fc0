"""A scalar head in and out: bit for bit, to transformers, and started from a seed."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.hf_config import from_hf_config, read_hf_config, to_hf_config
from puzzle_align.layout.model import Dtype, ModelSpec, with_scalar_head
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.models.hf.sources import RandomSource, SafetensorsSource
from puzzle_align.models.hf.weights import export_hf, load_weights
from puzzle_align.models.inputs import DTYPES
from tests.dist.chunk_runs import has_classifier
from tests.unit.test_hf_weights import SIZES, one_rank_chunk

SCORE = "score.weight"


def _language_model(family: str, tied: bool = False) -> ModelSpec:
    return from_hf_config({**SIZES, "model_type": family, "tie_word_embeddings": tied}, "inline")


def _write(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(to_hf_config(spec)))
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in hf_shapes(spec).items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if has_classifier(family.architecture)]
)
def test_what_is_exported_is_bitwise_what_was_read(
    family: str, dtype: Dtype, tmp_path: Path
) -> None:
    import transformers

    spec = with_scalar_head(_language_model(family))
    tensors = _write(tmp_path / "in", spec, DTYPES[dtype])
    assert tensors[SCORE].shape == (1, 16) and "lm_head.weight" not in tensors
    assert from_hf_config(read_hf_config(tmp_path / "in"), "in") == spec
    chunk = one_rank_chunk(spec, dtype)
    load_weights(chunk, spec, SafetensorsSource(tmp_path / "in"))
    assert torch.equal(chunk.head_weight, tensors[SCORE])
    hidden = torch.randn(5, 16).to(DTYPES[dtype])
    rewards = hidden.float() @ tensors[SCORE][0].float()  # not rounded to the weights' precision
    torch.testing.assert_close(chunk.output_layer(hidden), rewards)
    export_hf([chunk], spec, tmp_path / "out", dtype)
    found = load_file(tmp_path / "out/model.safetensors")
    model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert (model.config.num_labels, model.dtype) == (1, DTYPES[dtype])
    for tensors_there in (found, model.state_dict()):
        assert set(tensors_there) == set(tensors)
        assert all(torch.equal(tensors_there[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_models_weights_take_a_head_from_the_seed(
    tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    language_model = _language_model("qwen3", tied)
    tensors = _write(tmp_path, language_model, torch.float32)
    spec = with_scalar_head(language_model)
    fresh = RandomSource(spec, seed=5)
    chunk = one_rank_chunk(spec, "fp32")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            load_weights(chunk, spec, SafetensorsSource(tmp_path, fresh))
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"{tmp_path} has no {SCORE}: it starts from seed 5"]
    assert torch.equal(chunk.head_weight, fresh.read(SCORE, (1, 16), ((0, 1), (0, 16))))
    table = chunk.embedding.word_embeddings.weight[: spec.vocab_size]
    assert torch.equal(table, tensors["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=f"{SCORE} is missing"):
        load_weights(chunk, spec, SafetensorsSource(tmp_path))


def test_a_trained_head_is_kept(tmp_path: Path) -> None:
    spec = with_scalar_head(_language_model("llama"))
    tensors = _write(tmp_path, spec, torch.float32)
    chunk = one_rank_chunk(spec, "fp32")
    load_weights(chunk, spec, SafetensorsSource(tmp_path, RandomSource(spec, seed=5)))
    assert torch.equal(chunk.head_weight, tensors[SCORE])


def test_what_else_is_missing_stays_an_error(tmp_path: Path) -> None:
    language_model = _language_model("llama")
    tensors = _write(tmp_path, language_model, torch.float32)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    spec = with_scalar_head(language_model)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        SafetensorsSource(tmp_path, RandomSource(spec, 0)).check(hf_shapes(spec))


def test_a_bf16_head_computes_in_float32() -> None:
    spec = with_scalar_head(_language_model("llama"))
    chunk = one_rank_chunk(spec, "bf16")
    load_weights(chunk, spec, RandomSource(spec, 0))
    hidden = torch.randn(7, spec.hidden_size, dtype=torch.bfloat16)
    rewards = chunk.output_layer(hidden)
    assert rewards.dtype is torch.float32
    expected = hidden.double() @ chunk.head_weight[0].double()
    # Sixteen terms of up to 0.1: rounded in float32 they are off by 1e-8, in bf16 by 1e-4.
    assert (rewards - expected).abs().max() <= 1e-6
