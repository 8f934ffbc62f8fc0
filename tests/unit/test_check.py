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
DP = "actor.parallel.data_parallel_size"

HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def problems_with(*overrides: str, ranks: int = 1, text: str = SOUND) -> list[str]:
    """The problems of the sound job with overrides."""
    listed = problems_of(load_job(text, overrides), ranks)
    assert all("\n" not in line for line in listed)
    return listed


def order(job: JobConfig, ranks: int) -> Order:
    """How the models of the train phase take turns."""
    return job_plan(job, ModelOptions(), ranks).phase("train").order


def test_the_sound_job_is_sound() -> None:
    assert problems_with() == problems_with(ranks=2**14) == []
    raise_first(problems_of(load_job(SOUND), 1))


def assert_problem(overrides: str, start: str, ranks: int = 1, text: str = SOUND) -> None:
    """The sound job with overrides, which have no spaces, has one problem, which begins so.

    A ``start`` from its colon on follows the key of the last override.
    """
    (line,) = problems_with(*overrides.split(), ranks=ranks, text=text)
    key = overrides.split()[-1].partition("=")[0] if start.startswith(":") else ""
    assert line.startswith(key + start), line


SHARD = ": needs the distributed optimizer; set optimizer.use_distributed_optimizer=true"
BF16 = "optimizer.state_dtype=bf16 optimizer.use_distributed_optimizer=true"
CUDA = "engine.device=cuda"
ROW = "actor.model.config.model_type=mistral actor.model.config.sliding_window"
LOGPS = "dpo.precompute_ref_log_probs=true"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        # of numbers out of range; all ranges are in test_schema.py
        ("seed=-1", ": -1 is out of range"),
        ("max_steps=0", ": 0 is out of range; choose at least 1, or -1: by epochs"),
        ("global_batch_size=0", ": 0 is out of range; choose at least 1"),
        ("data.eval_fraction=1", ": 1.0 is out of range; choose 0 or more"),
        ("dpo.beta=0", ": 0.0 is out of range; choose more than 0"),
        (f"{TP}=0", ": 0 is out of range; choose from 1"),
        (f"reference.parallel.{PP[15:]}=-1", "reference.parallel.pipeline_model_parallel_size: -1"),
        # of the data and its rows
        ("data.train=null", ": null; give a file"),
        ("data.format=synthetic", ": synthetic pairs are generated, so 'pairs.jsonl'"),
        (
            "data.train=null data.eval=a data.format=synthetic",
            ": synthetic pairs are generated, so 'a'",
        ),
        ("data.max_length=4097", ": 4097 does not fit a row"),
        ("data.max_prompt_length=1024", ": 1024 leaves no room"),
        ("data.eval=e.jsonl data.eval_fraction=0.1", ": 0.1 is not used"),
        (
            "packing.layout=padded packing.scope=dataset",
            ": dataset means nothing while packing.layout is padded; set it to batch",
        ),
        ("packing.enabled=false packing.scope=dataset", ": dataset means nothing"),
        (
            "data.format=packed packing.enabled=false",
            ": false, but packed files hold ready rows; set it as they were made",
        ),
        (
            "data.format=packed packing.layout=padded",
            ": padded, but packed files hold ready rows; set it as they were made",
        ),
        (
            "data.max_length=2049 actor.model.config.max_position_embeddings=2048",
            "data.max_length: 2049 is over max_position_embeddings=2048 of actor.model",
        ),
        (f"{ROW}=512", "data.max_length: 1024 is over sliding_window=512 of actor.model"),
        # of optimizers
        ("optimizer.min_lr=1", ": 1.0 is above optimizer.lr=1e-06"),
        ("optimizer.state_dtype=bf16", SHARD),
        ("optimizer.cpu_offload=true", ": needs the distributed optimizer"),
        (f"{BF16} optimizer.adam_beta1=0.991", ": 0.991 with optimizer.state"),
        (f"{BF16} optimizer.adam_beta2=0.999", ": 0.999 with optimizer.state_dtype=bf16"),
        # of the engine
        ("engine.device=cpu engine.attention=flex", ": flex has no backward"),
        ("engine.device=cpu engine.attention=flex_flash", ": flex_flash has no"),
        (
            "engine.device=cuda engine.dtype=fp32 engine.attention=varlen",
            ": varlen computes only in bf16 on cuda; set it to flex",
        ),
        (
            "engine.device=cpu engine.flash_attention=fa3",
            ": fa3 is only for attention=varlen on cuda; set it to auto",
        ),
        (
            "engine.attention=flex engine.flash_attention=fa2",
            ": fa2 is only for attention=varlen on cuda",
        ),
        ("engine.device=cpu engine.transformer_impl=te", ": te needs cuda"),
        ("engine.device=cpu engine.apply_rope_fusion=true", ": true needs cuda"),
        ("engine.device=cpu engine.bias_activation_fusion=true", ": true needs cuda"),
        (
            f"{CUDA} engine.transformer_impl=local engine.gradient_accumulation_fusion=true",
            ": true needs Transformer Engine",
        ),
        ("engine.device=cpu engine.fp8=hybrid", ": hybrid needs cuda"),
        ("engine.transformer_impl=local engine.fp8=e4m3", ": e4m3 needs Transformer Eng"),
        ("engine.dtype=fp32 engine.fp8=hybrid", ": hybrid needs bf16"),
        ("engine.fp8=hybrid engine.fp8_roles=[actor,critic]", ": stage dpo has no model critic"),
        ("engine.fp8=hybrid engine.fp8_roles=[]", ": [], beside engine.fp8=h"),
        (
            "engine.fp8=hybrid packing.row_tokens=4104",
            ": 4104 cannot be cut for engine.fp8=hybrid (tensorwise) under actor",
        ),
        ("packing.enabled=false engine.fp8=e4m3", ": e4m3 needs rows of one length"),
        *(
            (
                f"engine.fp8=hybrid actor.model.config.head_dim={head} {more}",
                f"engine.fp8: hybrid (tensorwise) needs multiples of 16, and {width} of actor.mo",
            )
            for head, more, width in (
                (16, "actor.model.config.hidden_size=40", "hidden_size"),
                (6, "", "heads times head_dim"),
                (4, "actor.model.config.num_key_value_heads=1", "queries, keys and values"),
                (16, "actor.model.config.intermediate_size=40", "intermediate_size"),
            )
        ),
        # of models, plans and losses
        ("actor.model.config=null", "actor.model: no model"),
        ("actor.model.path=/nowhere", ": /nowhere: no such directory; give"),
        ("reference.model.path=/nowhere", ": /nowhere: no such directory"),
        ("actor.model.config.hidden_size=0", ": expected an integer"),
        (f"{VPP}=2", ": 2 chunks need a pipeline"),
        ("actor.parallel.sequence_parallel=true", ": true needs tensor ranks"),
        (f"dpo.reference_free=true {LOGPS}", f"{LOGPS[:-5]}: true, but dpo.reference_free=true"),
        (f"dpo.loss_type=simpo {LOGPS}", f"{LOGPS[:-5]}: true, but loss simpo"),
        ("dpo.loss_type=hinge dpo.label_smoothing=0.1", ": 0.1 means nothing to loss hinge"),
    ],
)
def test_what_is_wrong_is_one_line(overrides: str, start: str) -> None:
    assert_problem(overrides, start)


