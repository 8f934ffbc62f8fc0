"""Lines that describe a job to people: its models and memory, a run's opening and its end."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from puzzle_align.config.resolve import Job
from puzzle_align.config.saved import checkpoint_paths
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Settings
from puzzle_align.layout.weights import num_parameters, num_trainable_parameters
from puzzle_align.planning.memory.job import MemoryInputs, estimate_memory
from puzzle_align.stages.inputs import checkpoint_folder
from puzzle_align.stages.outlook import Preview, open_outlook
from puzzle_align.telemetry.text import num_bytes, quantity, ranks_text, table

if TYPE_CHECKING:
    from puzzle_align.stages.trainer import Trainer  # imports Megatron

_WORK = {"generate": "samples", "infer": "scores", "train": "trains"}


def model_lines(job: Job) -> Iterator[str]:
    """A line for each role's model, plan, ranks and weights, and for each further placement."""
    plan = job.plan
    for role, context in plan.models.items():
        model = job.models[role]
        weights = "random weights"
        if model.files is not None:
            weights = f"random weights, for {model.files}" if model.random_weights else model.files
        lender = plan.lender(context)
        if lender is not None:
            weights = f"in the {lender.role}'s memory, but for adapters and heads"
        elif other := _first_with_base(plan, context):
            weights = f"{weights}, in memory apart from the {other.role}'s"
        parameters = f"{quantity(num_parameters(context.model))} parameters"
        if context.model.lora is not None:
            number = num_trainable_parameters(context.model)
            parameters += f" and {quantity(number)} of adapters (num_trainable_parameters {number})"
        yield (
            f"{role}: {context.model.model_type}, {parameters}, {context.plan}, "
            f"{ranks_text(context.ranks)}, {weights}"
        )
    for context in plan.contexts:
        kept = plan.models[context.role]
        if context.placed != kept.placed:
            where = f"{context.plan}, {ranks_text(context.ranks)}"
            yield f"{context.role}, while it {_WORK[context.workload]}: {where}"
        eager = context.workload == "generate" and job.config.generation.enforce_eager
        if eager and job.engine.device == "cuda":
            yield (
                "decoding: kernel by kernel, not as CUDA graphs, so slower: "
                "generation.enforce_eager is true"
            )


def _first_with_base(plan: JobPlan, context: ContextPlan) -> ContextPlan | None:
    """The first model that has the base of another one; None: there is none before it."""
    first = next(model for model in plan.models.values() if model.base == context.base)
    return None if context.base is None or first is context else first


def job_memory(job: Job, preview: Preview) -> dict[str, dict[str, int]]:
    """Estimate a job's memory in bytes, by ranks and part."""
    cuda = job.engine.device == "cuda"
    return estimate_memory(job.plan, memory_inputs(job.settings, preview, cuda=cuda))


def memory_inputs(settings: Settings, preview: Preview, *, cuda: bool) -> MemoryInputs:
    """Inputs of a job's memory estimate beside its plan."""
    runs = {run.phase.name: run for run in preview.runs}
    return MemoryInputs(settings=settings, runs=runs, generation=preview.generation, cuda=cuda)


def work_lines(trainer: "Trainer", resumed: int) -> Iterator[str]:
    """Lines on a run's steps, rows and memory, and on the step that it resumes from."""
    job = trainer.job
    preview = open_outlook(job.config).work(job.plan, trainer.data, [])
    yield from preview.lines
    most = max(parts["total"] for parts in job_memory(job, preview).values())
    yield f"memory, predicted: at most {num_bytes(most)} on a rank"
    if resumed:
        yield f"resumed from step {resumed} of {trainer.num_steps}"
        return
    metrics = Path(job.config.output_dir) / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        folder = checkpoint_folder(job.config)
        yield f"starts anew: no step to go on from in {folder}; {metrics} is written over"


def output_lines(job: Job, num_skipped: int) -> Iterator[tuple[str, str]]:
    """Rows for a run's summary: its last checkpoint, its folder, and what comes next."""
    config, folder = job.config, checkpoint_folder(job.config)
    yield "skipped steps", f"{num_skipped}"
    paths = checkpoint_paths(folder)  # none if a checkpoint of another folder was finished
    for path in paths[-1:]:
        yield "checkpoint", str(path)
    yield "output", config.output_dir
    if not paths:
        return
    source = shlex.quote(str(folder if config.checkpoint.dir else config.output_dir))
    target = shlex.quote(str(Path(config.output_dir) / "hf"))
    yield "next", f"puzzle-align convert {source} {target}"
    if "actor" in job.plan.trained:
        yield "", f"puzzle-align generate --model {source} --prompt TEXT"


def finished_lines(trainer: "Trainer") -> Iterator[str]:
    """Lines for a job that is started again after its last step."""
    number, config = trainer.num_steps, trainer.job.config
    more = "max_steps" if config.max_steps > 0 else "num_train_epochs"
    where, anew = "is saved", "choose another output_dir"
    if config.checkpoint.names_path and not checkpoint_paths(checkpoint_folder(config)):
        where, anew = f"is in {config.checkpoint.resume}", "leave out checkpoint.resume"
    yield f"finished already: step {number} of {number} {where}; nothing is left to train"
    yield f"to train on, raise {more}; to train anew, {anew}"
    yield table(output_lines(trainer.job, trainer.num_skipped), "output")
