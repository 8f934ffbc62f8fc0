"""Each thing that can be wrong with a job is said once, in one line that names its key."""

import json

import pytest

from puzzle_align.config.check import raise_first
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.resolution import Resolution
from puzzle_align.layout.job_plan import Order
from puzzle_align.layout.model import ModelOptions
from tests.jobs import job_plan, model_of, problems_of
from tests.specs import CONFIG

SOUND = f"""
actor: {{model: {{config: {json.dumps(CONFIG)}, random_weights: true}}}}
tokenizer: {{path: byte}}
data: {{train: pairs.jsonl}}
"""
TP, PP, VPP = (
    f"actor.parallel.{axis}_model_parallel_size"
    for axis in ("tensor", "pipeline", "virtual_pipeline")
)

HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def found(*overrides: str, ranks: int = 1) -> list[str]:
    """The problems of the sound job with overrides."""
    listed = problems_of(load_job(SOUND, overrides), ranks)
    assert all("\n" not in line for line in listed)
    return listed


def order(job: JobConfig, ranks: int) -> Order:
    """How the models of the train phase take turns."""
    return job_plan(job, ModelOptions(), ranks).phase("train").order


def test_the_sound_job_is_sound() -> None:
    assert found() == []
    raise_first(problems_of(load_job(SOUND), 1))


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("seed=-1", "seed: -1 is out of range"),
        ("global_batch_size=0", "global_batch_size: 0 is out of range; choose at least 1"),
        ("num_train_epochs=0", "num_train_epochs: 0"),
        ("max_steps=0", "max_steps: 0 is out of range"),
        ("engine.logprob_chunk_size=0", "engine.logprob_chunk_size: 0"),
        ("engine.distributed_timeout=0", "engine.distributed_timeout: 0"),
        ("data.eval_fraction=1", "data.eval_fraction: 1.0 is out of range; choose 0 or more"),
        ("data.num_synthetic=0", "data.num_synthetic: 0"),
        ("data.max_length=1", "data.max_length: 1"),
        ("data.max_prompt_length=0", "data.max_prompt_length: 0"),
        ("packing.row_tokens=1", "packing.row_tokens: 1"),
        ("dpo.beta=0", "dpo.beta: 0.0 is out of range; choose more than 0"),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing: 0.5"),
        ("dpo.sft_loss_weight=-1", "dpo.sft_loss_weight: -1.0"),
        ("optimizer.lr=-1", "optimizer.lr: -1.0"),
        ("optimizer.adam_beta2=1", "optimizer.adam_beta2: 1.0"),
        ("optimizer.adam_eps=0", "optimizer.adam_eps: 0.0"),
        ("checkpoint.keep_last=-1", "checkpoint.keep_last: -1"),
        ("telemetry.log_every=0", "telemetry.log_every: 0"),
        ("telemetry.peak_tflops=0", "telemetry.peak_tflops: 0.0"),
        (f"{TP}=0", f"{TP}: 0"),
        ("actor.parallel.data_parallel_size=0", "actor.parallel.data_parallel_size: 0"),
        (f"reference.parallel.{PP[15:]}=-1", "reference.parallel.pipeline_model_parallel_size: -1"),
        ("data.train=null", "data.train: null; give a file"),
        ("data.format=synthetic", "data.format: synthetic pairs are generated, so 'pairs.jsonl'"),
        ("data.max_length=4097", "data.max_length: 4097 does not fit a row"),
        ("data.max_prompt_length=1024", "data.max_prompt_length: 1024 leaves no room"),
        ("optimizer.min_lr=1", "optimizer.min_lr: 1.0 is above optimizer.lr=1e-06"),
        (
            "optimizer.state_dtype=bf16",
            "optimizer.state_dtype: needs the distributed optimizer; set "
            "optimizer.use_distributed_optimizer=true",
        ),
        ("optimizer.cpu_offload=true", "optimizer.cpu_offload: needs the distributed optimizer"),
        (
            "optimizer={state_dtype: bf16, use_distributed_optimizer: true, adam_beta2: 0.999}",
            "optimizer.adam_beta2: 0.999 with optimizer.state_dtype=bf16",
        ),
        ("engine={device: cpu, attention: flex}", "engine.attention: flex has no backward"),
        ("engine={device: cpu, attention: flex_flash}", "engine.attention: flex_flash has no"),
        (
            "engine={device: cuda, dtype: fp32, attention: varlen}",
            "engine.attention: varlen on cuda is of bf16 alone; set it to flex",
        ),
        (
            "engine={device: cpu, flash_attention: fa3}",
            "engine.flash_attention: fa3 is of attention=varlen on cuda; set it to auto",
        ),
        (
            "engine={attention: flex, flash_attention: fa2}",
            "engine.flash_attention: fa2 is of attention=varlen on cuda",
        ),
        ("engine={device: cpu, transformer_impl: te}", "engine.transformer_impl: te needs cuda"),
        (
            "engine={device: cpu, apply_rope_fusion: true}",
            "engine.apply_rope_fusion: true",
        ),
        (
            "engine={device: cpu, bias_activation_fusion: true}",
            "engine.bias_activation_fusion: true needs cuda",
        ),
        (
            "engine={device: cuda, transformer_impl: local, gradient_accumulation_fusion: true}",
            "engine.gradient_accumulation_fusion: true needs Transformer Engine",
        ),
        ("engine={device: cpu, fp8: hybrid}", "engine.fp8: hybrid needs cuda"),
        ("engine={transformer_impl: local, fp8: e4m3}", "engine.fp8: e4m3 needs Transformer Eng"),
        ("engine={dtype: fp32, fp8: hybrid}", "engine.fp8: hybrid needs bf16"),
        (
            "engine={fp8: hybrid, fp8_roles: [actor, critic]}",
            "engine.fp8_roles: stage dpo has no model critic",
        ),
        (
            "engine={fp8: hybrid, fp8_roles: []}",
            "engine.fp8_roles: [], beside engine.fp8=h",
        ),
        ("actor.model.config=null", "actor.model: no model"),
        ("actor.model.path=/nowhere", "actor.model.path: /nowhere: no such directory; give"),
        ("reference.model.path=/nowhere", "reference.model.path: /nowhere: no such directory"),
        ("actor.model.config.hidden_size=0", "actor.model.config.hidden_size: expected an integer"),
        (f"{VPP}=2", f"{VPP}: 2 chunks need a pipeline"),
        ("actor.parallel.sequence_parallel=true", "actor.parallel.sequence_parallel: true needs"),
    ],
)
def test_one_wrong_key_is_one_line(override, start) -> None:
    (line,) = found(override)
    assert line.startswith(start)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (
            ["engine.fp8=hybrid", "packing.row_tokens=4104"],
            "packing.row_tokens: 4104 cannot be cut for engine.fp8=hybrid (tensorwise) under actor",
        ),
        (["engine.fp8=e4m3", "packing.enabled=false"], "engine.fp8: e4m3 needs rows of one length"),
        (
            ["engine.fp8=hybrid", "actor.model.config.intermediate_size=40"],
            "engine.fp8: hybrid (tensorwise) needs multiples of 16, and intermediate_size of",
        ),
        (["data.eval=e.jsonl", "data.eval_fraction=0.1"], "data.eval_fraction: 0.1 is not used"),
        (
            ["packing.layout=padded", "packing.scope=dataset"],
            "packing.scope: dataset means nothing while packing.layout is padded; set it to batch",
        ),
        (
            ["packing.layout=padded", "data.format=packed"],
            "packing.layout: padded, but packed files hold ready rows; set it to theirs",
        ),
        (
            ["packing.enabled=false", "packing.scope=dataset"],
            "packing.scope: dataset means nothing",
        ),
        (
            ["dpo.reference_free=true", "dpo.precompute_ref_log_probs=true"],
            "dpo.precompute_ref_log_probs: true, but dpo.reference_free=true",
        ),
        (
            ["dpo.loss_type=simpo", "dpo.precompute_ref_log_probs=true"],
            "dpo.precompute_ref_log_probs: true, but loss simpo",
        ),
        (
            ["dpo.loss_type=hinge", "dpo.label_smoothing=0.1"],
            "dpo.label_smoothing: 0.1 means nothing to loss hinge",
        ),
        (
            ["data.max_length=2049", "actor.model.config.max_position_embeddings=2048"],
            "data.max_length: 2049 is over max_position_embeddings=2048 of actor.model",
        ),
        (
            ["actor.model.config.model_type=mistral", "actor.model.config.sliding_window=512"],
            "data.max_length: 1024 is over sliding_window=512 of actor.model",
        ),
    ],
)
def test_keys_that_contradict_each_other(overrides, start) -> None:
    (line,) = found(*overrides)
    assert line.startswith(start)


