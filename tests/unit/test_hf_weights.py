"""Weights in and out: bit for bit, by boxes, at any tensor size; errors that name tensors."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from puzzle_align.layout import rules
from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.hf_config import from_hf_config, read_hf_config, to_hf_config
from puzzle_align.layout.model import Dtype, ModelOptions, ModelSpec, padded_vocab_size
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rules import Parameter
from puzzle_align.layout.weights import hf_shapes
from puzzle_align.models.chunk import ModelChunk, build_chunk
from puzzle_align.models.cpu import install_cpu_patches
from puzzle_align.models.hf.sources import RandomSource, SafetensorsSource
from puzzle_align.models.hf.weights import export_hf, load_weights
from puzzle_align.models.inputs import DTYPES
from puzzle_align.models.shards import fill, parameters_of, slices, take_apart
from tests.refusals import refusal

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 150,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # a family's own may be beyond this vocabulary
}


class OneRank:
    """A process group of one, for models that are built and never run."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_are_bitwise(
    family: str, dtype: Dtype, tied: bool, tmp_path: Path
) -> None:
    spec = _spec(family, tied)
    tensors = _write(tmp_path / "in", spec, DTYPES[dtype])
    read = from_hf_config(read_hf_config(tmp_path / "in"), "in")
    assert read == spec
    chunk = one_rank_chunk(spec, dtype)
    load_weights(chunk, spec, SafetensorsSource(tmp_path / "in"))
    export_hf([chunk], spec, tmp_path / "out", dtype, max_shard_bytes=6_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 1
    found = {}
    for file in files:
        content = load_file(tmp_path / "out" / file)
        size = sum(tensor.nbytes for tensor in content.values())
        assert size <= 6_000 or len(content) == 1
        found |= content
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    _assert_equal(found, tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_is_exported(family: str, tmp_path: Path) -> None:
    import transformers

    spec = _spec(family, tied=False)
    tensors = _write(tmp_path / "in", spec, torch.bfloat16)
    chunk = one_rank_chunk(spec, "bf16")
    load_weights(chunk, spec, SafetensorsSource(tmp_path / "in"))
    export_hf([chunk], spec, tmp_path / "out", "bf16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.config.model_type == family
    assert model.dtype is torch.bfloat16
    _assert_equal(model.state_dict(), tensors)


@pytest.mark.parametrize("other", [None, torch.float32])
def test_bfloat16_is_what_all_tensors_are_in(other: torch.dtype | None, tmp_path: Path) -> None:
    """Whatever config.json says: a score in float32 keeps its bits in a checkpoint."""
    tensors = _write(tmp_path, _spec("llama", tied=False), torch.bfloat16)
    name = "model.norm.weight"
    tensors[name] = tensors[name].to(other or torch.bfloat16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole/model.safetensors")
    assert SafetensorsSource(tmp_path / "whole").is_bf16 == (other is None)


def test_padding_rows_are_zero() -> None:
    spec = _spec("llama", tied=False)
    chunk = one_rank_chunk(spec, "fp32")
    load_weights(chunk, spec, RandomSource(spec, 0))
    for table in (chunk.embedding.word_embeddings.weight, chunk.head_weight):
        assert table.shape == (256, 16)
        assert not table[150:].any()
        assert table[:150].std() > 0.01


def test_lent_parameters_stay_as_they_are() -> None:
    spec = _spec("llama", tied=False)
    chunk = one_rank_chunk(spec, "fp32")
    load_weights(chunk, spec, RandomSource(spec, 0))
    before = [parameter.clone() for parameter in chunk.parameters()]
    lent = [parameter.name for parameter, _ in parameters_of(chunk, spec)]
    load_weights(chunk, spec, RandomSource(spec, 1), lent=lent)
    assert all(map(torch.equal, chunk.parameters(), before))


def test_a_tied_models_spare_head_and_old_buffers_are_ignored(tmp_path: Path) -> None:
    """A head with other weights than the embedding's is refused."""
    spec = _spec("llama", tied=True)
    tensors = _write(tmp_path, spec, torch.float32)
    (tmp_path / "model.safetensors.index.json").unlink()
    head = tensors["model.embed_tokens.weight"].clone()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3), "lm_head.weight": head}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    dtypes: list[Dtype] = ["fp32", "bf16"]  # the file's own, and another
    for dtype in dtypes:
        load_weights(one_rank_chunk(spec, dtype), spec, SafetensorsSource(tmp_path))
    head[-1, -1] += 1e-6
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight is not model.embed_tokens.weight, and"):
        load_weights(one_rank_chunk(spec, "fp32"), spec, SafetensorsSource(tmp_path))


def test_bad_files_are_named(tmp_path: Path) -> None:
    spec = _spec("llama", tied=False)
    tensors = _write(tmp_path, spec, torch.float32)
    (tmp_path / "model.safetensors.index.json").unlink()
    single = tmp_path / "model.safetensors"
    chunk = one_rank_chunk(spec, "fp32")
    name = "model.layers.1.mlp.up_proj.weight"

    def complaint(content: dict[str, torch.Tensor]) -> str:
        save_file(content, single)
        return refusal(lambda: load_weights(chunk, spec, SafetensorsSource(tmp_path)))

    missing = complaint({key: value for key, value in tensors.items() if key != name})
    assert str(tmp_path) in missing and f"{name} is missing" in missing
    unexpected = complaint({**tensors, "model.layers.2.mlp.up_proj.weight": torch.zeros(2)})
    assert str(single) in unexpected and "model.layers.2.mlp.up_proj.weight is not" in unexpected
    misshaped = complaint({**tensors, name: torch.zeros(24, 15)})
    assert str(single) in misshaped and name in misshaped
    assert "(24, 15)" in misshaped and "(24, 16)" in misshaped
    for dtype in (torch.int8, torch.bool, torch.float64, torch.complex64, torch.float8_e4m3fn):
        cast = complaint({**tensors, name: tensors[name].to(dtype)})
        assert re.fullmatch(f"{single}: tensor {name} is of .*, not of F32, F16, BF16: .*", cast)
    for name in tensors:
        for value in (math.nan, math.inf, -math.inf):
            spoilt = tensors[name].clone()
            spoilt.view(-1)[-1] = value
            message = complaint({**tensors, name: spoilt})
            assert message.startswith(f"{single}: tensor {name} holds NaN or infinity"), message


def test_a_tensor_that_several_share_is_named_as_in_its_file(tmp_path: Path) -> None:
    spec = _spec("phi3", tied=False)
    tensors = _write(tmp_path, spec, torch.float32)
    (tmp_path / "model.safetensors.index.json").unlink()
    name = "model.layers.1.mlp.gate_up_proj.weight"
    assert tensors[name].shape == (2 * SIZES["intermediate_size"], SIZES["hidden_size"])
    save_file(tensors, tmp_path / "model.safetensors")
    chunk = one_rank_chunk(spec, "fp32")
    load_weights(chunk, spec, SafetensorsSource(tmp_path))
    fused = dict(chunk.named_parameters())["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(fused, tensors[name])  # gate, then up: as Megatron-core has them
    tensors[name][-1, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"model.safetensors: tensor {name} holds NaN"):
        load_weights(chunk, spec, SafetensorsSource(tmp_path))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load_weights(chunk, spec, SafetensorsSource(tmp_path))


def test_new_norms_multiply_by_one_whatever_their_offset() -> None:
    for family, weight in (("llama", 1.0), ("gemma", 0.0)):
        source = RandomSource(_spec(family, tied=False), 0)
        assert source.read("model.norm.weight", (3,), ((0, 3),)).tolist() == 3 * [weight]


def test_a_tensor_of_two_shards_or_of_none_is_refused(tmp_path: Path) -> None:
    spec = _spec("llama", tied=False)
    tensors = _write(tmp_path, spec, torch.float32)
    part = load_file(tmp_path / "part0.safetensors")
    save_file({}, tmp_path / "part0.safetensors")
    message = refusal(lambda: SafetensorsSource(tmp_path).check(hf_shapes(spec)))
    assert message.startswith(f"{tmp_path}/part0.safetensors: tensor {next(iter(tensors))} cannot")
    assert message.endswith(": give index and files of one model")
    name = next(name for name in tensors if name not in part)
    save_file({**part, name: tensors[name] + 1}, tmp_path / "part0.safetensors")
    message = f"part0.safetensors: tensor {name} is here, where model.safetensors.index.json does"
    with pytest.raises(ValueError, match=message):
        SafetensorsSource(tmp_path).check(hf_shapes(spec))
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="both model.safetensors and model.safetensors.index.json"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["", ".", "..", "../a.safetensors", "/a.safetensors", "a/b", "a\0b", 7, None, {}, "x" * 999],
)
def test_an_index_names_files_beside_it(tmp_path: Path, file: Any) -> None:
    spec = _spec("llama", tied=False)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(hf_shapes(spec), file)}))
    message = refusal(lambda: SafetensorsSource(tmp_path).check(hf_shapes(spec)))
    assert str(tmp_path) in message
    assert "which is no file name" in message


