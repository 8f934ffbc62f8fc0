"""Checks for stage ppo: sampling, row lengths, losses, ranks and models."""

from collections import Counter
from collections.abc import Iterator, Sequence

from puzzle_align.config.job import JobConfig
from puzzle_align.config.parallel import parse_ranks
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.roles import ROLES, role_lora
from puzzle_align.config.sections.models import RoleConfig, is_url
from puzzle_align.config.stages import STAGES
from puzzle_align.files.messages import shown
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.plan import divisors

# With this many times kl_horizon responses in an iteration, one update could bring kl_coef to 0.
_MAX_HORIZONS = 5


def ranks_problems(job: JobConfig) -> Iterator[str]:
    """Problems of ``<role>.ranks`` and ``generation.ranks``, in any stage."""
    for section in (*ROLES, "generation"):
        text, key = getattr(job, section).ranks, f"{section}.ranks"
        if text is None:
            continue
        try:
            parse_ranks(text, key)
        except ValueError as error:
            yield str(error)


def stage_problems(resolution: Resolution) -> Iterator[str]:
    """Problems of a ppo job whose numbers are in range, one line each."""
    job = resolution.config
    yield from _reward_problems(job)
    yield from new_token_problems(job)
    yield from _data_problems(job)
    yield from _batch_problems(job)
    yield from _kl_problems(job)
    yield from _learning_problems(job)
    yield from _response_problems(job)
    yield from _unused_model_problems(job, resolution.roles)
    yield from _vocabulary_problems(resolution)


def plan_problems(job: JobConfig, plan: JobPlan) -> Iterator[str]:
    """Problems of a job under its plan, one line each."""
    if job.generation.overlap_switch and not plan.switches:
        yield (
            "generation.overlap_switch: true, but the actor samples under the plan that it is "
            "trained under: nothing moves; set generation.parallel to another, or leave it out"
        )
    yield from _merge_problems(job, plan)
    held = {rank for context in plan.contexts for rank in context.ranks}
    idle = [rank for rank in range(plan.world_size) if rank not in held]
    if idle:
        unused = shown(", ".join(map(str, idle)))
        key = next(f"{r}.ranks" for r in plan.models if getattr(job, r).ranks is not None)
        yield (
            f"{key}: of the job's {plan.world_size} ranks {unused} would hold no model; name them "
            "for one, or start fewer"
        )


def _merge_problems(job: JobConfig, plan: JobPlan) -> Iterator[str]:
    """Adapters that are merged for sampling, and whose rounding nothing corrects."""
    lora, key = role_lora(job, "actor")
    if lora is None or not lora.merge or plan.switches:
        return
    if plan.contexts[0].options.dtype != "fp32" and not job.ppo.recompute_log_probs:
        yield (
            f"{key}.merge: true, but merged weights are rounded to bf16, and the log-probabilities "
            "of sampling are not those of training; set ppo.recompute_log_probs=true"
        )


def longest_prompt(job: JobConfig) -> int:
    """Longest prompt, in tokens, that stage ppo keeps."""
    return job.data.longest_prompt(job.generation.max_new_tokens)


def longest_segment(job: JobConfig, *, together: int) -> int:
    """Most tokens in a row of a prompt with ``together`` of its responses."""
    copies = 1 if job.packing.row_layout == "shared" else together
    return copies * longest_prompt(job) + together * job.generation.max_new_tokens


def fewest_together(job: JobConfig) -> int:
    """Number of the K responses that fit a row with their prompt at any length: a divisor of K.

    A segment too long for a row is split and its prompt repeated.
    """
    k, row = job.generation.num_generations, job.packing.row_tokens
    return max((n for n in divisors(k) if longest_segment(job, together=n) <= row), default=1)


def _reward_problems(job: JobConfig) -> Iterator[str]:
    """No reward at all, duplicate functions, and weights that do not match them."""
    if not job.reward.has_model and not job.reward.functions:
        yield (
            "reward.model: no model, and no reward.function: nothing rewards responses;"
            " set reward.model.path, reward.function=module:function, or reward.url"
        )
    urls = job.reward.urls
    for url in urls:
        if not is_url(url):
            yield f"reward.url: {shown(url)} is no address of a server; write http://host:port/path"
    names, weights = job.reward.functions, job.reward.weights
    for name in sorted(name for name, times in Counter(names).items() if times > 1):
        key = "reward.url" if name in urls else "reward.function"
        yield f"{key}: {shown(name)} is given twice; keep one, and weigh it by reward.weights"
    if weights is None:
        return
    if not names:
        yield (
            f"reward.weights: {shown(weights)}, but there is no reward.function or reward.url; "
            "leave it out"
        )
    elif len(weights) != len(names):
        yield (
            f"reward.weights: {len(weights)} numbers for {len(names)} functions and servers; give "
            "one for each, in order"
        )
    elif not any(weights) and not job.reward.has_model:
        yield (
            f"reward.weights: {shown(weights)}, and no reward.model: nothing rewards responses; "
            "give one a weight other than 0"
        )


