"""Keys as TRL, verl and NeMo-RL call them: what is suggested, and what --help lists."""

import dataclasses

import pytest
from transformers import TrainingArguments

from puzzle_align.cli.arguments import describe_keys
from puzzle_align.config.elsewhere import NAMES, OURS
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.schema import all_keys
from tests.refusals import refusal


def hint(stage: str, override: str) -> str:
    """Hint in the refusal of an unknown key."""
    line = refusal(lambda: load_job(f"stage: {stage}", [override]))
    begins = f"override '{override}': unknown key '{override.partition('=')[0]}'; "
    assert line.startswith(begins), line
    return line.removeprefix(begins)


@pytest.mark.parametrize(
    ("stage", "override", "key"),
    [
        ("dpo", "learning_rate=1e-3", "optimizer.lr"),
        ("dpo", "optimizer.learning_rate=1e-3", "optimizer.lr"),
        ("ppo", "actor_rollout_ref.actor.optim.lr=1", "optimizer.lr"),
        ("ppo", "critic.optim.lr=1", "critic.optimizer.lr"),
        ("dpo", "per_device_train_batch_size=8", "global_batch_size"),
        ("dpo", "gradient_accumulation_steps=8", "global_batch_size"),
        ("dpo", "num_epochs=1", "num_train_epochs"),
        ("dpo", "policy.train_micro_batch_size=8", "packing.row_tokens"),
        ("dpo", "policy.dtensor_cfg.activation_checkpointing=true", "actor.parallel.recompute"),
        ("dpo", "data.prompt_key=question", "data.columns"),
        ("ppo", "actor_rollout_ref.rollout.n=8", "generation.num_generations"),
        ("ppo", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "ppo.num_mini_batches"),
        ("ppo", "algorithm.kl_ctrl.kl_coef=0.1", "ppo.kl_coef"),
        ("ppo", "algorithm.kl_ctrl.target_kl=1", "ppo.kl_target"),
        ("ppo", "beta=0.1", "ppo.kl_coef"),
        ("dpo", "ref_model=x", "reference.model.path"),
        ("dpo", "clip_grad=1", "optimizer.max_grad_norm"),
        ("grpo", "gradient_clipping=1", "optimizer.max_grad_norm"),
        ("grpo", "algorithm.use_kl_in_reward=true", "ppo.use_kl_loss"),
        ("grpo", "loss_type=dapo", "ppo.loss_agg_mode"),
        ("grpo", "delta=4", "ppo.clip_ratio_c"),
        ("grpo", "epsilon_low=0.2", "ppo.clip_ratio_low"),
        ("grpo", "grpo.overlong_filtering=true", "ppo.mask_truncated_completions"),
        ("dpo", "disable_dropout=true", "actor.lora.lora_dropout"),
        ("dpo", "recompute_granularity=full", "actor.parallel.recompute"),
        ("ppo", "critic_learning_rate=1e-5", "critic.optimizer.lr"),
        ("dpo", "actor.lora.rank=4", "actor.lora.r"),
        ("dpo", "lora_r=4", "actor.lora.r"),
        ("dpo", "lora_rank=4", "actor.lora.r"),
    ],
)
def test_a_name_of_another_library_means_our_key(stage: str, override: str, key: str) -> None:
    assert hint(stage, override).startswith(f"its name here is '{key}': ")


@pytest.mark.parametrize(
    ("stage", "override", "key"),
    [
        ("dpo", "optimizer.learning_rat=1e-3", "optimizer.lr"),  # almost their name for it
        ("ppo", "lr=1", "optimizer.lr"),
        (
            "dpo",
            "policy.megatron_cfg.tensor_model_parallel_size=8",
            "actor.parallel.tensor_model_parallel_size",
        ),
        ("ppo", "algorithm.gamma=1", "ppo.gamma"),
        ("dpo", "loss_type=ipo", "dpo.loss_type"),
        ("kto", "loss_type=kto", "kto.loss_type"),
        ("dpo", "beta=0.1", "dpo.beta"),
        ("kto", "beta=0.1", "kto.beta"),
        ("dpo", "max_prompt_length=9", "data.max_prompt_length"),
        (
            "ppo",
            "critic.megatron.tensor_model_parallel_size=2",
            "critic.parallel.tensor_model_parallel_size",
        ),
    ],
)
def test_a_name_that_ends_or_looks_like_ours_is_near_it(
    stage: str, override: str, key: str
) -> None:
    assert hint(stage, override) == f"the nearest known one is '{key}'"


def test_nothing_is_suggested_for_a_name_that_is_like_none() -> None:
    assert refusal(lambda: load_job("stage: dpo", ["push_to_hub=true"])) == (
        "override 'push_to_hub=true': unknown key 'push_to_hub'; none is like it; --help lists all"
    )


def test_the_line_says_the_meaning_and_the_place() -> None:
    text = "seed: 1\nactor_rollout_ref:\n  actor:\n    optim: {lr: 1.0e-6}\n"
    assert refusal(lambda: load_job(text, source="job.yaml")) == (
        "job.yaml:4: unknown key 'actor_rollout_ref.actor.optim.lr'; its name here is"
        " 'optimizer.lr': peak learning rate"
    )


def test_names_elsewhere_are_no_keys_of_ours() -> None:
    known = {key.name for key in all_keys(JobConfig)}
    assert known >= NAMES.keys() and not known & OURS.keys()
    assert sum(map(len, NAMES.values())) == len(OURS), "one name, two keys"
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    named = {name for name in OURS if name in theirs}
    assert {"learning_rate", "save_steps", "logging_steps", "adam_epsilon"} <= named


def test_help_lists_them() -> None:
    shown = " ".join(describe_keys().split())
    for ours, theirs in NAMES.items():
        assert f"elsewhere {', '.join(theirs)})" in shown, ours
