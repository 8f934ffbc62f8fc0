"""The rows of stage ppo as its models are measured on them."""

from collections.abc import Sequence

import torch

from puzzle_align.config.check_ppo import fewest_together, longest_prompt, longest_segment
from puzzle_align.config.job import JobConfig
from puzzle_align.layout.model import AttentionBackend, Head
from puzzle_align.layout.rows import Microbatch
from puzzle_align.planning.profiled_rows import ExampleSize
from puzzle_align.runtime.profiler import RowCase
from puzzle_align.runtime.row_input import to_device
from puzzle_align.stages.rl.experience import LEARNED
from puzzle_align.stages.rl.losses import ActorLoss, CriticLoss, reading_of


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
    zeros = torch.zeros(num_tokens, dtype=torch.float64, device=device)
    columns: dict[str, torch.Tensor] = dict.fromkeys(LEARNED, zeros)
    role, loss = "actor", None
    if head == "lm":
        loss = ActorLoss(config.ppo, num_tokens, device, config.ppo.kl_coef)
    elif "critic" in roles:
        role, loss = "critic", CriticLoss(config.ppo, num_tokens, device)
    else:
        role = "reward"
    readings = [reading_of(config, role, workload) for workload in ("infer", "train")]
    asked = to_device(microbatch, attention, device, readings[0])
    learnt = to_device(microbatch, attention, device, readings[1], like=asked)

    def score(_microbatch: int, _outputs: torch.Tensor) -> None:
        return None

    def learn(_microbatch: int, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.sum() if loss is None else loss(learnt, outputs, columns)

    return RowCase(asked, score, learnt, learn)
