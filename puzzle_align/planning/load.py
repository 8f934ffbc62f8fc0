"""The work of an iteration, whatever the plan: the data's own statistics."""

from collections.abc import Callable
from dataclasses import dataclass

from puzzle_align.planning.costs.measured import RowShape


@dataclass(frozen=True, kw_only=True)
class PassLoad:
    """A pass over a batch on every data rank of a plan, in the mean over the data's steps."""

    microbatches: float
    row: RowShape


@dataclass(frozen=True, kw_only=True)
class GenerationLoad:
    """The responses that an iteration samples, taken to be as long as they are in the mean."""

    num_prompts: int
    num_generations: int  # responses a prompt
    prompt_tokens: float
    response_tokens: float
    longest: int  # tokens of a prompt and its response, at most: the cache has room for it


# (tokens of a row, batches that an iteration is cut into, data ranks, multiple) -> a pass over one
# of the batches, whose microbatches on each data rank are a multiple of ``multiple``.
RowsOf = Callable[[int, int, int, int], PassLoad]


@dataclass(frozen=True, kw_only=True)
class Load:
    """An iteration: of the preference stages one optimizer step, of PPO all that follows a rollout.

    ``num_examples``: pairs, or responses. ``mini_batches`` is how many batches of rows it is
    trained in, ``epochs`` how often each; ``num_iterations`` of the whole job.
    """

    rows: RowsOf
    num_examples: int
    num_iterations: int
    least_row_tokens: int  # of a row that holds the longest example
    mini_batches: int = 1
    epochs: int = 1
    generation: GenerationLoad | None = None
