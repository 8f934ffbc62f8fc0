"""The rows of stage ppo as its models are measured on them."""

from collections.abc import Sequence

import torch

from puzzle_align.config.check_ppo import fewest_together, longest_prompt, longest_segment
from puzzle_align.config.job import JobConfig
from puzzle_align.layout.model import AttentionBackend, Head
from puzzle_align.layout.rows import Microbatch
from puzzle_align.planning.profiled_rows import ExampleSize
from puzzle_align.runtime.profiler import RowCase
from puzzle_align.runtime.row_input import OutputKind, model_input, predictions_of
from puzzle_align.stages.rl.experience import LEARNED
from puzzle_align.stages.rl.losses import ActorLoss, CriticLoss, PPOLoss
from puzzle_align.stages.rl.rollout import policy_temperature


def example_size(config: JobConfig) -> ExampleSize:
    """Prompts and responses as long as they may be: what they will be, only sampling tells."""
    together = fewest_together(config)
    return ExampleSize(
        prompt=longest_prompt(config),
        responses=(config.generation.max_new_tokens,) * together,
        longest=longest_segment(config, together=together),
    )


def row_case(
    config: JobConfig,
    roles: Sequence[str],
    head: Head,
    microbatch: Microbatch,
    attention: AttentionBackend,
    device: torch.device,
) -> RowCase:
    """A row of responses, scored, and learnt from with the actor's or the critic's loss.

    A reward model that is no critic, which stage ppo does not train, learns from a plain sum.
    """
    num_tokens = len(microbatch.predict_from)
    columns = torch.zeros(num_tokens, len(LEARNED), dtype=torch.float64, device=device)
    kind: OutputKind = "tokens"
    loss: PPOLoss | None = ActorLoss(config.ppo, config.ppo.kl_coef, num_tokens)
    if head == "scalar":
        kind, loss = "responses", None
        if "critic" in roles:
            kind, loss = "states", CriticLoss(config.ppo, num_tokens)
    temperature = policy_temperature(config)
    asked = predictions_of(microbatch, kind, device, temperature=temperature)
    learnt = predictions_of(microbatch, kind, device, temperature=temperature, entropies=True)
    row = model_input(microbatch, asked, attention, device)

    def score(_microbatch: int, _outputs: torch.Tensor) -> None:
        return None

    def learn(_microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.sum() if loss is None else loss(outputs, columns)[0]

    return RowCase(row, score, row.asked(learnt), learn)
