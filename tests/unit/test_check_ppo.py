"""Problems of a job of stage ppo: one line each that names its key."""

import json
from functools import partial

import pytest

from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import load_job
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.roles import job_phases, role_model
from puzzle_align.layout.model import ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.stages.rl.prompts import num_iterations
from tests.jobs import job_plan, model_of
from tests.specs import CONFIG
from tests.unit import test_check as check

SOUND = f"""
stage: ppo
actor: {{model: {{config: {json.dumps(CONFIG)}, random_weights: true}}}}
tokenizer: {{path: byte}}
reward: {{model: {{config: {json.dumps(CONFIG)}, random_weights: true}}}}
data: {{train: prompts.jsonl, max_length: 512}}
"""
PP, TP = "pipeline_model_parallel_size", "tensor_model_parallel_size"
FUNCTION = "reward={function: a:b}"  # and no model
RANDOM = {"random_weights": True}


problems_with = partial(check.problems_with, text=SOUND)
assert_problem = partial(check.assert_problem, text=SOUND)


def test_the_sound_job_is_sound() -> None:
    assert problems_with() == problems_with(ranks=4) == problems_with(FUNCTION) == []


OTHER = json.dumps({"config": CONFIG | {"vocab_size": 200}} | RANDOM, separators=(",", ":"))
RLOO = "ppo.advantage_estimator=rloo"


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        # of numbers out of range; all ranges are in test_schema.py
        ("generation.top_p=0", ": 0.0 is out of range; choose more than 0"),
        ("generation.top_p=1.1", ": 1.1 is out of range; choose more than 0, at most 1"),
        ("critic.optimizer.lr=-1", ": -1.0 is out of range"),
        ("critic.optimizer.adam_beta1=1", ": 1.0 is out of range"),
        ("critic.parallel.data_parallel_size=0", ": 0 is out of range; choose from 1"),
        ("reward.timeout=0", ": 0.0 is out of range; choose more than 0"),
        # of lengths, tokens and batches
        ("generation.min_new_tokens=129", ": 129 is above generation.max_new_tokens=128; lower it"),
        (
            "generation.max_new_tokens=512",
            ": 512 leaves no room for a prompt; choose less than data.max_length (now 512)",
        ),
        (
            "data.max_prompt_length=400",
            "data.max_length: 512 does not hold data.max_prompt_length=400 and "
            "generation.max_new_tokens=128; raise it to 528",
        ),
        (
            "packing.row_tokens=511",
            "data.max_length: 512 does not fit a row; lower it, or raise packing.row_tokens",
        ),
        ("generation.stop_token_ids=[2,260]", ": [260] are not tokens of"),
        ("generation.stop_token_ids=[-1,259]", ": [-1] are not tokens of"),
        ("data.format=packed", ": packed files hold preference pairs, not prompts"),
        ("packing.layout=padded", ": padded is for preference pairs; set it to shared"),
        (
            "ppo.num_mini_batches=10",
            ": 10 do not divide the 64 prompts of an iteration; choose 8, or global_batch_size=70",
        ),
        # of rewards
        (
            "reward.function=[a:b,c:d,a:b]",
            ": a:b is given twice; keep one, and weigh it by reward.weights",
        ),
        (
            "reward.function=[a:b,c:d] reward.weights=[1]",
            ": 1 numbers for 2 functions and servers; give one for each, in order",
        ),
        (
            "reward.url=http://:80/s",
            ": http://:80/s is no address of a server; write http://host:p",
        ),
        ("reward.url=ftp://h", ": ftp://h is no address of a server; write http://host:port/path"),
        ("reward.weights=[1]", ": [1.0], but there is no reward.function or reward.url; leave it"),
        (
            'reward={"function":["a:b","c:d"],"weights":[0,0]}',
            "reward.weights: [0.0, 0.0], and no reward.model: nothing rewards responses; give one",
        ),
        ("reward.model.config=null", "reward.model: no model, and no reward.function: nothing"),
        # of losses
        ("ppo.kl_coef=0 ppo.kl_estimator=k3 ppo.use_kl_loss=true", ": true, but ppo.kl_coef=0"),
        ("ppo.kl_coef=0 ppo.kl_target=6", ": 6.0, but ppo.kl_coef=0 does not adapt"),
        ("ppo.use_kl_loss=true", "ppo.kl_estimator: k1 as a loss (ppo.use_kl_loss) has zero"),
        ("ppo.use_bias_correction_kl=true", ": true, but there is no k3 in the loss to correct"),
        (
            "ppo.use_kl_loss=true ppo.kl_estimator=k2 ppo.use_bias_correction_kl=true",
            ": true, but there is no k3 in the loss to correct; set",
        ),
        (
            "stage=grpo ppo.kl_coef=0 ppo.use_bias_correction_kl=true",
            ": true, but there is no k3 in the loss to correct; set",
        ),
        (
            "ppo.kl_target=6 ppo.kl_horizon=12",
            ": 12 is too short for the 64 responses of an iteration; choose more than 12",
        ),
        ("ppo.bootstrap_truncated=true", ": true with ppo.gamma=1 makes"),
        (RLOO, "generation.num_generations: 1, but ppo.advantage_estimator=rloo compares"),
        (
            f"{RLOO} generation.num_generations=2 ppo.critic_warmup=1",
            ": 1, but ppo.advantage_estimator=rloo has no critic; set it to 0",
        ),
        (
            f"{RLOO} generation.num_generations=2 critic.parallel.{TP}=1",
            "critic.parallel: given, but ppo.advantage_estimator=rloo has no critic; leave it out",
        ),
        (
            f"{RLOO} generation.num_generations=2 ppo.whiten_rewards=true",
            ": true, but ppo.advantage_estimator=rloo has no critic, which this is for; set it to",
        ),
        (
            f"{RLOO} generation.num_generations=2 ppo.gamma=0.9 ppo.bootstrap_truncated=true",
            ": true, but ppo.advantage_estimator=rloo has no critic, which this is for; set it to",
        ),
        (
            f"{RLOO} generation.num_generations=2 generation.temperature=0",
            ": 0 makes all responses to a prompt equal, and ppo.advantage_estimator=rloo compares",
        ),
        (
            "ppo.advantage_estimator=remax generation.top_k=1",
            "generation.top_k: 1 makes all responses to a prompt equal, and ppo.advantage_est",
        ),
        (
            "generation.stop_token_ids=[] ppo.mask_truncated_completions=true",
            ": true, but no response can end before generation.max_new_tokens",
        ),
        (
            "generation.min_new_tokens=128 ppo.mask_truncated_completions=true",
            ": true, but no response can end before generation.max_new_tokens",
        ),
        (
            "max_steps=1 ppo.critic_warmup=1",
            ": 1 leaves none of the 1 iterations of max_steps to the actor; lower it, or raise",
        ),
        ("ppo.scale_rewards=batch", ": batch, but ppo.advantage_estimator=gae scales nothing"),
        (
            "ppo.advantage_estimator=reinforce_plus_plus ppo.whiten_advantages=false",
            ": false, but ppo.advantage_estimator=reinforce_plus_plus has no other baseline",
        ),
        ("ppo.filter_groups.enable=true", ": true, but with generation.num_generations=1 no resp"),
        (
            "ppo.importance_sampling_mode=token_mask",
            ": token_mask, but the log-probabilities of sampling have no others beside them",
        ),
        ("ppo.loss_mode=gspo ppo.clip_ratio_c=3", ": 3.0, but ppo.loss_mode=gspo has no dual clip"),
        # of models and places
        ("critic.optimizer.min_lr=1", ": 1.0 is above critic.opt"),
        (
            "placement.learn=time_shared",
            ": time_shared, but actor (P1, D1, T1): one pipeline rank leaves no",
        ),
        (
            "critic.model.random_weights=true critic.model.config.vocab_size=200",
            "critic.model.config: model_type=None is not supported",
        ),
        (
            f"critic.model={OTHER}",
            ": vocab_size=200 is below the 260 of actor.model, whose tokens it reads",
        ),
        ("actor.ranks=a-b", ": 'a-b' is not a rank range; write the first and the last"),
        ("generation.ranks=a-b", ": 'a-b' is not a rank range; write the first and the last"),
        ("reward.url=['http://h','http://h']", ": http://h is given twice; keep one"),
        ("critic.ranks=0-1", ": rank 1 is not among the job's 1 ranks: start more"),
    ],
)
def test_what_is_wrong_is_one_line(overrides: str, start: str) -> None:
    assert_problem(overrides, start)


