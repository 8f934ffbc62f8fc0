"""Reading and writing ``config.json``, and the counts that follow from a model's dimensions."""

import json
import math
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from puzzle_align.files.json_file import MAX_BYTES
from puzzle_align.layout import families
from puzzle_align.layout.flops import (
    attention_flops,
    flops_per_token,
    head_flops_per_token,
    row_flops,
)
from puzzle_align.layout.hf_config import from_hf_config, read_hf_config, to_hf_config
from puzzle_align.layout.model import (
    LoraSpec,
    ModelOptions,
    RopeScaling,
    with_scalar_head,
)
from puzzle_align.layout.weights import num_parameters
from puzzle_align.planning.memory.model import layer_shard_parameters
from tests.dist.chunk_runs import has_classifier
from tests.refusals import refusal
from tests.specs import PAPER

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
SCALING = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
FAMILIES = {name: family.architecture for name, family in families.FAMILIES.items()}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 77,
}


def test_reads_llama_3_1_8b() -> None:
    spec = from_hf_config(LLAMA_8B, "config.json")
    assert spec.head_dim == 128
    assert spec.rope_theta == 500000.0
    assert spec.rope_scaling == SCALING
    assert num_parameters(spec) == 8_030_261_248  # as its model card's safetensors say


def test_rope_parameters_mean_the_same_as_the_older_keys() -> None:
    old = from_hf_config(LLAMA_8B, "x")
    new = {key: value for key, value in LLAMA_8B.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**LLAMA_8B["rope_scaling"], "rope_theta": 500000.0}
    assert from_hf_config(new, "x") == old


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_agrees_with_transformers(family: str, tied: bool) -> None:
    import transformers

    changes = {**SMALL, "tie_word_embeddings": tied, "head_dim": 16, "pad_token_id": 0}
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**changes)
    spec = from_hf_config(json.loads(config.to_json_string(use_diff=False)), "x")
    with torch.device("meta"):
        model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)
    assert num_parameters(spec) == sum(p.numel() for p in model.parameters())
    layer = model.model.layers[0]
    assert layer_shard_parameters(spec, 1) == sum(p.numel() for p in layer.parameters())
    read_back = type(config).from_dict(to_hf_config(spec))
    for key in ("rope_parameters", "head_dim", "tie_word_embeddings", "rms_norm_eps"):
        assert getattr(read_back, key) == getattr(config, key)


@pytest.mark.parametrize("family", [name for name in FAMILIES if has_classifier(FAMILIES[name])])
def test_a_scalar_head_is_a_sequence_classifier_with_one_label(family: str) -> None:
    import transformers

    changes = {**SMALL, "head_dim": 16, "num_labels": 1, "tie_word_embeddings": True}
    changes["pad_token_id"] = 0  # a family's own may be beyond this vocabulary
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**changes)
    with torch.device("meta"):
        model = getattr(transformers, f"{FAMILIES[family]}ForSequenceClassification")(config)
    name = type(model).__name__
    config.architectures = [name]
    spec = from_hf_config(json.loads(config.to_json_string(use_diff=True)), "x")
    assert spec.head == "scalar"
    assert not spec.tie_word_embeddings  # there are no output embeddings to tie
    assert num_parameters(spec) == sum(p.numel() for p in model.parameters())
    assert head_flops_per_token(spec) == 2 * SMALL["hidden_size"]
    exported = json.loads(json.dumps(to_hf_config(spec)))
    assert from_hf_config(exported, "x") == spec
    read_back = type(config).from_dict(exported)
    assert (read_back.architectures, read_back.num_labels) == ([name], 1)
    language_model = from_hf_config({**exported, "architectures": None}, "x")
    assert language_model.head == "lm"
    assert with_scalar_head(replace(language_model, tie_word_embeddings=True)) == spec


@pytest.mark.parametrize("labels", [{}, {"num_labels": 2}, {"id2label": {"0": "a", "1": "b"}}])
def test_a_classifier_of_two_labels_is_refused(labels: dict) -> None:
    config = {**SMALL, "model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(ValueError, match=r"^x: num_labels=2 is not supported: only 1 "):
        from_hf_config({**config, **labels}, "x")


def test_an_unreadable_config_is_named_in_one_line(tmp_path: Path) -> None:
    def complaint() -> str:
        return refusal(lambda: read_hf_config(tmp_path))

    path = tmp_path / "config.json"
    assert complaint().startswith(f"{path}: no such file; give")
    path.write_text("{")
    assert complaint().startswith(f"{path} is not JSON (")
    path.write_bytes(b"\xff")
    assert complaint().startswith(f"{path} is not JSON (")
    path.write_text("[" * 10**5)
    assert complaint().startswith(f"{path} is not JSON (nested too deep); give")
    path.write_text('{"a": {"b": 1, "b": 2}}')
    assert complaint().startswith(f"{path} is not JSON ('b' is given twice); give")
    path.write_text("[]")
    assert complaint().startswith(f"{path} is not a JSON object; give")
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert complaint().startswith(f"{path} has over {MAX_BYTES} bytes; give")


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "ids",
    [
        {},
        {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5},
        {"bos_token_id": None, "eos_token_id": [6, 7]},
        {"eos_token_id": None},
    ],
)
def test_transformers_reads_the_same_special_tokens_from_an_export(family: str, ids: dict) -> None:
    import transformers

    source = {**SMALL, "model_type": family, **ids}
    spec = from_hf_config(source, "x")
    exported = json.loads(json.dumps(to_hf_config(spec)))
    assert from_hf_config(exported, "x") == spec
    config_class = getattr(transformers, f"{FAMILIES[family]}Config")
    expected, found = config_class.from_dict(source), config_class.from_dict(exported)
    for key in TOKEN_IDS:
        assert getattr(found, key) == getattr(expected, key)