def test_files_may_be_links(tmp_path: Path) -> None:
    spec = _spec("llama", tied=False)
    _write(tmp_path / "blobs", spec, torch.float32)
    (tmp_path / "model").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    SafetensorsSource(tmp_path / "model").check(hf_shapes(spec))


def test_unreadable_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"model.safetensors: not a readable safetensors file"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(ValueError, match=r"index.json: not a safetensors index"):
        SafetensorsSource(tmp_path)
    spec = _spec("llama", tied=False)
    names = dict.fromkeys(hf_shapes(spec), "gone.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ValueError, match=r"gone.safetensors: not a readable safetensors file"):
        load_weights(one_rank_chunk(spec, "fp32"), spec, SafetensorsSource(tmp_path))


def test_random_weights_depend_on_seed_and_name_alone() -> None:
    spec = replace(_spec("qwen2", tied=False), initializer_range=0.05)
    source, again, other = (RandomSource(spec, seed) for seed in (1, 1, 2))
    whole = source.read("a.weight", (300, 40), ((0, 300), (0, 40)))
    assert torch.equal(again.read("a.weight", (300, 40), ((7, 9), (3, 40))), whole[7:9, 3:40])
    assert not torch.equal(other.read("a.weight", (300, 40), ((0, 300), (0, 40))), whole)
    assert not torch.equal(source.read("b.weight", (300, 40), ((0, 300), (0, 40))), whole)
    assert abs(whole.std().item() - 0.05) < 0.001  # of a sample, not of rounding
    assert torch.equal(source.read("x.input_layernorm.weight", (4,), ((0, 4),)), torch.ones(4))
    assert torch.equal(source.read("x.q_proj.bias", (4,), ((0, 4),)), torch.zeros(4))


@settings(max_examples=30)
@given(
    groups=st.sampled_from([1, 2, 4]),
    per_group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6]),
    size=st.sampled_from([1, 2, 4]),
    vocab=st.integers(1, 300),
)
def test_shards_of_every_size_make_the_whole(
    groups: int, per_group: int, head_dim: int, size: int, vocab: int
) -> None:
    spec = replace(
        _spec("llama", tied=False),
        num_attention_heads=groups * size * per_group,
        num_key_value_heads=groups * size,
        head_dim=head_dim,
        vocab_size=vocab,
    )
    others = (rules.DOWN, rules.EMBEDDING, rules.INPUT_NORM)
    for rule in (rules.QKV_WEIGHT, rules.QKV_BIAS, rules.GATE_UP, *others):
        tensors = [torch.randn(shape) for shape in rule.shapes(spec)]
        whole = _shard(rule, spec, tensors, 1, 0)
        back = dict(take_apart(whole, _parameter(rule, spec, 1, 0)))
        assert list(back) == list(rule.hf)
        for name, tensor in zip(rule.hf, tensors, strict=True):
            assert torch.equal(back[name], tensor)
        shards = [_shard(rule, spec, tensors, size, rank) for rank in range(size)]
        assert torch.equal(_joined(rule, shards), whole)


