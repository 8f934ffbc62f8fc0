"""Checks of a job across its keys, a world size and a model's dimensions.

``problems`` lists everything wrong, one line each: the dotted key, its value, the cure.
The range of a key stands in its declaration; checks across keys are here.
An empty list promises that the plans cover all ranks, that they can split the models, and that
every number is in its range. Problems that only the data shows (a pair too long for a row) are
reported when the data is read.
"""

from collections.abc import Iterator, Sequence

from puzzle_align.config import check_ppo, check_preference
from puzzle_align.config.check_plan import (
    chosen_problems,
    place_problems,
    sharing_problems,
    with_source,
)
from puzzle_align.config.check_ppo import new_token_problems, ranks_problems
from puzzle_align.config.chosen_plan import decided_keys
from puzzle_align.config.job import JobConfig
from puzzle_align.config.parallel import one_replica
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.roles import ROLES, fp8_of, role_model
from puzzle_align.config.schema import is_among, key_values
from puzzle_align.config.sections.engine import FUSIONS, EngineConfig
from puzzle_align.config.sections.models import RoleConfig
from puzzle_align.config.sections.optimizer import MOST_BF16_BETA, OptimizerConfig
from puzzle_align.config.stages import PROMPTS, STAGES
from puzzle_align.files.messages import shown, shown_path
from puzzle_align.layout.attention import BACKENDS, Backend
from puzzle_align.layout.families import FAMILIES
from puzzle_align.layout.model import LORA_TARGETS, ModelSpec
from puzzle_align.layout.plan import MOST_RANKS, division_problems, plan_problems