@pytest.mark.parametrize(
    ("overrides", "ranks", "start"),
    [
        ([f"{TP}=4"], 4, "actor.parallel: tensor size 4 does not divide num_key_value_heads=2"),
        (
            [
                f"{TP}=3",
                *(f"actor.model.config.{key}=6" for key in HEADS),
                "actor.model.config.head_dim=16",
                "actor.model.config.vocab_size=100",
            ],
            3,
            "actor.parallel: tensor size 3 does not divide the padded vocab_size=128",
        ),
        (
            [f"{PP}=5"],
            5,
            "actor.parallel: pipeline times virtual pipeline size 5 is more than num_hidden_layers",
        ),
        (
            [f"{PP}=2", f"{VPP}=4"],
            2,
            "actor.parallel: pipeline times virtual pipeline size 8 is more than num_hidden_layers",
        ),
        ([f"{TP}=2"], 3, "actor.parallel: P·T = 2 does not divide 3 ranks: start a mult"),
        (
            [f"{TP}=2"],
            1,
            "actor.parallel: P·T = 2 does not divide 1 rank: start a multiple of 2, or",
        ),
        (
            ["actor.parallel.data_parallel_size=3"],
            2,
            "actor.parallel: P·D·T = 3 does not make 2 ranks: start 3, or",
        ),
        (
            ["reference.parallel.tensor_model_parallel_size=4"],
            4,
            "reference.parallel: tensor size 4 does not divide num_key_value_heads=2 of",
        ),
        (
            [f"{TP}=2", "actor.parallel.sequence_parallel=true", "packing.row_tokens=4095"],
            2,
            "packing.row_tokens: 4095 does not divide over the 2 sequence-parallel ranks",
        ),
    ],
)
def test_plans_that_do_not_fit(overrides, ranks, start) -> None:
    (line,) = found(*overrides, ranks=ranks)
    assert line.startswith(start)


