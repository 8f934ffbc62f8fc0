"""Declarations of keys reach everyone who asks, also through nested sections."""

import json
from dataclasses import dataclass, make_dataclass

import pytest

from puzzle_align.config.job import JobConfig
from puzzle_align.config.schema import (
    Key,
    all_keys,
    binding_keys,
    data_sections,
    generate_keys,
    is_among,
    key,
    key_values,
    section,
    section_keys,
)

STAGES = section_keys(JobConfig)["stage"].choices


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = key(0.5, "bounded and binding", at_least=0, below=1, binding=True)
    size: int = key(1, "binding where both read it", stages=("b", "c"), binding=("c",))
    free: int = key(0, "anything")


@dataclass(frozen=True, kw_only=True)
class Outer:
    first: Inner = section(Inner, "as it is")
    second: Inner = section(Inner, "read in few", stages=("a", "b"), generate=("rate",))
    third: Inner | None = key(None, "not there", stages=("c",))
    whole: Inner = section(Inner, "of one piece", stages=("a", "b"), binding=True, shapes_data=True)
    seed: int = key(0, "read by all", binding=True, generate=True)


@dataclass(frozen=True, kw_only=True)
class Lost:
    inner: Inner = section(Inner, "of no stage that reads size", stages=("a",))


def test_no_key_is_declared_for_stages_that_do_not_read_its_section() -> None:
    with pytest.raises(AssertionError, match="no stage reads inner.size"):
        list(all_keys(Lost))


@pytest.mark.parametrize(
    ("bounds", "held", "refused"),
    [
        ({}, [-1, 0, "text", None], {}),
        ({"at_least": 1}, [1, 2, "auto", None], {0: "at least 1"}),
        ({"at_most": 1}, [1, -2], {2: "at most 1"}),
        ({"below": 1}, [0.5, -2], {1: "below 1"}),
        ({"at_least": 0, "at_most": 1}, [0, 1], {-0.1: "from 0 to 1", 1.1: "from 0 to 1"}),
        ({"at_least": 0, "below": 0.5}, [0, 0.4], {0.5: "0 or more, below 0.5"}),
        ({"above": 0}, [1e-9], {0: "more than 0"}),
        (
            {"above": 0, "at_most": 1},
            [1],
            {0: "more than 0, at most 1", 1.1: "more than 0, at most 1"},
        ),
        (
            {"at_least": 1, "besides": (-1, "by epochs")},
            [-1, 1],
            {0: "at least 1, or -1: by epochs", -2: "at least 1, or -1: by epochs"},
        ),
    ],
)
def test_bounds(bounds, held, refused) -> None:
    cls = make_dataclass("Cls", [("rate", float, key(0.0, "bounded", **bounds))])
    rate = section_keys(cls)["rate"]
    assert all(rate.range_problem(value) is None for value in held)
    for value, wanted in refused.items():
        assert rate.range_problem(value) == wanted


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("global_batch_size", 2**31 - 1, None),
        ("global_batch_size", 10**18, "at most 2147483647"),
        ("generation.stop_token_ids", [2, -(10**18)], "at least -2147483647"),
        ("seed", 2**63 - 1, None),
        ("seed", 2**63, "from 0 to 9223372036854775807"),
        ("optimizer.lr", 1e39, "from 0 to 1e+18"),
        ("optimizer.max_grad_norm", 1e39, "from 1.2e-38 to 3.4e+38, or 0: what fp32 can hold"),
        ("optimizer.adam_eps", 1e-300, "from 1.2e-38 to 3.4e+38, or 0: what fp32 can hold"),
        ("optimizer.min_lr", 0.0, None),
        ("dpo.loss_weights", [1.0, 1e300], "from 1.2e-38 to 3.4e+38, or 0: what fp32 can hold"),
        ("reward.weights", [-0.5, 0.0], None),
        ("reward.weights", [-1e39], "from 1.2e-38 to 3.4e+38, or 0: what fp32 can hold"),
        ("actor.parallel", None, None),
    ],
)
def test_every_number_has_bounds(name, value, wanted) -> None:
    keys = {key.name: key for key in all_keys(JobConfig)}
    assert keys[name].range_problem(value) == wanted