class JobProblems(ValueError):
    """Everything wrong with a job; ``lines`` has one problem each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


def check_keys(config: JobConfig) -> None:
    """Raise a one-line ValueError for the first problem of the keys, without models or ranks.

    Every rank raises the same error: no path is opened, since another run might be changing it.
    """
    raise_first(_key_problems(Resolution(config)))


def check_unplanned(config: JobConfig) -> None:
    """Raise a one-line ValueError for the first problem of a job that is to be planned.

    Keys that its plan will decide need only be in range.
    """
    resolution = Resolution(config)
    lines = [*_number_problems(config)]
    if not lines:
        stage = check_ppo if config.stage in PROMPTS else check_preference
        lines += stage.stage_problems(resolution)
        for role in resolution.roles:
            lines += _model_problems(resolution, role)
        lines += (*_lora_problems(resolution), *_base_problems(resolution))
        decided = decided_keys(config.stage, ROLES)
        lines = [line for line in lines if not is_among(line.partition(":")[0], decided)]
    raise_first(lines)


def raise_first(lines: Sequence[str]) -> None:
    """Raise a one-line ValueError with the first problem, if any."""
    if lines:
        more = f" (and {len(lines) - 1} more: --validate lists all)" if len(lines) > 1 else ""
        raise ValueError(lines[0] + more)


def problems(resolution: Resolution) -> list[str]:
    """Everything wrong with a job, one line each."""
    config, world_size, chosen = resolution.config, resolution.world_size, resolution.chosen
    lines = _key_problems(resolution)
    if any(_number_problems(config)):  # the checks below divide by these numbers
        return lines if chosen is None else with_source(lines, chosen)
    if world_size > MOST_RANKS:
        return [*lines, f"{world_size} ranks: there may be {MOST_RANKS} at most; start fewer"]
    stage = check_ppo if config.stage in PROMPTS else check_preference
    lines += stage.stage_problems(resolution)
    for role in resolution.roles:
        lines += place_problems(resolution, role) if chosen is None else ()
        lines += _model_problems(resolution, role)
    lines += _lora_problems(resolution)
    lines += _base_problems(resolution)
    if chosen is not None:
        lines += chosen_problems(resolution, chosen)
    elif STAGES[config.stage].ranks_by_role and resolution.samples_elsewhere:
        lines += place_problems(resolution, "actor", "generate")
    if not lines:
        lines += sharing_problems(resolution) if chosen is None else ()
        lines += stage.plan_problems(config, resolution.plan)
    if chosen is not None:
        lines = with_source(lines, chosen)
    return list(dict.fromkeys(lines))


def generation_problems(resolution: Resolution, model: str) -> list[str]:
    """Everything wrong with generating from the actor's model, under its plan.

    ``model`` names it in the lines. Keys that generation does not read are not checked.
    """
    job, place = resolution.config, resolution.place("actor")
    lines = [*_range_problems(job)]
    if lines:
        return lines
    plan, spec = one_replica(place.parallel), resolution.model("actor").spec
    try:
        resolution.grid("actor")
    except ValueError as error:
        lines.append(str(error))
    lines += [
        *new_token_problems(job),
        *_run_problems(resolution),
        *plan_problems(plan, place.key),
    ]
    lines += division_problems(spec, resolution.with_layers(plan, "actor"), place.key, model)
    lines += _length_problems(spec, job.data.max_length, model)
    return lines


def _key_problems(resolution: Resolution) -> list[str]:
    """Problems of the keys, without models or ranks; if numbers are bad, of the numbers alone."""
    return [*_number_problems(resolution.config)] or [
        *_data_problems(resolution.config),
        *_run_problems(resolution),
        *_unasked_problems(resolution),
    ]


def _number_problems(job: JobConfig) -> Iterator[str]:
    yield from _range_problems(job)
    yield from ranks_problems(job)


def _range_problems(job: JobConfig) -> Iterator[str]:
    for key, value in key_values(job):
        wanted = key.range_problem(value)
        if wanted is not None:
            yield f"{key.name}: {shown(value)} is out of range; choose {wanted}"


def _data_problems(job: JobConfig) -> Iterator[str]:
    data, row = job.data, job.packing.row_tokens
    if data.format != "synthetic" and data.train is None:
        yield "data.train: null; give a file, a datasets directory or a hub name"
    if data.format == "synthetic" and (data.train or data.eval):
        yield (
            "data.format: synthetic pairs are generated, so "
            f"'{shown_path(str(data.train or data.eval))}' would not be read; set data.format=auto"
        )
    if data.format == "synthetic" and data.columns:
        yield "data.columns: data.format=synthetic has columns of its own; leave it out"
    if data.eval is not None and data.eval_fraction > 0:
        yield (
            f"data.eval_fraction: {data.eval_fraction} is not used beside "
            f"data.eval={shown_path(data.eval)}; keep one of them"
        )
    if data.max_length > row:
        yield (
            f"data.max_length: {data.max_length} does not fit a row; lower it, or raise "
            f"packing.row_tokens (now {row})"
        )
    if job.packing.scope == "dataset" and not job.packing.is_packed:
        why = "layout is padded" if job.packing.layout == "padded" else "enabled is false"
        yield f"packing.scope: dataset means nothing while packing.{why}; set it to batch"
    if data.format == "packed" and not job.packing.is_packed:
        why = "layout: padded" if job.packing.layout == "padded" else "enabled: false"
        yield f"packing.{why}, but packed files hold ready rows; set it as they were made"


def _unasked_problems(resolution: Resolution) -> Iterator[str]:
    """Random weights or byte tokens beside real models or data, unless explicitly requested."""
    job = resolution.config
    models = {key: model for model, key in (role_model(job, role) for role in resolution.roles)}
    real_inputs = [
        f"{key}.path={shown_path(model.path)}"
        for key, model in models.items()
        if model.path is not None and not model.random_weights
    ]
    if job.data.format != "synthetic" and job.data.train is not None:
        real_inputs.append(f"data.train={shown_path(job.data.train)}")
    if not real_inputs:
        return
    for key, model in models.items():
        if model.path is None and model.config is not None and not model.random_weights:
            yield (
                f"{key}: random weights, beside {real_inputs[0]}; set {key}.path, or "
                f"{key}.random_weights=true if they are meant"
            )
    main, key = role_model(job, job.main_role)
    if job.tokenizer.path is None and main.path is None:
        yield (
            f"tokenizer.path: null, and {key} has no path to take it from: text would "
            f"become bytes, beside {real_inputs[0]}; name a tokenizer's directory, or 'byte' if "
            "bytes are meant"
        )


def _run_problems(resolution: Resolution) -> Iterator[str]:
    job = resolution.config
    for key, optimizer in (
        ("optimizer", job.optimizer),
        ("critic.optimizer", job.critic.optimizer),
    ):
        if optimizer is not None and optimizer.min_lr > optimizer.lr:
            yield f"{key}.min_lr: {optimizer.min_lr} is above {key}.lr={optimizer.lr}; lower it"
        if optimizer is not None:
            yield from _state_problems(optimizer, key)
    yield from _engine_problems(job.engine)
    if job.engine.fp8 is not None:
        yield from _fp8_problems(job, resolution.roles)


def _engine_problems(engine: EngineConfig) -> Iterator[str]:
    """Conflicts between keys of ``engine``, one line each."""
    backend = BACKENDS.get(engine.attention, Backend(chooses_flash=True))  # auto
    if engine.device == "cpu" and not backend.trains_on_cpu:
        yield f"engine.attention: {engine.attention} has no backward pass on cpu; set it to auto"
    if engine.device == "cuda" and engine.dtype == "fp32" and "fp32" not in backend.cuda_dtypes:
        yield f"engine.attention: {engine.attention} computes only in bf16 on cuda; set it to flex"
    is_read = engine.device != "cpu" and backend.chooses_flash
    if engine.flash_attention != "auto" and not is_read:
        yield (
            f"engine.flash_attention: {engine.flash_attention} is only for attention=varlen on "
            "cuda; set it to auto"
        )
    if engine.device == "cpu" and engine.transformer_impl == "te":
        yield "engine.transformer_impl: te needs cuda, not engine.device=cpu; set it to auto"
    for name in FUSIONS:
        if getattr(engine, name) is not True:
            continue
        if engine.device == "cpu":
            yield f"engine.{name}: true needs cuda, not engine.device=cpu; set it to auto"
        elif name != "bias_activation_fusion" and engine.transformer_impl == "local":
            yield (
                f"engine.{name}: true needs Transformer Engine, not "
                "engine.transformer_impl=local; set it to auto"
            )
    fp8_needs = (
        ("device", "cpu", "cuda"),
        ("transformer_impl", "local", "Transformer Engine"),
        ("dtype", "fp32", "bf16"),
    )
    for name, value, needed in fp8_needs if engine.fp8 is not None else ():
        if getattr(engine, name) == value:
            yield f"engine.fp8: {engine.fp8} needs {needed}, not engine.{name}={value}; change one"


def _fp8_problems(job: JobConfig, roles: Sequence[str]) -> Iterator[str]:
    """FP8 with rows of varying length, or for roles that the stage lacks."""
    if not job.packing.is_packed:
        yield (
            f"engine.fp8: {job.engine.fp8} needs rows of one length, and rows that are not packed "
            "vary; set packing.enabled=true, or engine.fp8=null"
        )
    some = f"name some of {', '.join(roles)}"
    if job.engine.fp8_roles == []:
        yield f"engine.fp8_roles: [], beside engine.fp8={job.engine.fp8}; {some}"
    for role in ROLES:
        if fp8_of(job, role) is not None and role not in roles:
            yield f"engine.fp8_roles: stage {job.stage} has no model {role}; {some}"


def _state_problems(optimizer: OptimizerConfig, key: str) -> Iterator[str]:
    """Settings that optimizer state in bf16 or in host memory rules out."""
    if optimizer.in_pieces and not optimizer.use_distributed_optimizer:
        setting = "state_dtype" if optimizer.state_dtype != "fp32" else "cpu_offload"
        yield (
            f"{key}.{setting}: needs the distributed optimizer; set "
            f"{key}.use_distributed_optimizer=true (on one rank, too)"
        )
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(optimizer, name)
        if optimizer.state_dtype == "bf16" and beta > MOST_BF16_BETA:
            yield (
                f"{key}.{name}: {beta} with {key}.state_dtype=bf16, which rounds away a decay of "
                "less than 1/256 a step, and distorts one a little above; lower it to "
                f"{MOST_BF16_BETA}, or set {key}.state_dtype=fp32"
            )


def _model_problems(resolution: Resolution, role: str) -> Iterator[str]:
    """Problems of a role's model; roles with one model repeat its lines."""
    try:
        model = resolution.model(role)
    except ValueError as error:
        yield str(error)
        return
    yield from _length_problems(model.spec, resolution.config.data.max_length, model.key)


