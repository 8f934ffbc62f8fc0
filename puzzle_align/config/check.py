"""Checks of a job across its keys, a world size and a model's dimensions.

``problems`` lists everything that is wrong, one line each: the dotted key, its value, the cure.
The range of a key stands in its declaration; what keys say together is here.
An empty list promises that the plans cover the world, that the model can be cut as they say, and
that every number is in its range. What only the data can tell (a pair too long for a row) is not
here.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module

from puzzle_align.config.check_engine import (
    engine_problems,
    fp8_row_problems,
    fp8_width_problems,
)
from puzzle_align.config.check_ppo import new_token_problems, ranks_problems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.layers import with_layers
from puzzle_align.config.pinned import names_checkpoints
from puzzle_align.config.placement import one_replica, resolve_plan, role_grid
from puzzle_align.config.roles import (
    ROLES,
    fp8_of,
    resolve_role_spec,
    role_model,
    role_names,
    role_parallel,
    trained_role,
    trained_roles,
)
from puzzle_align.config.schema import key_values
from puzzle_align.config.sections.optimizer import MOST_BF16_BETA, OptimizerConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.files.messages import shown
from puzzle_align.layout.divisibility import cut_problems, plan_problems
from puzzle_align.layout.model import ModelSpec
from puzzle_align.layout.plan import MOST_RANKS, ParallelPlan


class JobProblems(ValueError):
    """Everything that is wrong with a job: ``lines``, each of a problem."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


def check_job(job: JobConfig, world_size: int) -> None:
    """Raise a one-line ValueError with the first of the job's problems, if there are any."""
    raise_first(problems(job, world_size))


def check_before_start(job: JobConfig, world_size: int) -> None:
    """As ``check_job``, but only of what every rank sees alike before the ranks have met.

    A folder of checkpoints may change between their looks: of a job that names one, the keys alone
    are checked, and once the ranks have met the whole job is (``stages.run``).
    """
    raise_first(_key_problems(job) if names_checkpoints(job) else problems(job, world_size))


def raise_first(found: Sequence[str]) -> None:
    """Raise a one-line ValueError with the first of the problems, if there are any."""
    if found:
        more = f" (and {len(found) - 1} more: --validate lists all)" if len(found) > 1 else ""
        raise ValueError(found[0] + more)


def problems(job: JobConfig, world_size: int) -> list[str]:
    """Everything wrong with a job on ``world_size`` ranks, one line each."""
    found = _key_problems(job)
    if any(_number_problems(job)):  # what follows divides by these numbers
        return found
    if world_size > MOST_RANKS:
        return [*found, f"{world_size} ranks: there may be {MOST_RANKS} at most; start fewer"]
    stage = import_module(STAGES[job.stage].checks)
    found += stage.stage_problems(job, world_size)
    for role in role_names(job):
        found += _role_problems(job, role, world_size)
    return list(dict.fromkeys(found))


def generation_problems(job: JobConfig, spec: ModelSpec, world_size: int, model: str) -> list[str]:
    """Everything wrong with generating from one model, ``spec``, under the actor's plan.

    ``model`` is what the lines call it. The job's other sections are not looked at.
    """
    found = [*_range_problems(job)]
    if found:
        return found
    parallel, key = role_parallel(job, "actor")
    plan = one_replica(parallel)
    try:
        resolve_plan(parallel, world_size, key)
    except ValueError as error:
        found.append(str(error))
    found += [*new_token_problems(job), *_run_problems(job), *plan_problems(plan, key)]
    found += cut_problems(spec, with_layers(plan, job, parallel, spec, train=True), key, model)
    found += _length_problems(spec, job.data.max_length, model)
    return found


def _key_problems(job: JobConfig) -> list[str]:
    """What is wrong with a job whatever its models are; of bad numbers, those alone."""
    return [*_number_problems(job)] or [
        *_data_problems(job),
        *_run_problems(job),
        *_unasked_problems(job),
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
            f"'{shown(data.train or data.eval)}' would not be read; set data.format=auto"
        )
    if data.eval is not None and data.eval_fraction > 0:
        yield (
            f"data.eval_fraction: {data.eval_fraction} is not used beside "
            f"data.eval={shown(data.eval)}; keep one of them"
        )
    if data.max_length > row:
        yield (
            f"data.max_length: {data.max_length} does not fit a row; lower it, or raise "
            f"packing.row_tokens (now {row})"
        )
    if job.packing.scope == "dataset" and not job.packing.is_packed:
        why = "layout is padded" if job.packing.layout == "padded" else "enabled is false"
        yield f"packing.scope: dataset means nothing while packing.{why}; set it to batch"
    if data.format == "packed" and job.packing.layout == "padded":
        yield "packing.layout: padded, but packed files hold ready rows; set it to theirs"


