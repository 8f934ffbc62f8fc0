"""``--validate``: describe a job and list all its problems, without training.

Runs in one process, without a process group: the job may be for other or larger machines.
"""

from functools import partial

import torch

from puzzle_align.commands.summary import ranks_text, say
from puzzle_align.config.check import JobProblems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Engine, Job, Resolved, try_to_resolve
from puzzle_align.config.schema import data_sections, is_among
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.groups import num_communicators
from puzzle_align.layout.job_plan import Settings
from puzzle_align.layout.model import num_parameters
from puzzle_align.layout.rank_order import torn_groups
from puzzle_align.planning.memory.job import MemoryInputs, estimate_memory, with_cuda
from puzzle_align.planning.memory.model import columns_table
from puzzle_align.planning.plan_file import GivenPlan
from puzzle_align.runtime.generation.step_graphs import why_eager
from puzzle_align.stages.engine import resolve_engine
from puzzle_align.stages.inputs import attempt, check_folders, check_weights, to_resume
from puzzle_align.stages.outlook import Preview, open_outlook
from puzzle_align.stages.tokenizer import (
    check_tokens,
    check_vocabulary,
    foreign_tokenizers,
    open_tokenizer,
    vocabularies,
)
from puzzle_align.telemetry.text import quantity

_WORK = {"generate": "samples", "infer": "scores", "train": "trains"}


def validate_job(config: JobConfig, world_size: int, plan_file: GivenPlan | None = None) -> None:
    """Check the job for ``world_size`` ranks; print models, data, steps and memory.

    Args:
        plan_file: the job's plan file, if any; its predictions are printed, too.

    Raises:
        JobProblems: with one line for each problem.
    """
    unresumable: list[str] = []
    saved = attempt(unresumable, lambda: to_resume(config))
    engine = resolve_engine(config.engine, elsewhere=True)
    resolved = try_to_resolve(config, engine, world_size, plan_file, saved)
    config, job, lines = resolved.config, resolved.job, [*resolved.problems]
    sections = data_sections(JobConfig)
    data_keys_are_right = not any(is_among(line.partition(":")[0], sections) for line in lines)
    for line in resolved.kept:
        say(line)
    if job is not None:
        _show_models(job)
        torn = torn_groups(job.plan, engine.ranks_per_node)
        for line in (*foreign_tokenizers(job.tokenizer.path, job.models.values()), *torn):
            say(f"warning: {line}")
    others = *check_weights(resolved.models.values(), config), *check_folders(config), *unresumable
    lines += [line for line in others if line not in lines]
    tokenizer = _tokenizer(resolved, lines) if data_keys_are_right else None
    plan = None if job is None else job.plan
    preview = open_outlook(config).preview(plan, tokenizer, lines)
    if tokenizer is not None and resolved.models:
        models = vocabularies(resolved.models.values())
        attempt(lines, lambda: check_tokens(preview.datasets, tokenizer, models))
    for line in preview.lines:
        say(line)
    if job is not None:
        _compare(engine, _show_memory(job, preview))
        if plan_file is not None:
            say(_predicted(plan_file))
    if lines:
        raise JobProblems(lines)
    say(f"valid: {config.stage} on {world_size} ranks; nothing was trained")


def _predicted(plan_file: GivenPlan) -> str:
    predicted = plan_file.predicted
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in predicted.phases.items())
    return f"{plan_file.source} predicts {predicted.iteration:.3g} s an iteration: {phases}"


def _show_models(job: Job) -> None:
    plan = job.plan
    for role, context in plan.models.items():
        model = job.models[role]
        weights = "random weights"
        if model.files is not None:
            weights = f"random weights, for {model.files}" if model.random_weights else model.files
        parameters = quantity(num_parameters(context.model))
        say(
            f"{role}: {context.model.model_type}, {parameters} parameters, {context.plan}, "
            f"{ranks_text(context.ranks)}, {weights}"
        )
    for context in plan.contexts:
        kept = plan.models[context.role]
        if context.placed != kept.placed:
            where = f"{context.plan}, {ranks_text(context.ranks)}"
            say(f"{context.role}, while it {_WORK[context.workload]}: {where}")
        if context.workload == "generate" and job.engine.device == "cuda":
            eager = job.config.generation.enforce_eager
            reason = why_eager("cuda", context.plan.tensor, enforce_eager=eager)
            if reason is not None:
                say(f"decoding: kernel by kernel, not as CUDA graphs, so slower: {reason}")


def _tokenizer(resolved: Resolved, problem_lines: list[str]) -> Tokenizer | None:
    """Open the job's tokenizer and check it against every model; None if it cannot be opened."""
    config = resolved.tokenizer
    if config is None:
        return None
    tokenizer = attempt(problem_lines, lambda: open_tokenizer(config))
    if tokenizer is None:
        return None
    for key, spec in vocabularies(resolved.models.values()).items():
        lines = attempt(problem_lines, partial(check_vocabulary, tokenizer, {key: spec})) or ()
        for line in lines:
            say(f"warning: {line}")
    return tokenizer


def _show_memory(job: Job, preview: Preview) -> int:
    """Print the memory estimate; return the bytes of the rank with the most."""
    plan = job.plan
    columns = estimate_memory(plan, memory_inputs(job.settings, preview))
    most = max(sum(number) for number in num_communicators(plan))
    if job.engine.device == "cuda":
        columns = with_cuda(plan, columns)
    say(f"communicators: {most} on a rank at most")
    say("memory, estimated (of models: all the time; of phases: one after the other):")
    for line in columns_table(columns).splitlines():
        say(f"  {line}")
    return max(parts["total"] for parts in columns.values())


def memory_inputs(settings: Settings, preview: Preview) -> MemoryInputs:
    """Inputs of a job's memory estimate beside its plan."""
    runs = {run.phase.name: run for run in preview.runs}
    return MemoryInputs(settings=settings, runs=runs, generation=preview.generation)


def _compare(engine: Engine, needed: int) -> None:
    """Print whether the estimate fits this machine's GPU, if it has one."""
    if engine.device == "cuda" and torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
        enough = "enough" if needed < has else "NOT enough"
        say(f"  the device here has {has / 2**30:.2f} GiB: {enough}")