def _lora_problems(resolution: Resolution) -> Iterator[str]:
    """Adapters of roles that are not trained, and targets that there are not."""
    config = resolution.config
    for role in ROLES:
        section: RoleConfig = getattr(config, role)
        lora, key = section.lora, f"{role}.lora"
        if lora is None:
            continue
        if role not in resolution.trained and lora.path is None:
            given = f"give {key}.path, or " if role in resolution.roles else ""
            yield f"{key}: stage {config.stage} does not train the {role}; {given}leave it out"
        named = lora.target_modules
        named = [named] if isinstance(named, str) else named
        known = named == ["all-linear"] or (named and {*named} <= {*LORA_TARGETS})
        if not known:
            yield (
                f"{key}.target_modules: {shown(named)}; give all-linear, or some of "
                f"{', '.join(LORA_TARGETS)}"
            )
        if lora.init_lora_weights is False:
            yield f"{key}.init_lora_weights: false would change the model; give true or gaussian"
    for role in resolution.trained:
        model = resolution.models.get(role)
        if model is None or model.spec.lora is None:
            continue
        if role == "actor" and config.generation.overlap_switch:
            yield (
                "generation.overlap_switch: true, but a step moves the actor's adapters alone, and "
                "sending these takes no time; set it to false"
            )
        if role == "actor" and config.reference_loss and config.reference_loss.sync_ref_model:
            yield (
                f"{config.stage}.sync_ref_model: true, but the reference has the base of the "
                "actor's adapters, which nothing trains; set it to false"
            )
        if any(rule.file_tensor for rule in FAMILIES[model.spec.model_type].layer_rules):
            yield (
                f"{role}.lora: {model.spec.model_type} stores several of its layers as one, and "
                "adapters would not be those of other libraries; leave it out"
            )