@pytest.mark.parametrize(
    "overrides",
    [
        "reward.function=[a:b,c:d] reward.weights=[1,0.5]",
        "ppo.use_kl_loss=true ppo.kl_estimator=k3 ppo.kl_target=6",
        "ppo.kl_target=6 ppo.kl_horizon=13",
        "ppo.bootstrap_truncated=true ppo.gamma=0.99",
        "stage=grpo",
        "stage=grpo ppo.use_bias_correction_kl=true",
        "stage=grpo ppo.kl_coef=0",  # use_kl_loss is the stage's, not the user's
        f"{RLOO} generation.num_generations=2",
        "data.max_prompt_length=384",
        "generation.min_new_tokens=128",
        "generation.max_new_tokens=511",
        "generation.temperature=0",  # gae compares no responses to one prompt
        "max_steps=2 ppo.critic_warmup=1",
        "generation.stop_token_ids=[0,259]",
        # A row holds a prompt with one response at least, which data.max_length sees to.
        "generation.num_generations=64 packing.row_tokens=512",
        f"placement.learn=time_shared actor.parallel.{PP}=2",
        "telemetry.trace_steps=1",
    ],
)
def test_what_is_just_right_is_sound(overrides: str) -> None:
    assert problems_with(*overrides.split(), ranks=2) == []


