#!/usr/bin/env python3
"""Training adapters, and all weights: bytes and seconds of switches and checkpoints. Prints JSON.

Stage ppo on two CPU ranks: an actor that trains under P = 2 and samples under T = 2, with a reward
function and without a critic or a reference. "full" trains all weights, "adapters" low-rank ones.

    python tools/bench_adapters.py                # 66M parameters, about two minutes

- "switch_mb": what the ranks send one another to sample, by iteration (the first moves the base,
  too), and "switch_s" the seconds of it, from when all ranks begin until the last is done;
- "checkpoint_mb": size of a checkpoint's files, and "save_s" the seconds of saving it.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bench_run import parser_of, run_ranks, show

from puzzle_align.config.load import load_job
from puzzle_align.config.resolve import resolve
from puzzle_align.layout.weights import num_parameters, num_trainable_parameters
from puzzle_align.resharding.routing import RoutingTable
from puzzle_align.runtime import shadow
from puzzle_align.runtime.checkpoint.models import save_checkpoint
from puzzle_align.runtime.groups.collectives import from_rank_zero, wait_for_all
from puzzle_align.runtime.groups.world import World
from puzzle_align.stages.engine import resolve_engine
from puzzle_align.stages.ppo import PPOTrainer

VARIANTS = {"full": (), "adapters": ("actor.lora={r: 16, lora_alpha: 32}",)}
JOB = """
stage: ppo
global_batch_size: 4
engine: {device: cpu}
actor: {parallel: {pipeline_model_parallel_size: 2}}
reward: {function: "puzzle_align.data.synthetic:vowel_share"}
tokenizer: {path: byte}
data: {format: synthetic, num_synthetic: 64, max_length: 32}
packing: {row_tokens: 128}
generation: {max_new_tokens: 4, parallel: {tensor_model_parallel_size: 2}}
ppo: {advantage_estimator: reinforce_plus_plus, kl_coef: 0, num_mini_batches: 1, ppo_epochs: 1}
telemetry: {progress: false, tensorboard: false}
"""


def work(world: World, hidden: int, layers: int, steps: int) -> dict[str, Any]:
    """Measure both variants on a rank."""
    return {name: _measured(world, hidden, layers, steps, own) for name, own in VARIANTS.items()}


def _measured(
    world: World, hidden: int, layers: int, steps: int, overrides: tuple[str, ...]
) -> dict[str, Any]:
    sizes = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": 260,
        "max_position_embeddings": 64,
    }
    folder = Path(from_rank_zero(tempfile.mkdtemp))
    model = f"actor.model.config={json.dumps(sizes)}"
    config = load_job(JOB, [model, f"max_steps={steps}", f"output_dir={folder}", *overrides])
    job = resolve(config, resolve_engine(config.engine), world.size)
    trainer = PPOTrainer(job, world)
    trainer.waits_between_phases = True
    with recorded() as sent:
        seconds = [trainer.train_step(step)[1].phases["switch"] for step in range(steps)]
    wait_for_all(world.device)
    begun = time.perf_counter()
    saved = save_checkpoint(folder, steps, {}, trainer.models)
    wait_for_all(world.device)
    took = time.perf_counter() - begun
    size = from_rank_zero(lambda: sum(f.stat().st_size for f in saved.rglob("*") if f.is_file()))
    spec = job.models["actor"].spec
    from_rank_zero(lambda: shutil.rmtree(folder))
    return {
        "parameters": num_parameters(spec),
        "trained": num_trainable_parameters(spec),
        "switch_mb": [4 * number / 1e6 for number in sent],
        "switch_s": seconds,
        "checkpoint_mb": size / 1e6,
        "save_s": took,
    }


@contextmanager
def recorded() -> Iterator[list[int]]:
    """Yield the numbers that all ranks send in each switch, filled as they happen."""
    sent: list[int] = []
    reshard = shadow.reshard

    def recording(table: RoutingTable, *arguments: Any) -> None:
        sent.append(sum(table.sent.values()))
        reshard(table, *arguments)

    with mock.patch.object(shadow, "reshard", recording):
        yield sent


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=768, help="hidden size (768)")
    parser.add_argument("--layers", type=int, default=9, help="layers (9)")
    parser.add_argument("--steps", type=int, default=4, help="iterations (4)")
    options = parser.parse_args(arguments)
    show(run_ranks(work, 2, options.hidden, options.layers, options.steps))


if __name__ == "__main__":
    main()