@pytest.mark.parametrize(
    "overrides",
    [
        "data.max_length=4096",
        "data.max_prompt_length=1023",
        "data.eval=e.jsonl data.eval_fraction=0",
        "actor.model.config.max_position_embeddings=1024",
        f"{ROW}=1024",
        "optimizer.min_lr=1e-6",
        f"{BF16} optimizer.adam_beta1=0.99 optimizer.adam_beta2=0.99",
        "engine.device=cuda engine.dtype=fp32 engine.attention=flex",
        "engine.attention=varlen engine.flash_attention=fa2",
        "engine.device=cuda engine.transformer_impl=local engine.bias_activation_fusion=true",
        "engine.device=cuda engine.transformer_impl=te engine.apply_rope_fusion=true",
        "dpo.ld_alpha=0.5",
        "engine.fp8=hybrid engine.fp8_roles=[actor,reference]",
    ],
)
def test_what_is_just_right_is_sound(overrides: str) -> None:
    assert problems_with(*overrides.split()) == []


SP = "actor.parallel.sequence_parallel=true"
SIXES = " ".join(f"actor.model.config.{key}=6" for key in HEADS) + " actor.model.config.head_dim=16"
LAYERS = "is more than num_hidden_layers"


@pytest.mark.parametrize(
    ("overrides", "ranks", "start"),
    [
        (f"{TP}=4", 4, "actor.parallel: tensor size 4 does not divide num_key_value_heads=2"),
        (
            f"{TP}=3 {SIXES} actor.model.config.vocab_size=100",
            3,
            "actor.parallel: tensor size 3 does not divide the padded vocab_size=128",
        ),
        (f"{PP}=5", 5, f"actor.parallel: pipeline times virtual pipeline size 5 {LAYERS}"),
        (f"{PP}=2 {VPP}=4", 2, f"actor.parallel: pipeline times virtual pipeline size 8 {LAYERS}"),
        (f"{TP}=2", 3, "actor.parallel: P·T = 2 does not divide 3 ranks: start a mult"),
        (
            f"{TP}=2",
            1,
            "actor.parallel: P·T = 2 does not divide 1 rank: start a multiple of 2, or change the "
            "sizes, as dpo_7b_1gpu does for one GPU",
        ),
        (f"{DP}=3", 2, "actor.parallel: P·D·T = 3 does not make 2 ranks: start 3, or"),
        (
            "reference.parallel.tensor_model_parallel_size=4",
            4,
            "reference.parallel: tensor size 4 does not divide num_key_value_heads=2 of",
        ),
        (
            f"{TP}=2 {SP} packing.row_tokens=4095",
            2,
            "packing.row_tokens: 4095 does not divide over the 2 sequence-parallel ranks",
        ),
        ("", 2**14 + 1, "16385 ranks: there may be 16384 at most; start fewer"),
    ],
)
def test_plans_that_do_not_fit(overrides: str, ranks: int, start: str) -> None:
    assert_problem(overrides, start, ranks)


