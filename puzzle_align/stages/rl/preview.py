"""What stage ppo tells before anything runs: prompts, iterations, rows, reward functions."""

from collections.abc import Sequence
from functools import partial

from puzzle_align.config.check_ppo import fewest_together, longest_prompt, longest_segment
from puzzle_align.config.job import JobConfig
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.planning.job_memory import GenerationSizes
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.stages.costs import job_costs
from puzzle_align.stages.inputs import attempt
from puzzle_align.stages.ppo import num_iterations, sampling_of
from puzzle_align.stages.prediction import predicted_run, same_in_every_pass
from puzzle_align.stages.preview import Preview, check_multiple, phase_line, proven_rows
from puzzle_align.stages.rewards.functions import Signature
from puzzle_align.stages.rewards.worker import RewardWorker
from puzzle_align.stages.rl.prompts import job_prompts
from puzzle_align.stages.tokenizer import check_tokens, job_vocabularies
from puzzle_align.telemetry.text import length_lines


def preview(
    config: JobConfig, plan: JobPlan | None, tokenizer: Tokenizer | None, found: list[str]
) -> Preview:
    """Tell of prompts and iterations.

    Args:
        plan: of a job without problems; else None.
        tokenizer: None: not to be had, or the data's keys are wrong.
        found: the job's problems; what is wrong with data and reward functions is added.
    """
    lines: list[str] = []
    functions = _functions(config, found)
    if tokenizer is not None:
        attempt(found, lambda: sampling_of(config, tokenizer))
        lines += _prompt_lines(config, tokenizer, functions, found)
    if plan is None:
        return Preview(lines)
    lines.append(
        f"microbatches below (learn: of a mini-batch): as many as there may be, with "
        f"{longest_lengths(config)}"
    )
    lines += split_lines(config)
    most = most_rows(config)
    for run in _runs(config, plan, most):
        counts = {role: count(0) for role, count in run.num_microbatches.items()}
        lines.append(phase_line(run.phase, counts))
    learning = [context.plan for context in plan.phase("learn").contexts]
    runs = _runs(config, plan, int(min(most, max(map(proven_rows, learning)))))
    return Preview(lines, runs, _generation(config, plan))


def drawn_runs(
    config: JobConfig, plan: JobPlan, *, num_steps: int, num_microbatches: int | None
) -> list[PredictedRun]:
    """A pass of the score phase, and a mini-batch of the learn phase; ``num_steps`` is not read.

    Args:
        num_microbatches: of the actor in a mini-batch; None: as many as there may be.

    Raises:
        ValueError: one line, for a number that no mini-batch can have.
    """
    if num_microbatches is None:
        return _runs(config, plan, most_rows(config))
    actor = plan.context("actor", "train")
    score, learn = _runs(config, plan, num_microbatches * actor.plan.data)
    check_multiple(num_microbatches, learn)
    return [score, learn]


def drawn_lines(config: JobConfig, num_microbatches: int | None) -> list[str]:
    """What is taken for granted in ``drawn_runs``."""
    if num_microbatches is not None:
        return []
    return [f"microbatches: as many as there may be: {longest_lengths(config)}"]


def longest_lengths(config: JobConfig) -> str:
    """What ``most_rows`` takes for granted of prompts and responses, for people."""
    generation = config.generation
    responses = f"{generation.num_generations} response{'s' * (generation.num_generations > 1)}"
    return f"prompts of {longest_prompt(config)} tokens, {responses} of {generation.max_new_tokens}"


def most_rows(config: JobConfig) -> int:
    """Rows of a mini-batch if all prompts and responses are as long as they may be."""
    together = fewest_together(config)
    per_row = config.packing.row_tokens // longest_segment(config, together=together)
    prompts = config.global_batch_size // config.ppo.num_mini_batches
    return -(-prompts * (config.generation.num_generations // together) // per_row)


def split_lines(config: JobConfig) -> list[str]:
    """What it costs that rows do not hold a prompt with all of its responses, if they may not."""
    k, together = config.generation.num_generations, fewest_together(config)
    if together == k or config.packing.row_layout != "shared":
        return []
    whole, part = longest_segment(config, together=k), longest_segment(config, together=together)
    times = k // together
    return [
        f"packing.row_tokens={config.packing.row_tokens} holds {together} of {k} responses with "
        f"their prompt, where all are as long as they may be: prompts are repeated {times} times, "
        f"which is {100 * (times * part / whole - 1):.1f}% more tokens; {whole} would hold them all"
    ]


def _runs(config: JobConfig, plan: JobPlan, num_rows: int) -> list[PredictedRun]:
    """The score phase, and a mini-batch of ``num_rows`` rows of the learn phase."""
    made, costs = [], job_costs(config)
    for name, parts in (("score", config.ppo.num_mini_batches), ("learn", 1)):
        phase = plan.phase(name)
        made.append(predicted_run(costs, phase, same_in_every_pass(phase, num_rows * parts)))
    return made


def _generation(config: JobConfig, plan: JobPlan) -> GenerationSizes:
    generation = config.generation
    responses = config.global_batch_size * generation.num_generations
    return GenerationSizes(
        prefill_tokens=generation.prefill_tokens,
        decode_batch_size=generation.decode_batch_size,
        num_sequences=-(-responses // plan.context("actor", "generate").plan.data),
        prompt_tokens=longest_prompt(config),
        response_tokens=generation.max_new_tokens,
    )


def _functions(config: JobConfig, found: list[str]) -> list[Signature]:
    """The reward functions, if all can be called; else what is wrong is added to ``found``."""
    reward = config.reward
    if not reward.functions:
        return []
    worker = attempt(found, lambda: RewardWorker(reward.functions, reward.timeout))
    if worker is None:
        return []
    worker.close()
    return worker.signatures


def _prompt_lines(
    config: JobConfig, tokenizer: Tokenizer, functions: Sequence[Signature], found: list[str]
) -> list[str]:
    progress = config.telemetry.progress
    prompts = attempt(found, lambda: job_prompts(config, tokenizer, progress=progress))
    if prompts is None:
        return []
    names, number = prompts.train.column_names, config.global_batch_size
    for function in functions:
        attempt(found, partial(function.check_columns, names))
    attempt(found, lambda: check_tokens([prompts.train], tokenizer, job_vocabularies(config)))
    return [
        prompts.summary,
        *length_lines({"prompt": prompts.train.prompt_lengths}),
        f"iterations: {num_iterations(config, len(prompts.train))}, each of {number} prompts and "
        f"{number * config.generation.num_generations} responses",
    ]