def test_what_a_section_declares_holds_inside() -> None:
    keys = {key.name: key for key in all_keys(Outer)}
    assert keys["first.rate"].stages == ()
    assert keys["first.size"].stages == ("b", "c")
    assert keys["second.rate"].stages == ("a", "b")
    assert keys["second.size"].stages == ("b",)
    assert keys["third.free"].stages == ("c",)
    assert [keys["second.size"].is_read_in(stage) for stage in "abc"] == [False, True, False]
    assert all(keys[name].is_binding_in("a") for name in ("whole.free", "first.rate"))
    assert not keys["whole.free"].is_binding_in("c")  # which does not read it
    assert keys["whole.rate"].shapes_data and not keys["first.rate"].shapes_data


def test_binding_keys_are_those_of_the_stage_with_sections_as_one() -> None:
    assert binding_keys(Outer, "a") == ("first.rate", "second.rate", "whole", "seed")
    assert binding_keys(Outer, "b") == ("first.rate", "second.rate", "whole", "seed")
    assert binding_keys(Outer, "c") == (
        "first.rate",
        "first.size",
        "third.rate",
        "third.size",
        "seed",
    )


def test_a_command_s_keys_and_the_data_s() -> None:
    assert generate_keys(Outer) == ("second.rate", "seed")
    assert data_sections(Outer) == ("whole",)
    assert is_among("whole.free", ("whole",)) and is_among("whole", ("whole",))
    assert not is_among("wholesale", ("whole",))


def test_values_are_walked_into_sections_that_are_there() -> None:
    def names(config: Outer) -> list[str]:
        return [key.name for key, _ in key_values(config) if not key.is_section]

    assert "third.rate" not in names(Outer())
    assert set(names(Outer(third=Inner()))) == {
        key.name for key in all_keys(Outer) if not key.is_section
    }
    found = {key.name: value for key, value in key_values(Outer(third=Inner(rate=0.1)))}
    assert (found["third.rate"], found["first.rate"]) == (0.1, 0.5)


def test_every_default_of_a_job_is_within_its_bounds() -> None:
    for found in all_keys(JobConfig):
        if (found.at_least, found.at_most, found.above, found.below) != (None,) * 4:
            assert found.type in (int, float), found.name
            assert found.default is None or found.range_problem(found.default) is None, found.name


