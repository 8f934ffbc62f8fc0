"""Backwards of ppo_7b's actor and critic on the device ``meta``, with real widths.

``test_fake_cuda`` runs all else of the iteration, on a device on which torch refuses backwards.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from puzzle_align.config.load import load_file
from puzzle_align.runtime.generation.sampling import Request, Response
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages import models, ppo
from tests.dist.recorded import META, Record, record_ranks
from tests.dist.spawn import run_alone
from tests.dist.test_transfers import Unread
from tests.jobs import resolved

CONFIG = Path(__file__).parents[2] / "configs" / "ppo_7b.yaml"
ALONE = (
    "engine.world_size=1",
    "engine.transformer_impl=local",
    "engine.attention=segments",
    "actor.model.config.num_hidden_layers=2",
    "reward.model.config.num_hidden_layers=2",
    "actor.parallel.pipeline_model_parallel_size=1",
    "actor.parallel.tensor_model_parallel_size=1",
    "actor.parallel.sequence_parallel=false",
    "data.num_synthetic=64",
    "data.synthetic_length=64",
    "global_batch_size=8",
)
Gradients = Counter[tuple[str, str, torch.dtype]]  # how many a weight of a role got


def given(_context: object, requests: Sequence[Request], *_args: Any, **_named: Any) -> Any:
    """Responses in place of sampled ones, which ``meta`` has not."""
    lengths = [3 + request.id % 5 for request in requests]
    return [
        Response(request.id, np.ones(n, dtype=np.int64), np.full(n, -1, dtype=np.float32), True)
        for request, n in zip(requests, lengths, strict=True)
    ]


def gradients_of_an_iteration() -> tuple[Gradients, set[str]]:
    """Gradients of the actor's and critic's weights, and the names of these."""
    models.role_weights = lambda *_args: Unread()  # type: ignore[assignment]
    ppo.generate = given
    found: Gradients = Counter()
    weights: set[str] = set()

    def work(_rank: int, _record: Record) -> None:
        trainer = ppo.open_trainer(job, World(0, 1, META))
        for role, optimizer in trainer.run.optimizers.items():
            for name, weight in optimizer.context.chunks[0].named_parameters():
                weights.add(f"{role} {name}")
                assert (weight.dtype, weight.main_grad.dtype) == (torch.bfloat16, torch.float32)

                def note(gradient: torch.Tensor, key: tuple[str, str] = (role, name)) -> None:
                    found[(*key, gradient.dtype)] += 1

                weight.register_hook(note)
        trainer.train_step(0)

    with tempfile.TemporaryDirectory() as folder:
        config = load_file(CONFIG, [f"output_dir={folder}", *ALONE])
        job = resolved(config, 1, elsewhere=True)
        record_ranks(work, 1)
    return found, weights


def test_every_weight_of_actor_and_critic_gets_a_gradient_in_each_mini_batch() -> None:
    found, weights = run_alone(gradients_of_an_iteration)
    assert {dtype for _, _, dtype in found} == {torch.bfloat16}
    assert {f"{role} {name}" for role, name, _ in found} == weights
    assert set(found.values()) == {4}  # mini-batches of a row each