@pytest.mark.parametrize(("steps", "key"), [("5", "max_steps"), ("-1", "num_train_epochs")])
def test_a_warm_up_leaves_iterations_to_the_actor(steps: str, key: str) -> None:
    keys = [f"max_steps={steps}", "global_batch_size=4"]
    job, longer = (load_job(SOUND, [*keys, f"ppo.critic_warmup={number}"]) for number in (4, 5))
    assert num_iterations(job, 17) == 5
    line = f"warmup: 5 leaves none of the job's 5 iterations to the actor; lower it, or raise {key}"
    with pytest.raises(ValueError, match=line):
        num_iterations(longer, 17)


def test_models_that_do_not_run_are_not_described() -> None:
    own = (f"parallel.{PP}=1", "ranks=0-0")
    reward = [f"reward.{key}" for key in own]
    model = json.dumps({"config": CONFIG} | RANDOM)
    reference = [f"reference.{key}" for key in (*own, f"model={model}")]
    assert problems_with(*reference, *reward) == []
    for key in (*reference, "reference.lora.path=/p"):
        (line,) = problems_with("ppo.kl_coef=0", key)
        name = ".".join(key.split("=")[0].split(".")[:2])
        cure = "leave it out, or raise ppo.kl_coef"
        assert line == f"{name}: given, but ppo.kl_coef=0 runs no reference; {cure}"
    for key in reward:
        (line,) = problems_with(FUNCTION, key)
        name = ".".join(key.split("=")[0].split(".")[:2])
        cure = "leave it out, or set reward.model.path"
        assert line == f"{name}: given, but there is no reward model; {cure}"