def _unasked_problems(job: JobConfig) -> Iterator[str]:
    """Random weights, and bytes for tokens, that nobody asked for, beside what they spoil."""
    models = {key: model for model, key in (role_model(job, role) for role in role_names(job))}
    given = [
        f"{key}.path={shown(model.path)}"
        for key, model in models.items()
        if model.path is not None and not model.random_weights
    ]
    if job.data.format != "synthetic" and job.data.train is not None:
        given.append(f"data.train={shown(job.data.train)}")
    if not given:
        return
    for key, model in models.items():
        if model.path is None and model.config is not None and not model.random_weights:
            yield (
                f"{key}: random weights, beside {given[0]}; set {key}.path, or "
                f"{key}.random_weights=true if they are meant"
            )
    main, key = role_model(job, trained_role(job))
    if job.tokenizer.path is None and main.path is None:
        yield (
            f"tokenizer.path: null, and {key} has no path to take it from: text would become "
            f"bytes, beside {given[0]}; name a tokenizer's directory, or 'byte' if bytes are meant"
        )


def _run_problems(job: JobConfig) -> Iterator[str]:
    for key, own in (("optimizer", job.optimizer), ("critic.optimizer", job.critic.optimizer)):
        if own is not None and own.min_lr > own.lr:
            yield f"{key}.min_lr: {own.min_lr} is above {key}.lr={own.lr}; lower it"
        if own is not None:
            yield from _state_problems(own, key)
    yield from engine_problems(job.engine)
    if job.engine.fp8 is not None:
        yield from _fp8_problems(job)


def _fp8_problems(job: JobConfig) -> Iterator[str]:
    """What FP8 asks of a job's rows, and of the models that it is asked for."""
    if not job.packing.is_packed:
        yield (
            f"engine.fp8: {job.engine.fp8} needs rows of one length, and rows that are not packed "
            "are of many; set packing.enabled=true, or it to null"
        )
    roles = role_names(job)
    some = f"name some of {', '.join(roles)}"
    if job.engine.fp8_roles == []:
        yield f"engine.fp8_roles: [], beside engine.fp8={job.engine.fp8}; {some}"
    for role in ROLES:
        if fp8_of(job, role) is not None and role not in roles:
            yield f"engine.fp8_roles: {role} is no model of stage {job.stage}; {some}"


def _state_problems(own: OptimizerConfig, key: str) -> Iterator[str]:
    """State that is small or on the host: what it needs."""
    if own.in_pieces and not own.use_distributed_optimizer:
        asked = "state_dtype" if own.state_dtype != "fp32" else "cpu_offload"
        yield (
            f"{key}.{asked}: needs the distributed optimizer; set "
            f"{key}.use_distributed_optimizer=true (on one rank, too)"
        )
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(own, name)
        if own.state_dtype == "bf16" and beta > MOST_BF16_BETA:
            yield (
                f"{key}.{name}: {beta} with {key}.state_dtype=bf16, whose moments shrink by no "
                "less than a part in 256, and by little more unevenly; lower it to "
                f"{MOST_BF16_BETA}, or set {key}.state_dtype=fp32"
            )


def _role_problems(job: JobConfig, role: str, world_size: int) -> Iterator[str]:
    """What is wrong with a role's own plan and model; what it takes over is told of the actor."""
    parallel, plan_key = role_parallel(job, role)
    _, key = role_model(job, role)
    own_plan, own_model = plan_key.startswith(role), key.startswith(role)
    own_ranks = getattr(job, role).ranks is not None
    plan = one_replica(parallel)
    if own_plan or own_ranks:
        try:
            role_grid(job, role, world_size)
        except ValueError as error:
            yield str(error)
    if own_plan:
        yield from plan_problems(plan, plan_key)
        yield from _row_problems(plan, job.packing.row_tokens, plan_key)
    if fp8_of(job, role) is not None:
        yield from fp8_row_problems(job.engine, plan, job.packing.row_tokens, plan_key)
    try:
        spec = resolve_role_spec(job, role)
    except ValueError as error:
        if own_model:
            yield str(error)
        return
    if own_plan or own_model or plan_key.partition(".")[0] != key.partition(".")[0]:
        plan = with_layers(plan, job, parallel, spec, train=role in trained_roles(job))
        yield from cut_problems(spec, plan, plan_key, key)
    if fp8_of(job, role) is not None:
        yield from fp8_width_problems(job.engine, spec, plan, key)
    if own_model:
        yield from _length_problems(spec, job.data.max_length, key)


def _row_problems(plan: ParallelPlan, row_tokens: int, key: str) -> Iterator[str]:
    if plan.sequence_parallel and row_tokens % plan.tensor:
        yield (
            f"packing.row_tokens: {row_tokens} does not divide over the {plan.tensor} "
            f"sequence-parallel ranks of {key}; choose a multiple of {plan.tensor}"
        )


def _length_problems(spec: ModelSpec, max_length: int, key: str) -> Iterator[str]:
    """Sequences that the model was not made for."""
    limits = (
        ("max_position_embeddings", spec.max_position_embeddings, ""),
        ("sliding_window", spec.sliding_window, ", beyond which attention here would be full"),
    )
    for name, limit, why in limits:
        if limit is not None and max_length > limit:
            yield f"data.max_length: {max_length} is over {name}={limit} of {key}{why}; lower it"