def test_qwen2_may_say_that_it_has_the_bias_it_has() -> None:
    qwen2 = {**SMALL, "model_type": "qwen2"}
    for value in (True, False, None):
        assert from_hf_config({**qwen2, "attention_bias": value}, "x").attention_bias


@pytest.mark.parametrize("family", FAMILIES)
def test_config_round_trip(family: str) -> None:
    spec = from_hf_config({**SMALL, "model_type": family, "head_dim": 16}, "x")
    assert from_hf_config(json.loads(json.dumps(to_hf_config(spec))), "x") == spec
    scaled = replace(spec, rope_scaling=SCALING, rope_theta=1e6)
    assert from_hf_config(to_hf_config(scaled), "x") == scaled


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", [{}, {"rope_parameters": {"rope_type": "default"}}])
def test_absent_keys_mean_what_they_mean_to_transformers(rope: dict, family: str) -> None:
    import transformers

    given = {**SMALL, "hidden_size": 64, "num_attention_heads": 32, **rope}
    del given["num_key_value_heads"]  # whose default divides 32 in every family
    config = getattr(transformers, f"{FAMILIES[family]}Config")(**deepcopy(given))
    written = json.loads(config.to_json_string(use_diff=False))
    assert from_hf_config({**given, "model_type": family}, "x") == from_hf_config(written, "x")


