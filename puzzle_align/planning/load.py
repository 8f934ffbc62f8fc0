"""Work of an iteration, independent of the plan: statistics of the data."""

from collections.abc import Callable
from dataclasses import dataclass

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.measured import RowShape


@dataclass(frozen=True, kw_only=True)
class PassLoad:
    """A pass over a batch on every data rank of a plan: means over the data's steps."""

    microbatches: float
    row: RowShape


@dataclass(frozen=True, kw_only=True)
class GenerationLoad:
    """Responses that an iteration samples, all assumed to have the mean length."""

    num_prompts: int
    num_generations: int  # responses per prompt
    prompt_tokens: float
    response_tokens: float
    longest_prompt: int  # tokens
    longest_response: int  # tokens
    greedy: bool = False  # beside them, a greedy response to each prompt


# (most tokens of a row, batches per iteration, plan) -> a pass over one of the batches.
RowsOf = Callable[[int, int, ParallelPlan], PassLoad]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Work of an iteration: for the preference stages an optimizer step, for PPO a whole rollout.

    ``num_examples`` counts pairs, or responses. The iteration trains on ``mini_batches`` batches of
    rows, ``epochs`` times on each; the job has ``num_iterations``. ``most_rows`` gives the rows of
    such a batch if all examples have the greatest length, by the tokens of a row.

    A phase that runs once in the job goes over all data: ``data_batches``, held-out ones included.
    The job has ``num_evaluations``, each of ``held_out_batches``.
    """

    rows: RowsOf
    most_rows: Callable[[int], int]
    num_examples: int
    num_iterations: int
    least_row_tokens: int  # of a row that holds the longest example
    fixed_row_tokens: int | None = None  # of rows that are packed before the job's plan is known
    mini_batches: int = 1
    epochs: int = 1
    generation: GenerationLoad | None = None
    data_batches: float = 1.0
    held_out_batches: float = 0.0
    num_evaluations: int = 0

    def allows_rows_of(self, tokens: int) -> bool:
        """Whether the job's rows may have so many tokens."""
        return tokens >= self.least_row_tokens and self.fixed_row_tokens in (None, tokens)

    @property
    def scored_batches(self) -> float:
        """Batches of rows that an iteration scores: its responses, and a share of greedy ones."""
        generation = self.generation
        if generation is None or not generation.greedy:
            return 1.0
        return 1 + 1 / generation.num_generations