def test_a_trained_actor_is_not_rewarded_at_random(tmp_path) -> None:
    actor, reward = tmp_path / "actor", tmp_path / "reward"
    classifier = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    for path, more in ((actor, {}), (reward, classifier)):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG | more))
    trained = f"actor.model.path={actor}"
    (line,) = problems_with(trained, "reward.model.random_weights=false")
    assert line == (
        "reward.model: random weights, beside data.train=prompts.jsonl; set reward.model.path, or "
        "reward.model.random_weights=true if they are meant"
    )
    assert problems_with(trained, "reward={model: {config: null}, function: a:b}") == []
    assert problems_with(trained, f"reward.model={{path: {reward}}}") == []


def _roles(job: JobConfig, name: str) -> tuple[str, ...]:
    (phase,) = (phase for phase in job_phases(job) if phase.name == name)
    return tuple(role for role, _ in phase.contexts)


def test_the_roles_of_a_job() -> None:
    job = load_job(SOUND)
    assert Resolution(job).roles == ("actor", "critic", "reference", "reward")
    assert Resolution(job).trained == _roles(job, "learn") == ("actor", "critic")
    assert _roles(job, "score") == ("reference", "reward", "critic")
    again = load_job(SOUND, ["ppo.recompute_log_probs=true"])
    assert _roles(again, "score") == ("actor", "reference", "reward", "critic")
    heads = [model_of(job, role).spec.head for role in Resolution(job).roles]
    assert heads == ["lm", "scalar", "lm", "scalar"]
    assert role_model(job, "critic")[1] == "reward.model"
    alone = load_job(SOUND, [FUNCTION, "ppo.kl_coef=0"])
    assert Resolution(alone).roles == ("actor", "critic")
    assert _roles(alone, "score") == ("critic",)
    assert role_model(alone, "critic")[1] == "actor.model"


def test_a_reward_model_has_a_trained_head(tmp_path) -> None:
    path = f"reward.model={{path: {tmp_path}}}"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (line,) = problems_with(path)
    assert line == (
        f"reward.model.path: {tmp_path} is a language model, which has no trained reward head; "
        "train one with stage=reward and give its checkpoint"
    )
    assert problems_with(path, "reward.model.random_weights=true") == []
    classifier = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | classifier))
    assert problems_with(path) == []
    # A critic may start as a language model with a new head.
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert problems_with(f"critic.model.path={tmp_path}") == []


APART = "actor.ranks=0-3 critic.ranks=4-5 reward.ranks=4-5"


def test_a_role_is_on_the_ranks_that_it_names() -> None:
    plans = (f"actor.parallel.{PP}=2", f"critic.parallel.{TP}=2", f"reward.parallel.{PP}=2")
    job = load_job(SOUND, [*APART.split(), *plans])
    assert problems_with(*APART.split(), *plans, ranks=6) == []
    assert Resolution(job).smallest_world_size() == 6
    assert Resolution(job, 6).ranks("reference") == range(4)
    assert Resolution(job, 6).ranks("critic") == range(4, 6)
    assert Resolution(job, 6).plan.models["actor"].plan == ParallelPlan(pipeline=2, data=2)
    assert Resolution(job, 6).plan.models["critic"].plan == ParallelPlan(tensor=2)
    none = "no two models have the same ranks and the same plan"
    (line,) = problems_with(*APART.split(), *plans, "placement.score=time_shared", ranks=6)
    assert line.startswith(f"placement.score: time_shared, but {none}: reference (P2, D2, T1), ")


def test_two_models_of_a_phase_may_share_where_a_third_does_not() -> None:
    overrides = (*APART.split(), f"critic.parallel.{PP}=2", f"reward.parallel.{PP}=2")
    assert problems_with(*overrides, "placement.score=time_shared", ranks=6) == []


THREE, OTHERS = "P·T = 2 does not divide the 3 ranks of", "name others, or change the sizes"
FOUR = "rank 4 is not among the job's 4 ranks: start more, or name others"
STILL = (
    "generation.overlap_switch: true, but the actor samples under the plan that it is trained "
    "under: nothing moves; set generation.parallel to another, or leave it out"
)