DECLARED = {
    "": """
        dpo.loss_function=null
        stage=dpo output_dir=runs/dpo engine.device=auto engine.dtype=auto engine.attention=auto
        engine.flash_attention=auto engine.transformer_impl=auto engine.apply_rope_fusion=auto
        engine.bias_activation_fusion=auto engine.gradient_accumulation_fusion=auto engine.fp8=null
        engine.fp8_recipe=tensorwise engine.fp8_roles=null actor.model.path=null
        actor.model.config=null actor.model.random_weights=false actor.parallel.pipeline_layers=null
        actor.lora.target_modules=all-linear actor.lora.init_lora_weights=true actor.lora.path=null
        actor.lora.use_rslora=false actor.lora.merge=null actor.base=null
        actor.parallel.pipeline_schedule=null actor.parallel.sequence_parallel=false
        actor.parallel.recompute=none actor.ranks=null reward.function=null reward.weights=null
        critic.optimizer.lr_scheduler_type=cosine critic.optimizer.use_distributed_optimizer=false
        critic.optimizer.overlap_grad_reduce=false critic.optimizer.state_dtype=fp32
        critic.optimizer.cpu_offload=false placement.reference=auto placement.profile=null
        placement.score=auto placement.learn=auto tokenizer.path=null tokenizer.chat_template=null
        tokenizer.add_eos=auto data.train=null data.eval=null data.format=auto
        data.columns=null data.apply_chat_template=false reward.url=null
        data.comparisons=all reward_loss.loss_type=bradley_terry
        ppo.filter_groups.enable=false ppo.filter_groups.allow_smaller=false
        data.synthetic_lengths=lognormal data.truncation_mode=keep_end
        data.on_error=raise data.shuffle=true data.cache_dir=null
        packing.enabled=true
        packing.layout=shared packing.scope=batch dpo.sync_ref_model=false
        dpo.precompute_ref_log_probs=false dpo.loss_type=sigmoid dpo.loss_weights=null
        dpo.f_divergence_type=reverse_kl dpo.f_alpha_divergence_coef=0.5 dpo.reference_free=false
        dpo.nll_scope=response dpo.use_weighting=false kto.loss_type=kto
        generation.stop_token_ids=null generation.enforce_eager=false generation.ranks=null
        generation.overlap_switch=false generation.offload_optimizer=false
        ppo.bootstrap_truncated=false ppo.advantage_estimator=gae ppo.kl_estimator=k1
        ppo.scale_rewards=group ppo.loss_mode=vanilla ppo.loss_agg_mode=token-mean
        ppo.mask_truncated_completions=false ppo.importance_sampling_mode=null
        ppo.use_kl_loss=false ppo.use_bias_correction_kl=false
        ppo.whiten_rewards=false ppo.whiten_advantages=true
        ppo.recompute_log_probs=false checkpoint.dir=null checkpoint.resume=auto
        telemetry.host_waits=false telemetry.token_metrics=true
        telemetry.progress=true telemetry.tensorboard=true telemetry.wandb_project=null
    """,
    "at_least=0": """
        critic.optimizer.warmup_steps=0 critic.optimizer.max_grad_norm=1.0
        critic.optimizer.max_skipped_steps=10 dpo.simpo_gamma=0.5 dpo.sft_loss_weight=0.0
        kto.desirable_weight=1.0 kto.undesirable_weight=1.0
        reward_loss.center_rewards_coefficient=0.0 generation.min_new_tokens=0
        generation.temperature=1.0 generation.top_k=0 ppo.clip_ratio_high=null ppo.entropy_coeff=0.0
        ppo.kl_coef=0.05 ppo.missing_eos_penalty=0.0 ppo.critic_warmup=0 checkpoint.save_every=0
        checkpoint.keep_last=2 telemetry.eval_every=0 telemetry.sample_every=10
        telemetry.trace_steps=0
    """,
    "at_least=1": """
        global_batch_size=64 num_train_epochs=1 max_steps=-1 engine.logprob_chunk_size=1024
        data.num_synthetic=4096 data.max_prompt_length=null data.num_proc=null
        dpo.ref_model_sync_steps=512 generation.num_generations=1 generation.max_new_tokens=128
        generation.prefill_tokens=4096 generation.decode_batch_size=64
        generation.num_scheduler_steps=null ppo.ppo_epochs=1 ppo.num_mini_batches=1
        ppo.kl_horizon=10000 telemetry.log_every=1 ppo.filter_groups.max_num_gen_batches=10
    """,
    "above=0": """
        actor.lora.lora_alpha=8.0
        critic.optimizer.adam_eps=1e-08 dpo.beta=0.1 dpo.discopop_tau=0.05 ppo.cliprange_value=0.2
        ppo.importance_sampling_cap=3.0
        ppo.kl_target=null ppo.cliprange_reward=null ppo.target_kl=null telemetry.peak_tflops=null
    """,
    "at_least=0 below=1": """
        actor.lora.lora_dropout=0.0
        critic.optimizer.adam_beta1=0.9 critic.optimizer.adam_beta2=0.95 data.eval_fraction=0.0
        ppo.clip_ratio=0.2
    """,
    "at_least=0 at_most=1e+18": """
        critic.optimizer.lr=1e-06 critic.optimizer.min_lr=0.0 critic.optimizer.weight_decay=0.0
    """,
    "at_least=0 at_most=1": "dpo.ld_alpha=null ppo.clip_ratio_low=null ppo.gamma=1.0 ppo.lam=0.95",
    "above=0 at_most=2000000.0": "reward.timeout=600.0",
    "at_least=1 at_most=2000000.0": "engine.distributed_timeout=600.0",
    "at_least=1 at_most=4096": "actor.lora.r=8",
    "at_least=1 at_most=128": """
        actor.parallel.pipeline_model_parallel_size=1
        actor.parallel.virtual_pipeline_model_parallel_size=1
    """,
    "at_least=1 at_most=16384": """
        actor.parallel.data_parallel_size=null actor.parallel.tensor_model_parallel_size=1
        engine.world_size=null
    """,
    "at_least=2": "data.max_length=1024 packing.row_tokens=4096",
    "above=0 at_most=1": "dpo.ref_model_mixup_alpha=0.6 generation.top_p=1.0",
    "at_least=0 at_most=9223372036854775807": "seed=42",
    "at_least=32": "data.synthetic_length=null",
    "at_least=0 below=0.5": "dpo.label_smoothing=0.0",
    "above=1": "ppo.clip_ratio_c=null",
}