def test_an_absent_key_takes_the_familys_default_and_null_does_not() -> None:
    mistral = {**SMALL, "model_type": "mistral"}
    assert from_hf_config(mistral, "x").sliding_window == 4096
    assert from_hf_config({**mistral, "sliding_window": None}, "x").sliding_window is None
    assert from_hf_config({**SMALL, "model_type": "llama", "head_dim": None}, "x").head_dim == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type='gpt2'", "llama"]),
        ({"model_type": None}, ["model_type=None"]),
        ({"hidden_act": "gelu"}, ["hidden_act: expected silu, got 'gelu'"]),
        ({"mlp_bias": True}, ["mlp_bias: expected false, got true"]),
        ({"attention_bias": True}, ["attention_bias: expected false, got true"]),
        ({"num_local_experts": 8}, ["num_local_experts: expected 0, got 8"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"is_causal": False}, ["is_causal: expected true, got false"]),
        ({"per_layer_config": {"1": {}}}, ["per_layer_config"]),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            ["rope_scaling.type: expected default or llama3, got 'yarn'"],
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["rope_scaling.factor is missing"]),
        ({"rope_parameters": 3}, ["rope_parameters: expected a mapping, got 3"]),
        ({"hidden_size": "64"}, ["hidden_size: expected an integer", "got '64'"]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"hidden_size": 50}, ["num_attention_heads=4", "hidden_size=50", "head_dim"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps: expected", "got 0"]),
        ({"bos_token_id": "<s>"}, ["bos_token_id: expected an integer", "got '<s>'"]),
        ({"eos_token_id": [2, "</s>"]}, ["eos_token_id[1]: expected an integer", "got '</s>'"]),
        (
            {"layer_types": ["sliding_attention"]},
            ["layer_types[0]: expected full_attention", "'sliding_attention'"],
        ),
        ({"layer_types": 2}, ["layer_types: expected a list", "got 2"]),
        ({"layer_types": ["full_attention"] * 2}, ["layer_types names 2 layers", "is 3"]),
        ({"architectures": 7}, ["architectures: expected a list of texts, got 7"]),
        ({"architectures": [7]}, ["architectures[0]: expected text, got 7"]),
        ({"model_type": ["llama"]}, ["model_type=['llama']"]),
        (
            {"tie_word_embeddings": "false"},
            ["tie_word_embeddings: expected true or false, got 'false'"],
        ),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings: expected true or false, got 1"]),
        ({"sliding_window": "4096"}, ["sliding_window: expected an integer", "got '4096'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers: expected an integer", "got true"]),
        ({"num_hidden_layers": 2.0}, ["num_hidden_layers: expected an integer", "got 2.0"]),
        ({"num_hidden_layers": 10**6}, ["num_hidden_layers: ", "from 1 to 4096, got 1000000"]),
        ({"hidden_size": 10**12}, ["hidden_size: ", "got 1000000000000"]),
        ({"vocab_size": 10**9}, ["vocab_size: ", "got 1000000000"]),
        ({"vocab_size": 10**5000}, ["vocab_size: ", "got a int"]),
        ({"head_dim": 3}, ["head_dim=3 is odd"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps: expected a number from 1e-30 to 1, got nan"]),
        ({"rms_norm_eps": math.inf}, ["rms_norm_eps: ", "got inf"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps: ", "got -1e-06"]),
        ({"rms_norm_eps": False}, ["rms_norm_eps: ", "got false"]),
        ({"rope_theta": math.inf}, ["rope_theta: ", "got inf"]),
        ({"rope_theta": 10**400}, ["rope_theta: ", "got 1000", "..."]),
        ({"rope_scaling": []}, ["rope_scaling: expected a mapping, got a list"]),
        ({"rope_scaling": {"factor": "8"}}, ["rope_scaling.factor: ", "got '8'"]),
        ({"rope_scaling": {"factor": 8.0}}, ["rope_scaling.factor is given, but no rope_type"]),
        (
            {"rope_parameters": {"rope_typ": "llama3", "rope_theta": 1e4}},
            ["rope_parameters.rope_typ is given, but no rope_type"],
        ),
        (
            {"rope_parameters": {"rope_theta": "x" * 999}},
            ["rope_parameters.rope_theta: ", "got 'xxx", "..."],
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            ["full_attention: expected no value (it is not supported)"],
        ),
        (
            {"rope_scaling": {**LLAMA_8B["rope_scaling"], "low_freq_factor": 4}},
            ["rope_scaling.high_freq_factor=4.0 must be larger"],
        ),
        (
            {"rope_scaling": LLAMA_8B["rope_scaling"], "rope_parameters": {"rope_theta": 1e4}},
            ["rope_parameters and rope_scaling say different things"],
        ),
    ],
)
def test_what_is_not_supported_is_named_in_one_line(change: dict, words: list[str]) -> None:
    message = refusal(
        lambda: from_hf_config({**SMALL, "model_type": "llama", **change}, "models/a/config.json")
    )
    assert len(message) < 300
    assert all(word in message for word in ["models/a/config.json", *words]), message


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("gemma2", {}, "model_type='gemma2' is not supported"),
        ("granitemoe", {}, "model_type='granitemoe' is not supported"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier: expected a number.*, got 0"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope"}},
            "rope_scaling.type: expected .*, got 'longrope'",
        ),
        (
            "phi3",
            {"partial_rotary_factor": 0.3},
            "partial_rotary_factor=0.3 turns 3 of head_dim=12",
        ),
        (
            "gemma",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: expected false, got true",
        ),
        ("gemma", {"hidden_act": "relu"}, "hidden_act: expected .*, got 'relu'"),
    ],
)
def test_what_a_family_does_not_cover_is_refused(family: str, change: dict, words: str) -> None:
    line = refusal(lambda: from_hf_config({**SMALL, "model_type": family, **change}, "x"))
    assert re.search(rf"^x[.:] ?{words}", line)


def test_counts_by_hand() -> None:
    sizes = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "vocab_size": 10}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 3}
    spec = replace(PAPER, **sizes, **heads, model_type="qwen3", qk_norm=True)
    matrices = 4 * (6 + 3 + 3) + 6 * 4 + 3 * 4 * 6  # q k v, output, gate up down
    assert layer_shard_parameters(spec, 1) == matrices + 2 * 4 + 2 * 3
    assert num_parameters(spec) == 2 * (matrices + 14) + 2 * 10 * 4 + 4
    assert flops_per_token(spec) == 2 * 2 * matrices
    assert head_flops_per_token(spec) == 2 * 4 * 10
    assert attention_flops(spec, 5) == 2 * 5 * (2 * 2 * 3 * 2)  # scores and sums, two heads of 3


def test_beside_adapters_the_gradients_of_frozen_matrices_are_not_counted() -> None:
    adapted = replace(PAPER, lora=LoraSpec(r=2, lora_alpha=2.0, target_modules=("q_proj",)))
    whole, frozen = (row_flops(spec, ModelOptions(), 10) for spec in (PAPER, adapted))
    assert (frozen.layer, frozen.head) == (whole.layer, whole.head)
    matrices = 10 * flops_per_token(PAPER) // PAPER.num_hidden_layers
    assert whole.layer_backward == 2 * whole.layer
    assert whole.layer_backward - frozen.layer_backward == matrices
    assert (whole.head_backward, frozen.head_backward) == (3 * whole.head, 2 * whole.head)