def _base_problems(resolution: Resolution) -> Iterator[str]:
    """Roles that are to have the actor's base, where there is no such thing."""
    for role in resolution.roles:
        section: RoleConfig = getattr(resolution.config, role)
        key = f"{role}.base"
        if section.base is None:
            continue
        if role == "actor":
            yield f"{key}: actor, which is the role itself; leave it out"
            continue
        if section.model.path is not None or section.model.config is not None:
            yield f"{role}.model: given, and {key}=actor says that it is the actor's; leave one out"
        for trained in resolution.trained:
            model = resolution.models.get(trained)
            if trained in ("actor", role) and model is not None and model.spec.lora is None:
                yield (
                    f"{key}: actor, but all weights of the {trained} are trained; set "
                    f"{trained}.lora.r, or leave {key} out"
                )


def _length_problems(spec: ModelSpec, max_length: int, key: str) -> Iterator[str]:
    """Sequences longer than the model supports."""
    limits = (
        ("max_position_embeddings", spec.max_position_embeddings, ""),
        ("sliding_window", spec.sliding_window, ", beyond which attention here would be full"),
    )
    for name, limit, why in limits:
        if limit is not None and max_length > limit:
            yield f"data.max_length: {max_length} is over {name}={limit} of {key}{why}; lower it"