def test_an_unused_reference_is_not_checked() -> None:
    assert found("dpo.loss_type=orpo", "reference.model.path=/nowhere") == []
    assert not load_job("dpo: {reference_free: true}").dpo.uses_reference


def test_a_reward_model_is_a_role_of_its_own() -> None:
    model = json.dumps({"config": CONFIG, "random_weights": True})
    text = f"""
stage: reward
reward: {{model: {model}}}
tokenizer: {{path: byte}}
data: {{train: pairs.jsonl}}
"""

    def found_in(*overrides: str, ranks: int = 1) -> list[str]:
        return problems_of(load_job(text, overrides), ranks)

    job = load_job(text)
    assert Resolution(job).roles == ("reward",)
    assert model_of(job, "reward").spec.head == "scalar"
    assert order(job, 1) == "sequential"
    assert found_in() == []
    (line,) = found_in("reward.model.config=null")
    assert line.startswith("reward.model: no model; set reward.model.path")
    (line,) = found_in(f"reward.{PP[6:]}=5", ranks=5)
    assert "5 is more than num_hidden_layers=4 of reward.model" in line
    (line,) = found_in("reward_loss.center_rewards_coefficient=-1")
    assert line.startswith("reward_loss.center_rewards_coefficient: -1.0 is out of range")


def test_a_policy_is_no_reward_model() -> None:
    key = "actor.model.config"
    (line,) = found(f"{key}.architectures=[LlamaForSequenceClassification]", f"{key}.num_labels=1")
    assert line.startswith("actor.model: a sequence classifier gives no next-token logits; give a")


def test_a_path_counts_before_the_inline_config(tmp_path) -> None:
    inline = load_job(SOUND).actor.model.config
    assert inline is not None
    config = {**inline, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (line,) = found(f"{PP}=4", f"actor.model.path={tmp_path}", ranks=4)
    assert "is more than num_hidden_layers=3" in line
    (tmp_path / "config.json").write_text("[]")
    (line,) = found(f"actor.model.path={tmp_path}")
    assert line.startswith("actor.model.path:") and "is not a JSON object" in line


def test_the_first_of_many_problems_is_raised() -> None:
    job = load_job(SOUND, ["seed=-1", "dpo.beta=0"])
    with pytest.raises(ValueError, match=r"^seed: -1 .* \(and 1 more: --validate lists all\)$"):
        raise_first(problems_of(job, 1))


def test_random_weights_and_bytes_with_own_data_have_to_be_meant() -> None:
    own = ("actor.model.random_weights=false", "tokenizer.path=null")
    assert found(*own) == [
        "actor.model: random weights, beside data.train=pairs.jsonl; set actor.model.path, or "
        "actor.model.random_weights=true if they are meant",
        "tokenizer.path: null, and actor.model has no path to take it from: text would become "
        "bytes, beside data.train=pairs.jsonl; name a tokenizer's directory, or 'byte' if "
        "bytes are meant",
    ]
    assert found(*own, "data.format=synthetic", "data.train=null") == []
