"""``--validate``: describe a job and list all its problems, without training.

Runs in one process, without a process group: the job may be for other or larger machines.
"""

from functools import partial
from textwrap import indent

import torch

from puzzle_align.commands.summary import say
from puzzle_align.config.check import JobProblems
from puzzle_align.config.check_resumed import check_same_config, check_same_data
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolve import Engine, Resolved, try_to_resolve
from puzzle_align.config.schema import data_sections, is_among
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.groups import num_communicators
from puzzle_align.layout.rank_order import torn_groups
from puzzle_align.planning.memory.model import columns_table
from puzzle_align.planning.plan_file import GivenPlan
from puzzle_align.stages.banner import job_memory, model_lines
from puzzle_align.stages.engine import resolve_engine
from puzzle_align.stages.inputs import attempt, check_folders, check_weights, to_resume
from puzzle_align.stages.outlook import open_outlook
from puzzle_align.stages.tokenizer import (
    check_tokens,
    check_vocabulary,
    foreign_tokenizers,
    open_tokenizer,
    vocabularies,
)


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
    sections = (*data_sections(JobConfig), "seed")  # which draws what is held out
    data_keys_are_right = not any(is_among(line.partition(":")[0], sections) for line in lines)
    say(*resolved.kept)
    if job is not None:
        say(*model_lines(job))
        torn = torn_groups(job.plan, engine.ranks_per_node)
        warnings = (*foreign_tokenizers(job.tokenizer.path, job.models.values()), *torn)
        say(*(f"warning: {line}" for line in warnings))
    if job is not None and saved is not None and saved.has_optimizers:
        attempt(unresumable, lambda: check_same_config(job.config, saved))
    others = *check_weights(resolved.models.values(), config), *check_folders(config), *unresumable
    lines += [line for line in others if line not in lines]
    tokenizer = _tokenizer(resolved, lines) if data_keys_are_right else None
    plan = None if job is None else job.plan
    preview = open_outlook(config).preview(plan, tokenizer, lines)
    if tokenizer is not None and resolved.models:
        models = vocabularies(resolved.models.values())
        attempt(lines, lambda: check_tokens(preview.datasets, tokenizer, models))
    if saved is not None and saved.has_optimizers and preview.datasets:
        fingerprint = preview.datasets[0].fingerprint
        attempt(lines, lambda: check_same_data(config, saved, fingerprint))
    say(*preview.lines)
    if job is not None:
        columns = job_memory(job, preview)
        most = max(sum(number) for number in num_communicators(job.plan))
        say(f"communicators: {most} on a rank at most")
        say("memory, estimated (of models: all the time; of phases: one after the other):")
        say(indent(columns_table(columns), "  "))
        _compare(engine, max(parts["total"] for parts in columns.values()))
        if plan_file is not None:
            say(_predicted(plan_file))
    if lines:
        raise JobProblems(lines)
    say(f"valid: {config.stage} on {world_size} ranks; nothing was trained")


def _predicted(plan_file: GivenPlan) -> str:
    predicted = plan_file.predicted
    phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in predicted.phases.items())
    return f"{plan_file.source} predicts {predicted.iteration:.3g} s an iteration: {phases}"


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
        say(*(f"warning: {line}" for line in lines))
    return tokenizer


def _compare(engine: Engine, needed: int) -> None:
    """Print whether the estimate fits this machine's GPU, if it has one."""
    if engine.device == "cuda" and torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
        enough = "enough" if needed < has else "NOT enough"
        say(f"  the device here has {has / 2**30:.2f} GiB: {enough}")