def new_token_problems(job: JobConfig) -> Iterator[str]:
    """Response lengths that contradict each other or leave no room for a prompt."""
    data, generation = job.data, job.generation
    prompt = longest_prompt(job)
    if generation.min_new_tokens > generation.max_new_tokens:
        yield (
            f"generation.min_new_tokens: {generation.min_new_tokens} is above "
            f"generation.max_new_tokens={generation.max_new_tokens}; lower it"
        )
    if prompt < 1:
        yield (
            f"generation.max_new_tokens: {generation.max_new_tokens} leaves no room for a prompt; "
            f"choose less than data.max_length (now {data.max_length})"
        )
        return
    if prompt + generation.max_new_tokens > data.max_length:
        yield (
            f"data.max_length: {data.max_length} does not hold data.max_prompt_length={prompt} and "
            f"generation.max_new_tokens={generation.max_new_tokens}; raise it to "
            f"{prompt + generation.max_new_tokens}, or lower one of them"
        )


def _data_problems(job: JobConfig) -> Iterator[str]:
    data, packing = job.data, job.packing
    if data.format == "packed":
        yield "data.format: packed files hold preference pairs, not prompts; set it to auto"
    if packing.layout == "padded":
        yield "packing.layout: padded is for preference pairs; set it to shared, or to paired"


def _batch_problems(job: JobConfig) -> Iterator[str]:
    prompts, parts = job.global_batch_size, job.ppo.num_mini_batches
    if prompts % parts:
        below = max(number for number in divisors(prompts) if number < parts)
        yield (
            f"ppo.num_mini_batches: {parts} do not divide the {prompts} prompts of an iteration; "
            f"choose {below}, or global_batch_size={-(-prompts // parts) * parts}"
        )


def _kl_problems(job: JobConfig) -> Iterator[str]:
    ppo = job.ppo
    num_responses = job.global_batch_size * job.generation.num_generations
    if ppo.kl_coef == 0 and ppo.use_kl_loss and "ppo.use_kl_loss" not in STAGES[job.stage].defaults:
        yield "ppo.use_kl_loss: true, but ppo.kl_coef=0 gives it no weight; raise that"
    if ppo.kl_coef == 0 and ppo.kl_target is not None:
        yield f"ppo.kl_target: {ppo.kl_target}, but ppo.kl_coef=0 does not adapt; raise that"
    if ppo.use_kl_loss and ppo.kl_estimator == "k1":
        yield (
            "ppo.kl_estimator: k1 as a loss (ppo.use_kl_loss) has zero expected gradient; set "
            "it to k2 or k3"
        )
    has_k3_loss = ppo.use_kl_loss and ppo.kl_estimator == "k3" and ppo.kl_coef > 0
    if ppo.use_bias_correction_kl and not has_k3_loss:
        yield (
            "ppo.use_bias_correction_kl: true, but there is no k3 in the loss to correct; set "
            "ppo.use_kl_loss=true, ppo.kl_estimator=k3 and ppo.kl_coef above 0, or leave it out"
        )
    if ppo.kl_target is not None and num_responses >= _MAX_HORIZONS * ppo.kl_horizon:
        yield (
            f"ppo.kl_horizon: {ppo.kl_horizon} is too short for the {num_responses} responses of "
            f"an iteration; choose more than {num_responses // _MAX_HORIZONS}"
        )


