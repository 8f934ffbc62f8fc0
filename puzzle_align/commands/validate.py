"""``--validate``: describe a job and list everything that is wrong with it; trains nothing.

Runs in one process, without a process group: the job may be for other or larger machines.
"""

from functools import partial

import torch

from puzzle_align.commands.summary import ranks_text, say
from puzzle_align.config.check import JobProblems, problems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import named_model
from puzzle_align.config.pinned import keep_models
from puzzle_align.config.resolve import Engine, job_settings, resolve, resolve_model
from puzzle_align.config.roles import resolve_role_spec, role_model, role_names, tokenizer_config
from puzzle_align.config.saved import Saved
from puzzle_align.config.schema import data_sections, is_among
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.groups import num_communicators
from puzzle_align.layout.job_plan import JobPlan, sets_of_ranks
from puzzle_align.layout.model import ModelSpec, num_parameters
from puzzle_align.planning.given_plan import GivenPlan
from puzzle_align.planning.memory.job import MemoryInputs, estimate_memory, with_communicators
from puzzle_align.planning.memory.model import columns_table
from puzzle_align.stages.inputs import attempt, check_folders, check_weights, to_resume
from puzzle_align.stages.outlook import Preview, open_outlook
from puzzle_align.stages.setup import resolve_engine
from puzzle_align.stages.tokenizer import check_vocabulary, foreign_tokenizers, open_tokenizer
from puzzle_align.telemetry.text import quantity

_WORK = {"generate": "samples", "infer": "scores", "train": "trains"}


def validate_job(config: JobConfig, world_size: int, given: GivenPlan | None = None) -> None:
    """Check the job for ``world_size`` ranks; print models, data, steps and memory.

    Args:
        given: a plan file that the job is to run by; its predictions are printed too.

    Raises:
        JobProblems: with one line for each problem.
    """
    unresumable: list[str] = []
    saved = attempt(unresumable, lambda: to_resume(config))
    if saved is not None:
        config = attempt(unresumable, partial(_with_saved_models, config, saved)) or config
    lines = problems(config, world_size)
    sections = data_sections(JobConfig)
    data_keys_are_right = not any(is_among(line.partition(":")[0], sections) for line in lines)
    engine = resolve_engine(config.engine, elsewhere=True)
    plan = None
    if not lines:
        job = attempt(lines, lambda: resolve(config, engine, world_size))
        plan = None if job is None else job.plan
        if job is not None and given is not None:
            attempt(lines, lambda: given.check_job_plan(config, job.plan))
    models = [attempt(lines, partial(resolve_model, config, role)) for role in role_names(config)]
    if plan is not None:
        _show_models(config, plan)
        path = tokenizer_config(config).path
        for line in foreign_tokenizers(path, [model for model in models if model is not None]):
            say(f"warning: {line}")
    weights = check_weights([model for model in models if model is not None], config)
    lines += [
        line for line in (*weights, *check_folders(config), *unresumable) if line not in lines
    ]
    tokenizer = _tokenizer(config, lines) if data_keys_are_right else None
    preview = open_outlook(config).preview(plan, tokenizer, lines)
    for line in preview.lines:
        say(line)
    if plan is not None:
        _compare(engine, _show_memory(config, plan, preview, engine.device))
        if given is not None:
            say(_predicted(given))
    if lines:
        raise JobProblems(lines)
    say(f"valid: {config.stage} on {world_size} ranks; nothing was trained")


def _predicted(given: GivenPlan) -> str:
    predicted = given.file.predicted
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in predicted.phases.items())
    return f"{given.path} predicts {predicted.iteration:.3g} s an iteration: {phases}"


def _with_saved_models(config: JobConfig, saved: Saved) -> JobConfig:
    """Config of the job resumed from ``saved``, with the models that the checkpoint pins."""
    config, kept = keep_models(config, saved)
    for line in kept:
        say(line)
    return config


def _show_models(config: JobConfig, plan: JobPlan) -> None:
    for role, context in plan.models.items():
        model, key = role_model(config, role)
        weights = "random weights"
        if model.path is not None:
            named = str(named_model(model.path, key))
            weights = f"random weights, for {named}" if model.random_weights else named
        parameters = quantity(num_parameters(context.model))
        say(
            f"{role}: {context.model.model_type}, {parameters} parameters, {context.plan}, "
            f"{ranks_text(context.ranks)}, {weights}"
        )
    for context in plan.contexts:
        kept = plan.models[context.role]
        if (context.plan, context.ranks) != (kept.plan, kept.ranks):
            where = f"{context.plan}, {ranks_text(context.ranks)}"
            say(f"{context.role}, while it {_WORK[context.workload]}: {where}")


def _tokenizer(config: JobConfig, problem_lines: list[str]) -> Tokenizer | None:
    """Open the job's tokenizer and check it against every model; None if it cannot be opened."""
    tokenizer = attempt(problem_lines, lambda: open_tokenizer(tokenizer_config(config)))
    if tokenizer is None:
        return None
    models: dict[str, ModelSpec] = {}
    for role in role_names(config):
        spec = attempt(problem_lines, partial(resolve_role_spec, config, role))
        if spec is not None:
            models[role_model(config, role)[1]] = spec
    for key, spec in models.items():
        lines = attempt(problem_lines, partial(check_vocabulary, tokenizer, {key: spec})) or ()
        for line in lines:
            say(f"warning: {line}")
    return tokenizer


def _show_memory(config: JobConfig, plan: JobPlan, preview: Preview, device: str) -> int:
    """Print the estimate; return the largest number of bytes on a rank."""
    columns = estimate_memory(plan, memory_inputs(config, plan, preview))
    firsts = [ranks[0] for ranks in sets_of_ranks(plan.contexts)]
    most = max(sum(num_communicators(plan, rank)) for rank in firsts)
    if device == "cuda":
        columns = with_communicators(plan, columns)
    say(f"communicators: {most} on a rank at most")
    say("memory, estimated (of models: all the time; of phases: one after the other):")
    for line in columns_table(columns).splitlines():
        say(f"  {line}")
    return max(parts["total"] for parts in columns.values())


def memory_inputs(config: JobConfig, plan: JobPlan, preview: Preview) -> MemoryInputs:
    """Inputs of a job's memory estimate beside its plan."""
    settings = job_settings(config, resolve_engine(config.engine, elsewhere=True).device)
    return MemoryInputs(
        row_tokens=settings.row_tokens,
        runs={run.phase.name: run for run in preview.runs},
        optimizers=settings.optimizers,
        generation=preview.generation,
        set_aside=settings.set_aside,
        overlap_switch=settings.overlap_switch,
    )


def _compare(engine: Engine, needed: int) -> None:
    """Print whether the estimate fits this machine's GPU, if it has one."""
    if engine.device == "cuda" and torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
        enough = "enough" if needed < has else "NOT enough"
        say(f"  the device here has {has / 2**30:.2f} GiB: {enough}")
