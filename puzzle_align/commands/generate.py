"""``puzzle-align generate``: responses of a checkpoint, or of a Hugging Face model, to prompts.

Prompts are answered in portions of ``global_batch_size``. A finished portion is written at once,
and no rank holds the responses of more than one.

Invariants (the tests assert them):
- responses are written in the order of the prompts, for every plan and portion size;
- a response's random draws depend only on the seed and its place in that order.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from puzzle_align.commands.summary import check_writable, say
from puzzle_align.config.check import JobProblems, generation_problems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import dump_job, load_job
from puzzle_align.config.model_path import ModelPaths, NamedModel, checkpoint_model, find_saved
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.sections.data import DataConfig, TokenizerConfig
from puzzle_align.config.sections.models import ModelConfig, RoleConfig
from puzzle_align.config.sections.rl import SAMPLING_KEYS, GenerationConfig
from puzzle_align.data.blocks import GivenRecords
from puzzle_align.data.build import Preparation, show_nothing
from puzzle_align.data.errors import DataError, ReadReport
from puzzle_align.data.prompts import PromptDataset, PromptOptions, load_prompts
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.files.messages import writing
from puzzle_align.layout.groups import num_streams
from puzzle_align.layout.hf_config import from_hf_config, read_hf_config
from puzzle_align.layout.job_plan import JobPlan, Phase
from puzzle_align.runtime.context import Context, freeze
from puzzle_align.runtime.generation.engine import generate
from puzzle_align.runtime.generation.sampling import Request, Response, Sampling, check_requests
from puzzle_align.runtime.groups.collectives import (
    from_rank_zero,
    gather_on_rank_zero,
    sum_on_host,
    wait_for_all,
)
from puzzle_align.runtime.groups.limits import check_queues
from puzzle_align.runtime.groups.world import World, init_distributed, shutdown_distributed
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.stages.engine import resolve_engine
from puzzle_align.stages.models import open_context
from puzzle_align.stages.rl.prompts import sampling_of
from puzzle_align.stages.tokenizer import check_tokens, check_vocabulary, open_tokenizer
from puzzle_align.stages.weights import AdaptedWeights, role_weights
from puzzle_align.telemetry.progress import open_progress, show_preparation
from puzzle_align.telemetry.text import duration, quantity

_KEY = "--model"
_CURE = (
    "it ends with the responses to earlier prompts; free space or mend the disk there, and delete"
    " it or name a new file"
)
_LOG_PROB_DECIMALS = 6  # about the precision of fp32

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Work:
    """Objects with which this rank answers prompts."""

    job: JobConfig
    context: Context
    world: World
    prompts: PromptDataset
    tokenizer: Tokenizer
    sampling: Sampling


def generate_responses(
    model: Path,
    prompts: str | Sequence[str],
    output: Path | None,
    overrides: Sequence[str],
    *,
    role: str | None = None,
) -> None:
    """Generate on the ranks that torchrun started.

    Args:
        model: a Hugging Face directory, a ``step_*`` directory, or a folder of those.
        role: a model of the checkpoint; None: the one that its stage trains.
        prompts: a file (any source of prompts that training reads), or texts.
        output: a new file of JSON lines; None: stdout.
        overrides: ``key=value`` for the sections that generation reads.

    Raises:
        ValueError: for any wrong argument, before the model is built.
    """
    named = open_model(model, role)
    job, paths = job_of(named, overrides), ModelPaths(named)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if problems := generation_problems(Resolution(job, world_size, paths=paths), _KEY):
        raise JobProblems(problems)
    engine = resolve_engine(job.engine)
    resolution = Resolution(job, world_size, engine, paths=paths)
    context = replace(resolution.context("actor"), workload="generate")
    weights = role_weights(resolution.model("actor"), job)
    weights.check()
    tokenizer = open_tokenizer(resolution.tokenizer())
    models = {_KEY: context.model}
    warnings = check_vocabulary(tokenizer, models)
    sampling = sampling_of(job, tokenizer, context.model)
    check_requests(context.model, [], sampling)
    if output is not None:
        _check_output(output)
    world = init_distributed(engine.device, job.engine.distributed_timeout)
    if engine.device == "cuda":
        phase = Phase(name="generate", order="sequential", contexts=(context,))
        plan = JobPlan(stage="generate", world_size=world_size, phases=(phase,))
        check_queues(num_streams(plan))

    def read() -> PromptDataset:
        if isinstance(weights, AdaptedWeights):
            weights.fingerprint()  # refuses another base
        dataset, report = read_prompts(job, prompts, tokenizer)
        check_tokens([dataset], tokenizer, models)
        _logger.info("data: %s", report.summary())
        for line in warnings:
            _logger.warning("%s", line)
        return dataset

    dataset = from_rank_zero(read)
    built = open_context(weights, context, world)
    wait_for_all(world.device)  # ranks read different amounts
    freeze(built)
    _answer_all(_Work(job, built, world, dataset, tokenizer, sampling), output)
    shutdown_distributed()


def open_model(path: Path, role: str | None = None) -> NamedModel:
    """Describe the language model in ``path`` without reading its weights.

    Raises:
        ValueError: there is none, or it has no next-token logits.
    """
    saved = find_saved(path, _KEY)
    if saved is not None:
        role = role or saved.main_role
        model = checkpoint_model(saved, role)
    elif role is not None:
        raise ValueError(f"--role names a checkpoint's model: leave it out with {path}")
    else:
        model = NamedModel(path, from_hf_config(read_hf_config(path), f"{path}/config.json"))
    if model.spec.head != "lm":
        what = "a sequence classifier" if saved is None else f"its {role}"
        raise ValueError(f"{_KEY} {path}: {what} gives no next-token logits; give a language model")
    return model


def job_of(named: NamedModel, overrides: Sequence[str]) -> JobConfig:
    """Make a job that only generates; ValueError for a wrong override.

    For a checkpoint, tokenizer, sampling keys (except ``num_generations``) and
    ``data.apply_chat_template`` are those of the job that saved it. A prompt may be as long as the
    model's positions allow.
    """
    tokenizer, generation, is_chat = {}, {}, False
    if named.saved is not None:
        tokenizer, config = named.saved.tokenizer, named.saved.job["config"]
        names = {*SAMPLING_KEYS} - {"num_generations"}
        saved = config.get("generation", {}).items()
        generation = {name: value for name, value in saved if name in names}
        is_chat = config.get("data", {}).get("apply_chat_template") is True
    spec = named.spec
    longest = min(spec.max_position_embeddings, spec.sliding_window or spec.max_position_embeddings)
    job = JobConfig(
        actor=RoleConfig(model=ModelConfig(path=str(named.path))),
        tokenizer=TokenizerConfig(**tokenizer),
        generation=GenerationConfig(**generation),
        data=DataConfig(max_length=longest, apply_chat_template=is_chat),
    )
    return load_job(dump_job(job), overrides, source=str(named.path))


def read_prompts(
    job: JobConfig, prompts: str | Sequence[str], tokenizer: Tokenizer
) -> tuple[PromptDataset, ReadReport]:
    """Tokenize the prompts of a file, or of a list of texts; ValueError for bad data."""
    data = job.data
    options = PromptOptions(
        max_length=data.longest_prompt(job.generation.max_new_tokens),
        truncation_mode=data.truncation_mode,
        skip_errors=data.on_error == "skip",
        columns=data.columns or {} if isinstance(prompts, str) else {},
        apply_chat_template=data.apply_chat_template,
    )
    try:
        display = show_preparation if job.telemetry.progress else show_nothing
        how = Preparation(num_workers=data.num_proc, display=display)
        if isinstance(prompts, str):
            return load_prompts(prompts, tokenizer, options, how)
        records = [(f"--prompt {n}", {"prompt": text}) for n, text in enumerate(prompts, 1)]
        return load_prompts(GivenRecords("--prompt", iter(records)), tokenizer, options, how)
    except DataError as error:
        if isinstance(prompts, str):
            raise ValueError(f"--prompts: {error}") from error
        raise


def _answer_all(work: _Work, output: Path | None) -> None:
    """Answer every prompt, a portion at a time, and write the responses. Collective."""
    size, num_prompts = work.job.global_batch_size, len(work.prompts)
    portions = [
        range(first, min(first + size, num_prompts)) for first in range(0, num_prompts, size)
    ]
    started = time.monotonic()
    num_responses = num_tokens = 0
    # On stdout a progress bar would mix with the responses.
    wants_bar = work.job.telemetry.progress and output is not None
    progress = open_progress(work.world.rank, wants_bar, len(portions), first_step=0)
    for number, portion in enumerate(portions, 1):
        begun = time.monotonic()
        with activity(f"generation for prompts {portion[0] + 1} to {portion[-1] + 1}"):
            lines, tokens = _answer(work, portion)
        _write(output, lines)
        responses = len(portion) * work.job.generation.num_generations
        metrics = _metrics(responses, tokens, time.monotonic() - begun)
        progress.step(number, metrics, logged=True)
        num_responses, num_tokens = num_responses + responses, num_tokens + tokens
    progress.close()
    if work.world.rank == 0:
        seconds = time.monotonic() - started
        _logger.info(
            "%d responses of %s tokens in %s: %s tok/s",
            num_responses,
            quantity(num_tokens),
            duration(seconds),
            quantity(num_tokens / seconds),
        )


def _answer(work: _Work, portion: range) -> tuple[list[str], int]:
    """Answer a portion of the prompts. Collective.

    Returns the lines to write, on rank 0, and the number of tokens.
    """
    generation, context = work.job.generation, work.context
    k = generation.num_generations
    indices = [index for index in portion if index % context.plan.data == context.data_rank]
    requests = [
        Request(id=index * k + number, prompt=work.prompts.prompt(index))
        for index in indices
        for number in range(k)
    ]
    responses = generate(
        context,
        requests,
        work.sampling,
        prefill_tokens=generation.prefill_tokens,
        decode_batch_size=generation.decode_batch_size,
        num_scheduler_steps=generation.num_scheduler_steps,
        enforce_eager=generation.enforce_eager,
    )
    reported = responses if context.is_output_rank else []
    # Replicas finish at different times: this sum waits for them longer than the gather would.
    total = sum_on_host(torch.tensor(sum(len(response.tokens) for response in reported)))
    everyone = gather_on_rank_zero(reported)
    gathered = {response.id: response for of_rank in everyone or () for response in of_rank}
    return [_line(work, gathered[number]) for number in sorted(gathered)], int(total)


def _line(work: _Work, response: Response) -> str:
    """Format a response and its prompt's columns as JSON; its text is without the stop token."""
    tokens = response.tokens.tolist()
    index = response.id // work.job.generation.num_generations
    line = {
        **{name: values[0] for name, values in work.prompts.columns([index]).items()},
        "prompt": work.prompts.as_given(index),
        "response": work.tokenizer.decode(tokens[:-1] if response.stopped else tokens),
        "tokens": tokens,
        "log_probs": [round(value, _LOG_PROB_DECIMALS) for value in response.log_probs.tolist()],
        "stopped": response.stopped,
    }
    text = json.dumps(line, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()  # half of a pair stays an escape


def _metrics(num_responses: int, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        "completions/mean_length": num_tokens / num_responses,
        "responses_per_second": num_responses / seconds,
        "tokens_per_second": num_tokens / seconds,
    }


def _check_output(output: Path) -> None:
    """Raise a one-line ValueError if the file exists, or cannot be written."""
    if os.path.isfile(output) or os.path.isdir(output):  # Path's raise in a closed folder
        raise ValueError(f"--output {output}: it exists already; name a new file, or delete it")
    check_writable("--output", output)


def _write(output: Path | None, lines: Sequence[str]) -> None:
    """Append ``lines`` to the output; None is stdout."""
    if output is None:
        say(*lines)
    elif lines:
        with writing(output, cure=_CURE):
            _append(output, lines)


def _append(output: Path, lines: Sequence[str]) -> None:
    """Append all of the lines, or after an OSError none."""
    length = output.stat().st_size if output.exists() else 0
    try:
        with output.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)
    except OSError:
        if output.is_file():  # not a pipe
            os.truncate(output, length)
        raise