def _learning_problems(job: JobConfig) -> Iterator[str]:
    ppo = job.ppo
    if ppo.bootstrap_truncated and ppo.gamma == 1:
        yield (
            "ppo.bootstrap_truncated: true with ppo.gamma=1 makes values grow without bound, each "
            "estimated from the one before; set ppo.gamma below 1 (0.99), or this to false"
        )
    for name in ("whiten_rewards", "bootstrap_truncated") if not ppo.estimator.uses_critic else ():
        if getattr(ppo, name):
            yield (
                f"ppo.{name}: true, but ppo.advantage_estimator={ppo.advantage_estimator} has no "
                "critic, which this is for; set it to false"
            )
    if ppo.critic_warmup and not ppo.estimator.uses_critic:
        yield (
            f"ppo.critic_warmup: {ppo.critic_warmup}, but ppo.advantage_estimator="
            f"{ppo.advantage_estimator} has no critic; set it to 0"
        )
    if ppo.scale_rewards != "group" and not ppo.estimator.scales:
        yield (
            f"ppo.scale_rewards: {ppo.scale_rewards}, but ppo.advantage_estimator="
            f"{ppo.advantage_estimator} scales nothing; leave it out, or choose grpo"
        )
    if ppo.advantage_estimator == "reinforce_plus_plus" and not ppo.whiten_advantages:
        yield (
            "ppo.whiten_advantages: false, but ppo.advantage_estimator=reinforce_plus_plus has no "
            "other baseline; set it to true"
        )
    if ppo.importance_sampling_mode is not None and not ppo.recompute_log_probs:
        yield (
            f"ppo.importance_sampling_mode: {ppo.importance_sampling_mode}, but the "
            "log-probabilities of sampling have no others beside them; set "
            "ppo.recompute_log_probs=true"
        )
    if ppo.clip_ratio_c is not None and ppo.loss_mode != "vanilla":
        yield (
            f"ppo.clip_ratio_c: {ppo.clip_ratio_c}, but ppo.loss_mode={ppo.loss_mode} has no dual "
            "clip; leave it out"
        )
    if 0 < job.max_steps <= ppo.critic_warmup:
        yield (
            f"ppo.critic_warmup: {ppo.critic_warmup} leaves none of the {job.max_steps} iterations "
            "of max_steps to the actor; lower it, or raise max_steps"
        )


def _response_problems(job: JobConfig) -> Iterator[str]:
    """Responses of which none would train the policy, however they are rewarded."""
    ppo, generation = job.ppo, job.generation
    if ppo.filter_groups.enable and generation.num_generations < 2:
        yield (
            "ppo.filter_groups.enable: true, but with generation.num_generations=1 no responses "
            "are compared; set it to 2 or more"
        )
    is_greedy = generation.temperature == 0 or generation.top_k == 1
    if is_greedy and (ppo.estimator.least_generations > 1 or ppo.estimator.samples_greedily):
        key = "temperature: 0" if generation.temperature == 0 else "top_k: 1"
        yield (
            f"generation.{key} makes all responses to a prompt equal, and "
            f"ppo.advantage_estimator={ppo.advantage_estimator} compares them; raise it"
        )
    can_end = generation.stop_token_ids != [] and (
        generation.min_new_tokens < generation.max_new_tokens
    )
    if ppo.mask_truncated_completions and not can_end:
        yield (
            "ppo.mask_truncated_completions: true, but no response can end before "
            "generation.max_new_tokens, so all would be left out; set it to false, or "
            "generation.stop_token_ids and generation.min_new_tokens so that they can"
        )
    if generation.num_generations < ppo.estimator.least_generations:
        yield (
            f"generation.num_generations: {generation.num_generations}, but "
            f"ppo.advantage_estimator={ppo.advantage_estimator} compares responses to one prompt; "
            f"set it to {ppo.estimator.least_generations} or more"
        )


def _unused_model_problems(job: JobConfig, roles: Sequence[str]) -> Iterator[str]:
    """Models that are configured but never run."""
    idle = {
        "reference": ("ppo.kl_coef=0 runs no reference", "raise ppo.kl_coef"),
        "reward": ("there is no reward model", "set reward.model.path"),
        "critic": (
            f"ppo.advantage_estimator={job.ppo.advantage_estimator} has no critic",
            "choose gae",
        ),
    }
    for role, (why, cure) in idle.items():
        section: RoleConfig = getattr(job, role)
        configured = {
            "model": section.has_model,
            "lora": section.lora is not None and section.lora.path is not None,
            "parallel": section.parallel is not None,
            "ranks": section.ranks is not None,
        }
        for name in configured if role not in roles else ():
            if configured[name]:
                yield f"{role}.{name}: given, but {why}; leave it out, or {cure}"


def _vocabulary_problems(resolution: Resolution) -> Iterator[str]:
    """Models whose vocabulary lacks tokens that the actor may sample."""
    models = resolution.models
    if "actor" not in models:
        return
    actor = models["actor"]
    most = actor.spec.vocab_size
    for role, model in models.items():
        if model.key.startswith(role) and model.spec.vocab_size < most:
            yield (
                f"{model.key}: vocab_size={model.spec.vocab_size} is below the {most} of "
                f"{actor.key}, whose tokens it reads; give a model of the same tokenizer"
            )
    stops = resolution.config.generation.stop_token_ids or ()
    beyond = [token for token in stops if not 0 <= token < most]
    if beyond:
        yield (
            f"generation.stop_token_ids: {shown(beyond)} are not tokens of {actor.key}, which has "
            f"{most}; leave them out"
        )