def test_an_unused_reference_is_not_checked() -> None:
    assert problems_with("dpo.loss_type=orpo", "reference.model.path=/nowhere") == []
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


def test_a_policy_is_no_reward_model() -> None:
    key = "actor.model.config"
    (line,) = problems_with(
        f"{key}.architectures=[LlamaForSequenceClassification]", f"{key}.num_labels=1"
    )
    assert line.startswith("actor.model: a sequence classifier gives no next-token logits; give a")


def test_a_path_counts_before_the_inline_config(tmp_path) -> None:
    inline = load_job(SOUND).actor.model.config
    assert inline is not None
    config = {**inline, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (line,) = problems_with(f"{PP}=4", f"actor.model.path={tmp_path}", ranks=4)
    assert "is more than num_hidden_layers=3" in line
    (tmp_path / "config.json").write_text("[]")
    (line,) = problems_with(f"actor.model.path={tmp_path}")
    assert line.startswith("actor.model.path:") and "is not a JSON object" in line


def test_the_first_of_many_problems_is_raised() -> None:
    job = load_job(SOUND, ["seed=-1", "dpo.beta=0"])
    with pytest.raises(ValueError, match=r"^seed: -1 .* \(and 1 more: --validate lists all\)$"):
        raise_first(problems_of(job, 1))


def test_random_weights_and_bytes_with_own_data_have_to_be_meant() -> None:
    own = ("actor.model.random_weights=false", "tokenizer.path=null")
    assert problems_with(*own) == [
        "actor.model: random weights, beside data.train=pairs.jsonl; set actor.model.path, or "
        "actor.model.random_weights=true if they are meant",
        "tokenizer.path: null, and actor.model has no path to take it from: text would become "
        "bytes, beside data.train=pairs.jsonl; name a tokenizer's directory, or 'byte' if "
        "bytes are meant",
    ]
    assert problems_with(*own, "data.format=synthetic", "data.train=null") == []


def test_long_paths_are_whole_in_errors() -> None:
    """Cut short they would name no file."""
    long = f"/{'folder/' * 20}pairs.jsonl"
    given = [f"data.train={long}", f"data.eval={long}", "data.eval_fraction=0.1"]
    lines = problems_with(*given, "actor.model.random_weights=false")
    assert len(lines) == 2 and all(long in line for line in lines)
    assert any(long in line for line in problems_with(*given, "data.format=synthetic"))
