"""Outlook of a sampling job: iterations, rows of the greatest length, reward functions."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from puzzle_align.algos.ppo import LossCounts
from puzzle_align.config.check_ppo import fewest_together, longest_prompt, longest_segment
from puzzle_align.config.job import JobConfig
from puzzle_align.config.sections.models import is_url
from puzzle_align.data.loader import ExampleLoader
from puzzle_align.data.prompts import PromptDataset
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.job_plan import JobPlan, Workload
from puzzle_align.layout.rows import Microbatch, RowLayout
from puzzle_align.planning.load import GenerationLoad, Load
from puzzle_align.planning.memory.job import GenerationSizes
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.planning.profiled_rows import ExampleSize
from puzzle_align.runtime.columns import Responses
from puzzle_align.runtime.row_input import Reading
from puzzle_align.stages.inputs import attempt
from puzzle_align.stages.outlook import (
    NUM_SAMPLED_STEPS,
    Outlook,
    Preview,
    RowLoss,
    phase_line,
    proven_rows,
    rows_of,
    warm_up_lines,
    with_rows,
)
from puzzle_align.stages.rewards.functions import Signature
from puzzle_align.stages.rewards.worker import RewardWorker
from puzzle_align.stages.rl.experience import columns_to_learn
from puzzle_align.stages.rl.learning import ActorLoss, CriticLoss, reading_of
from puzzle_align.stages.rl.prompts import batch_of, job_prompts, num_iterations, sampling_of
from puzzle_align.stages.rl.rewards import prompt_names
from puzzle_align.stages.rl.rollout import Rollout, dataset_of, loader_of
from puzzle_align.stages.tokenizer import open_tokenizer
from puzzle_align.telemetry.text import length_lines


class PromptOutlook(Outlook):
    """Outlook of the stage ppo."""

    def preview(
        self, plan: JobPlan | None, tokenizer: Tokenizer | None, problems: list[str]
    ) -> Preview:
        """Describe prompts, iterations and phases; check reward functions."""
        config, lines = self.config, []
        functions, prompts = self._functions(problems), None
        if tokenizer is not None:
            if plan is not None:
                model = plan.models["actor"].model
                attempt(problems, lambda: sampling_of(config, tokenizer, model))
            prompts = self._described_prompts(tokenizer, functions, problems, lines)
        datasets = () if prompts is None else (prompts,)
        if plan is None:
            return Preview(lines + self._iterations(prompts, problems), datasets)
        work = self.work(plan, prompts, problems)
        return replace(work, lines=lines + work.lines, datasets=datasets)

    def work(self, plan: JobPlan, data: PromptDataset | None, problems: list[str]) -> Preview:
        """Describe iterations, rows and phases."""
        config, lines = self.config, self._iterations(data, problems)
        lines.append(
            f"microbatches below (learn: of a mini-batch): the most possible, with "
            f"{self._longest_lengths()}"
        )
        lines += split_lines(config)
        most = most_rows(config)
        for run in self.runs(plan, most):
            counts = {role: count(0) for role, count in run.num_microbatches.items()}
            lines.append(phase_line(run.phase, counts))
        learning = [context.plan for context in plan.phase("learn").contexts]
        runs = self.runs(plan, int(min(most, max(map(proven_rows, learning)))))
        return Preview(lines, runs=runs, generation=self._generation_sizes(plan))

    def counted_runs(self, plan: JobPlan) -> list[PredictedRun]:
        """Runs of a pass of the score phase, and of a mini-batch of the learn phase."""
        return self.runs(plan, most_rows(self.config))

    def assumptions(self) -> list[str]:
        """Line on the assumed lengths of prompts and responses."""
        return [f"microbatches: the most possible, with {self._longest_lengths()}"]

    def load(self, response_tokens: float | None = None) -> Load:
        """Mean load of some of the first iterations."""
        config, generation = self.config, self.config.generation
        parts, longest = config.ppo.num_mini_batches, generation.max_new_tokens
        length = max(1, round(response_tokens or longest))
        prompts = job_prompts(config, open_tokenizer(config.tokenizer)).train
        number = num_iterations(config, len(prompts))
        sampled = min(number, max(1, NUM_SAMPLED_STEPS // parts))
        rollout = self._rollout(prompts, sampled, length)
        return Load(
            rows=rows_of(partial(self._loader_of, rollout, prompts, sampled)),
            most_rows=lambda row_tokens: most_rows(with_rows(config, row_tokens)),
            num_examples=config.global_batch_size * generation.num_generations,
            num_iterations=number,
            # The job refuses rows below data.max_length, too.
            least_row_tokens=max(longest_segment(config, together=1), config.data.max_length),
            mini_batches=parts,
            epochs=config.ppo.ppo_epochs,
            generation=GenerationLoad(
                num_prompts=config.global_batch_size,
                num_generations=generation.num_generations,
                prompt_tokens=float(rollout.prompt_lengths.mean()),
                response_tokens=length,
                longest_prompt=longest_prompt(config),
                longest_response=longest,
                greedy=config.ppo.estimator.samples_greedily,
            ),
        )

    def drawn_row(self) -> RowLayout:
        """Layout of a row that scores the first iteration, with responses as long as possible."""
        config = self.config
        prompts = job_prompts(config, open_tokenizer(config.tokenizer)).train
        rollout = self._rollout(prompts, 1, config.generation.max_new_tokens)
        tokens = {i: np.zeros(n, dtype=np.int64) for i, n in enumerate(rollout.lengths)}
        dataset = dataset_of(rollout, prompts, tokens, config.packing)
        loader = loader_of(config, dataset, rollout.num_generations, batches=1)
        return loader.batch(0).microbatches[0].layout

    def _rollout(self, prompts: PromptDataset, num_iterations: int, length: int) -> Rollout:
        """The first iterations' prompts, together, with responses of one length."""
        drawn = [batch_of(self.config, prompts, number) for number in range(num_iterations)]
        chosen, k = np.concatenate(drawn), self.config.generation.num_generations
        return Rollout(
            iteration=0,
            batch=0,
            prompts=chosen,
            prompt_lengths=prompts.prompt_lengths[chosen].astype(np.int64),
            stopped=np.zeros(0, dtype=bool),
            responses=Responses(
                np.full(len(chosen) * k, length, dtype=np.int64),
                owners=np.zeros(0, dtype=np.int64),
            ),
            num_generations=k,
        )

    def _loader_of(
        self,
        rollout: Rollout,
        prompts: PromptDataset,
        num_iterations: int,
        row_tokens: int,
        batches: int,
    ) -> tuple[ExampleLoader, Sequence[int]]:
        """Rows of the iterations' examples in ``batches`` mini-batches each, and their steps."""
        config, k = with_rows(self.config, row_tokens), rollout.num_generations
        together = batches * num_iterations
        dataset = dataset_of(rollout, prompts, {}, config.packing)
        return loader_of(config, dataset, k, batches=together), range(together)

    def example_size(self) -> ExampleSize:
        """Greatest lengths of prompts and responses; actual lengths come with sampling."""
        together = fewest_together(self.config)
        return ExampleSize(
            prompt=longest_prompt(self.config),
            responses=(self.config.generation.max_new_tokens,) * together,
            longest=longest_segment(self.config, together=together),
        )

    def reading(self, role: str, workload: Workload) -> Reading:
        """Return the reading of rows by a role's model."""
        return reading_of(self.config, role, workload)

    def row_loss(self, role: str, microbatch: Microbatch, device: torch.device) -> RowLoss | None:
        """Return the loss of a policy or critic; None for other models, which are not trained."""
        num_tokens, config = len(microbatch.predict_from), self.config.ppo
        zeros = torch.zeros(num_tokens, dtype=torch.float64, device=device)
        columns = dict.fromkeys(columns_to_learn(config, True), zeros)
        if role == "actor":
            counts = LossCounts(num_tokens, 1, self.config.generation.max_new_tokens)
            return partial(ActorLoss(config, counts, device, config.kl_coef), columns=columns)
        if role == "critic":
            return partial(CriticLoss(config, num_tokens, device), columns=columns)
        return None

    def _iterations(self, prompts: PromptDataset | None, problems: list[str]) -> list[str]:
        """Lines on the job's iterations; none if the prompts cannot be read or do not suffice."""
        config, number = self.config, self.config.global_batch_size
        if prompts is None:
            return []
        iterations = attempt(problems, lambda: num_iterations(config, len(prompts)))
        if iterations is None:
            return []
        responses = number * config.generation.num_generations
        lines = [f"iterations: {iterations}, each of {number} prompts and {responses} responses"]
        each = config.ppo.ppo_epochs * config.ppo.num_mini_batches
        of_actor = (iterations - config.ppo.critic_warmup) * each
        lines += warm_up_lines("optimizer", config.optimizer, of_actor)
        if config.ppo.estimator.uses_critic and config.critic.optimizer is not None:
            lines += warm_up_lines("critic.optimizer", config.critic.optimizer, iterations * each)
        return lines

    def _longest_lengths(self) -> str:
        """Describe the lengths that ``most_rows`` assumes."""
        generation = self.config.generation
        responses = f"{generation.num_generations} response{'s' * (generation.num_generations > 1)}"
        return (
            f"prompts of {longest_prompt(self.config)} tokens, {responses} of "
            f"{generation.max_new_tokens}"
        )

    def _generation_sizes(self, plan: JobPlan) -> GenerationSizes:
        generation = self.config.generation
        replicas = plan.context("actor", "generate").plan.data
        prompts = -(-self.config.global_batch_size // replicas)
        return GenerationSizes(
            prefill_tokens=generation.prefill_tokens,
            decode_batch_size=generation.decode_batch_size,
            num_sequences=prompts * generation.num_generations,
            prompt_tokens=longest_prompt(self.config),
            response_tokens=generation.max_new_tokens,
        )

    def _functions(self, problems: list[str]) -> list[Signature]:
        """Load the reward functions; if one cannot be called, add the fault to ``problems``."""
        reward = self.config.reward
        wrong_time = any(line.startswith("reward.timeout:") for line in problems)
        if not reward.functions or wrong_time or not all(map(is_url, reward.urls)):
            return []  # none, or the config's fault
        worker = attempt(problems, lambda: RewardWorker(reward.functions, reward.timeout))
        if worker is None:
            return []
        worker.close()
        return worker.signatures

    def _described_prompts(
        self,
        tokenizer: Tokenizer,
        functions: Sequence[Signature],
        problems: list[str],
        lines: list[str],
    ) -> PromptDataset | None:
        """Open the prompts and describe them; None if they cannot be read."""
        prompts = attempt(problems, lambda: job_prompts(self.config, tokenizer))
        if prompts is None:
            return None
        names = (*prompts.train.column_names, *prompt_names(self.config.data))
        for function in functions:
            attempt(problems, partial(function.check_columns, names))
        lines += [prompts.summary, *length_lines({"prompt": prompts.train.prompt_lengths})]
        return prompts.train


def most_rows(config: JobConfig) -> int:
    """Rows of a mini-batch if all prompts and responses have the greatest length."""
    together = fewest_together(config)
    per_row = config.packing.row_tokens // longest_segment(config, together=together)
    prompts = config.global_batch_size // config.ppo.num_mini_batches
    return -(-prompts * (config.generation.num_generations // together) // per_row)


def split_lines(config: JobConfig) -> list[str]:
    """Line on the cost of rows that cannot hold a prompt with all of its responses."""
    k, together = config.generation.num_generations, fewest_together(config)
    if together == k or config.packing.row_layout != "shared":
        return []
    whole, part = longest_segment(config, together=k), longest_segment(config, together=together)
    times = k // together
    return [
        f"packing.row_tokens={config.packing.row_tokens} holds {together} of {k} responses with "
        f"their prompt at the greatest length: prompts are repeated {times} times, "
        f"which is {100 * (times * part / whole - 1):.1f}% more tokens; {whole} would hold them all"
    ]


outlook = PromptOutlook  # read by ``stages.outlook``