def test_keys_have_these_defaults_and_bounds() -> None:
    firsts: dict[tuple[str, str], Key] = {}  # sections may be there for several roles
    for own in all_keys(JobConfig):
        if not own.is_section:
            firsts.setdefault((own.name.rpartition(".")[2], own.doc), own)
    found: dict[str, set[str]] = {}
    for own in firsts.values():
        bounds = {name: getattr(own, name) for name in ("at_least", "above", "at_most", "below")}
        text = " ".join(f"{name}={bound}" for name, bound in bounds.items() if bound is not None)
        default = json.dumps(own.default).replace('"', "")
        found.setdefault(text, set()).add(f"{own.name}={default}")
    assert found == {bounds: set(text.split()) for bounds, text in DECLARED.items()}


def test_a_job_s_keys_name_stages_that_there_are() -> None:
    for found in all_keys(JobConfig):
        named = found.binding if isinstance(found.binding, tuple) else ()
        assert {*found.stages, *named} <= set(STAGES), found.name


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("seed", ("dpo", "kto", "reward", "ppo", "grpo")),
        ("optimizer.adam_beta2", ("dpo", "kto", "reward", "ppo", "grpo")),
        ("critic.optimizer.adam_beta2", ("ppo", "grpo")),
        ("actor.model.config", ("dpo", "kto", "ppo", "grpo")),
        ("reference.model.config", ("dpo", "kto", "ppo", "grpo")),
        ("reward.model.config", ("reward", "ppo", "grpo")),
        ("reward.function", ("ppo", "grpo")),
        ("reward.weights", ("ppo", "grpo")),
        ("critic.model.config", ("ppo", "grpo")),
        ("dpo", ("dpo",)),
        ("kto", ("kto",)),
        ("reward_loss", ("reward",)),
        ("ppo", ("ppo", "grpo")),
        ("data.max_length", ("kto", "ppo", "grpo")),
        ("data.shuffle", ("dpo", "kto", "reward", "ppo", "grpo")),
        ("packing.scope", ("dpo", "kto", "reward")),
        ("generation.temperature", ("ppo", "grpo")),
        # What only says how fast, how long or where is free to change.
        ("generation.decode_batch_size", ()),
        ("optimizer.lr", ()),
        ("actor.parallel", ()),
        # That it names the same weights is checked.
        ("reference.model.path", ()),
        ("max_steps", ()),
    ],
)
def test_what_a_resumed_run_must_share(name, stages) -> None:
    assert tuple(stage for stage in STAGES if name in binding_keys(JobConfig, stage)) == stages


def test_generate_reads_the_actor_s_plan_and_nothing_else_of_a_role() -> None:
    read = generate_keys(JobConfig)
    assert [name for name in read if name.split(".")[0] in ("actor", "reference", "critic")] == [
        "actor.parallel"
    ]
    assert data_sections(JobConfig) == ("data", "packing", "generation")
