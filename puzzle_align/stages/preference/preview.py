"""What preference training tells before anything runs: data, steps, microbatches."""

from collections.abc import Mapping

import numpy as np

from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import tokenizer_config
from puzzle_align.data.loader import ExampleLoader, plan_view
from puzzle_align.data.packing import example_lengths
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.job_plan import JobPlan, Phase
from puzzle_align.planning.prediction import Count, PredictedRun
from puzzle_align.stages.costs import job_costs
from puzzle_align.stages.inputs import attempt
from puzzle_align.stages.prediction import counted, predicted_run, same_in_every_pass
from puzzle_align.stages.preference.data import (
    PreferenceData,
    job_pairs,
    total_steps,
    train_loader,
)
from puzzle_align.stages.preference.objective import num_responses
from puzzle_align.stages.preview import Preview, check_multiple, phase_line, proven_rows
from puzzle_align.stages.tokenizer import check_tokens, job_vocabularies, open_tokenizer
from puzzle_align.telemetry.text import length_lines

NUM_SAMPLED_STEPS = 32  # of which fill and microbatches are measured


def preview(
    config: JobConfig, plan: JobPlan | None, tokenizer: Tokenizer | None, found: list[str]
) -> Preview:
    """Tell of data and steps.

    Args:
        plan: of a job without problems; else None.
        tokenizer: None: not to be had, or the data's keys are wrong.
        found: the job's problems; what is wrong with the data is added.
    """
    lines: list[str] = []
    data = None if tokenizer is None else _data(config, tokenizer, found, lines)
    if plan is None:
        return Preview(lines)
    phase = plan.phase("train")
    trained = phase.trained[0].plan
    num_microbatches = -(-most_rows(config) // trained.data)
    if data is not None:
        loader = attempt(found, lambda: _loader(config, data, phase))
        if loader is not None:
            counted = _count_steps(config, loader, lines)
            if counted < num_microbatches:
                lines.append(
                    f"memory is estimated for {num_microbatches} of them, as many as examples of "
                    f"data.max_length={config.data.max_length} take"
                )
            num_microbatches = max(num_microbatches, counted)
    num_rows = int(min(num_microbatches * trained.data, proven_rows(trained)))
    lines += map(phase_line, plan.phases)
    costs = job_costs(config)
    runs = [
        predicted_run(costs, own, same_in_every_pass(own, num_rows), num_passes=2)
        for own in _every_step(plan)
    ]
    return Preview(lines, runs)


def most_rows(config: JobConfig) -> int:
    """Rows of a global batch if all examples are as long as they may be."""
    longest = min(num_responses(config) * config.data.max_length, config.packing.row_tokens)
    return -(-config.global_batch_size // (config.packing.row_tokens // longest))


def drawn_runs(
    config: JobConfig, plan: JobPlan, *, num_steps: int, num_microbatches: int | None
) -> list[PredictedRun]:
    """The job's training steps, by phase.

    Args:
        num_microbatches: of the trained model, in every step; None: counted in the data.

    Raises:
        ValueError: one line, for bad data, or a number that no step can have.
    """
    phase = plan.phase("train")
    if num_microbatches is not None:
        num_rows, num_passes = num_microbatches * phase.trained[0].plan.data, num_steps + 1

        def counts(own: Phase) -> Mapping[str, Count]:
            return same_in_every_pass(own, num_rows)
    else:
        data = job_pairs(
            config, open_tokenizer(tokenizer_config(config)), progress=config.telemetry.progress
        )
        loader = _loader(config, data, phase)
        num_passes = total_steps(config, loader)

        def counts(own: Phase) -> Mapping[str, Count]:
            return counted(loader, own)

    costs = job_costs(config)
    runs = [predicted_run(costs, own, counts(own), num_passes) for own in _every_step(plan)]
    if num_microbatches is not None:
        for run in runs:
            check_multiple(num_microbatches, run)
    return runs


def drawn_lines(_config: JobConfig, _num_microbatches: int | None) -> list[str]:
    """Nothing is taken for granted in ``drawn_runs``."""
    return []


def _every_step(plan: JobPlan) -> list[Phase]:
    return [phase for phase in plan.phases if not phase.once]


def _loader(config: JobConfig, data: PreferenceData, phase: Phase) -> ExampleLoader:
    return train_loader(config, data, plan_view(phase.trained[0].plan, data_rank=0))


def _data(
    config: JobConfig, tokenizer: Tokenizer, found: list[str], lines: list[str]
) -> PreferenceData | None:
    """The tokenized data, described; None if there are none to be had."""
    data = attempt(found, lambda: job_pairs(config, tokenizer, progress=config.telemetry.progress))
    if data is not None:
        layout = config.packing.row_layout
        prompts, responses = data.train.prompt_lengths, data.train.response_lengths
        whole = f"pair, {layout}" if num_responses(config) > 1 else "both"
        lengths = {
            "prompt": prompts,
            "response": responses,
            whole: example_lengths(prompts, responses, layout),
        }
        lines += [data.summary, *(f"warning: {line}" for line in data.warnings)]
        lines += length_lines(lengths)
        attempt(found, lambda: check_tokens(data.datasets(), tokenizer, job_vocabularies(config)))
    return data


def _count_steps(config: JobConfig, loader: ExampleLoader, lines: list[str]) -> int:
    """Tell of steps, microbatches and fill; the most microbatches of a step and replica."""
    per_epoch = loader.steps_per_epoch
    sampled = np.unique(np.linspace(0, per_epoch - 1, NUM_SAMPLED_STEPS, dtype=np.int64))
    batches = [loader.batch(int(step)) for step in sampled]
    counts = [len(batch.microbatches) for batch in batches]
    fewest, most = min(counts), max(counts)
    fill = sum(b.num_tokens for b in batches) / sum(b.num_row_tokens for b in batches)
    microbatches = f"{most}" if fewest == most else f"{fewest} to {most}"
    lines.append(f"steps: {total_steps(config, loader)} ({per_epoch} an epoch)")
    lines.append(f"microbatches of a step and data rank: {microbatches}; fill {100 * fill:.1f}%")
    return most