@pytest.mark.parametrize(
    ("overrides", "ranks", "line"),
    [
        (
            APART,
            8,
            "actor.ranks: of the job's 8 ranks 6, 7 would hold no model; name them for one, or "
            "start fewer",
        ),
        (
            f"critic.ranks=0-2 critic.parallel.{PP}=2",
            4,
            f"critic.parallel: {THREE} critic.ranks: {OTHERS}",
        ),
        (
            f"critic.ranks=0-2 actor.parallel.{PP}=2",
            4,
            f"actor.parallel: {THREE} critic.ranks: name others, or give critic.parallel",
        ),
        ("actor.ranks=0-4", 4, f"actor.ranks: {FOUR}"),
        (
            f"actor.ranks=0-3 generation.ranks=4-6 generation.parallel.{PP}=2",
            7,
            f"generation.parallel: {THREE} generation.ranks: {OTHERS}",
        ),
        (f"generation.ranks=3-4 generation.parallel.{PP}=2", 4, f"generation.ranks: {FOUR}"),
        (
            f"generation.parallel.{PP}=3",
            4,
            "generation.parallel: P·T = 3 does not divide 4 ranks: start a multiple of 3, "
            "or change the sizes",
        ),
        ("generation.overlap_switch=true", 4, STILL),
        (f"generation.overlap_switch=true generation.parallel.{TP}=1", 4, STILL),
        (
            f"critic.parallel.{PP}=4",
            6,
            "critic.parallel: P·T = 4 does not divide 6 ranks: start a multiple of 4, "
            "or change the sizes",
        ),
    ],
)
def test_ranks_and_plans_that_do_not_fit(overrides: str, ranks: int, line: str) -> None:
    assert problems_with(*overrides.split(), ranks=ranks) == [line]


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ("", 1),
        (f"actor.parallel.{PP}=2 critic.parallel.{TP}=3", 6),
        (APART, 6),
        (f"actor.ranks=0-4 critic.parallel.{PP}=2", 6),
        ("actor.ranks=0-3 critic.ranks=2-9", 10),
        (f"actor.parallel.{PP}=2 generation.parallel.{TP}=3", 6),
        ("actor.ranks=0-3 generation.ranks=2-9", 10),
        (f"actor.parallel.{PP}=0 critic.parallel.{TP}=-1", 1),  # reported by the checks
    ],
)
def test_smallest_world_size(overrides: str, size: int) -> None:
    assert Resolution(load_job(SOUND, overrides.split())).smallest_world_size() == size


def test_the_actor_may_sample_under_a_plan_of_its_own() -> None:
    heads = [f"{role}.model.config.num_key_value_heads=4" for role in ("actor", "reward")]
    overrides = [*heads, f"actor.parallel.{TP}=4", f"generation.parallel.{TP}=2"]
    assert problems_with(*overrides, ranks=4) == []
    assert problems_with(*overrides, "generation.overlap_switch=true", ranks=4) == []
    plan = job_plan(load_job(SOUND, overrides), ModelOptions(), 4)
    trained, sampling = plan.context("actor", "train"), plan.context("actor", "generate")
    assert trained.plan == ParallelPlan(tensor=4) and trained.ranks == (0, 1, 2, 3)
    # Ranks 0 and 1 hold the first half already, 2 and 3 the second.
    assert sampling.plan == ParallelPlan(data=2, tensor=2) and sampling.ranks == (0, 2, 1, 3)
    line = problems_with(f"generation.parallel.{TP}=3", ranks=3)[0]
    assert line.startswith("generation.parallel: tensor size 3 does not divide num_attention_heads")
    same = job_plan(load_job(SOUND, [f"generation.parallel.{PP}=1"]), ModelOptions(), 4)
    assert same.context("actor", "generate").ranks == same.context("actor", "train").ranks
    elsewhere = load_job(SOUND, ["actor.ranks=0-1", "critic.ranks=0-1", "generation.ranks=2-2"])
    assert job_plan(elsewhere, ModelOptions(), 3).context("actor", "generate").ranks == (2,)