def test_query_groups_lie_as_megatron_reads_them() -> None:
    spec = replace(_spec("llama", tied=False), num_attention_heads=4, head_dim=1)
    query, key, value = torch.arange(4.0), torch.tensor([10.0, 11.0]), torch.tensor([20.0, 21.0])
    merged = _shard(rules.QKV_BIAS, spec, [query, key, value], 1, 0)
    assert merged.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_stored_vocabulary_does_not_depend_on_the_plan() -> None:
    sizes = [padded_vocab_size(replace(_spec("llama", False), vocab_size=n)) for n in (1, 128, 129)]
    assert sizes == [128, 128, 256]


def _spec(family: str, tied: bool) -> ModelSpec:
    config = {**SIZES, "model_type": family, "tie_word_embeddings": tied}
    return from_hf_config(config, "inline")


def one_rank_chunk(spec: ModelSpec, dtype: Dtype) -> ModelChunk:
    """The whole model as one chunk that is never run."""
    install_cpu_patches()
    one = OneRank()
    groups: Any = SimpleNamespace(tp=one, pp=one, cp=one, dp=one, dp_cp=one, embd=None)
    return build_chunk(spec, ModelOptions(dtype=dtype), ParallelPlan(), groups)


def _write(directory: Path, spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model directory with two shards of random tensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(to_hf_config(spec)))
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in hf_shapes(spec).items()}
    files = {name: f"part{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        content = {name: tensors[name] for name in tensors if files[name] == file}
        save_file(content, directory / file)
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


def _parameter(rule: rules.Rule, spec: ModelSpec, size: int, rank: int) -> Parameter:
    return rule.parameter(spec, rule.megatron, "", size, rank)


def _shard(
    rule: rules.Rule, spec: ModelSpec, tensors: list[torch.Tensor], size: int, rank: int
) -> torch.Tensor:
    parameter = _parameter(rule, spec, size, rank)
    by_name = dict(zip(rule.hf, tensors, strict=True))
    shard = torch.full(parameter.shape, torch.nan)
    fill(shard, parameter, lambda name, _, box: by_name[name][slices(box)])
    return shard


def _joined(rule: rules.Rule, shards: list[torch.Tensor]) -> torch.Tensor:
    """Tensor that Megatron's tensor ranks hold together."""
    if rule is rules.INPUT_NORM:
        assert all(torch.equal(shard, shards[0]) for shard in shards)
        return shards[0]
    if rule is rules.GATE_UP:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(shards, dim=1 if rule is rules.DOWN else 0)
