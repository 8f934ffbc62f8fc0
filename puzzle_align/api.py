"""Use the runtime from Python: load a config, train it, generate with the model.

    from puzzle_align import generate, load_config, train

    config = load_config("dpo_tiny", "max_steps=50", "output_dir=runs/first")
    print(train(config)[-1])
    print(generate("runs/first", ["a prompt"], "generation.max_new_tokens=16"))

Each call runs on this process alone, or collectively on all ranks that torchrun started.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from puzzle_align.config.check import check_keys
from puzzle_align.config.job import JobConfig
from puzzle_align.config.load import check_generate_keys, find_config, load_file


def load_config(config: str | Path, *overrides: str) -> JobConfig:
    """Load a job's config.

    Args:
        config: a YAML file, or the name of a shipped config.
        overrides: ``key=value``, as on the command line.

    Raises:
        ValueError: one line that names the file or key, and the cure.
    """
    return load_file(find_config(str(config)), overrides)


def train(config: JobConfig) -> list[dict[str, Any]]:
    """Train a job to its last step, or from its last checkpoint. Collective.

    Ctrl-C ends it after the step at hand, which is saved.

    Returns:
        The lines of ``metrics.jsonl``, on every rank: one for each logged step, and one for each
        evaluation; none if a checkpoint of another folder is finished already.

    Raises:
        ValueError: one line, for a fault of config, data, weights or a checkpoint.
        puzzle_align.runtime.liveness.failure.CannotGoOn: if training diverges.
    """
    from puzzle_align.runtime.groups.collectives import from_rank_zero
    from puzzle_align.runtime.groups.world import leaving_on_error, shutdown_distributed
    from puzzle_align.stages import run

    check_keys(config)
    with leaving_on_error():
        with run.opened_run(config) as opened:
            run.train(*opened)
            metrics = Path(config.output_dir) / "metrics.jsonl"
            lines = from_rank_zero(lambda: metrics.read_text() if metrics.exists() else "")
        shutdown_distributed()
    return [json.loads(line) for line in lines.splitlines()]


def generate(model: str | Path, prompts: Sequence[str], *overrides: str) -> list[dict[str, Any]]:
    """Answer prompts with a model. Collective.

    Args:
        model: a Hugging Face directory, a job's ``output_dir``, or one of its checkpoints.
        overrides: ``key=value`` of the keys that ``puzzle-align generate --help`` lists, as
            ``generation.max_new_tokens=256``.

    Returns:
        The rows that ``puzzle-align generate`` writes, in order, on rank 0; elsewhere none.

    Raises:
        ValueError: one line, for a wrong model, prompt or key.
    """
    from puzzle_align.commands.generate import generate_responses
    from puzzle_align.runtime.groups.world import leaving_on_error

    if isinstance(prompts, str):  # the command would take it for a file
        raise ValueError("prompts: expected a list of texts, got a text; put it in brackets")
    check_generate_keys(overrides)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "responses.jsonl"
        with leaving_on_error():
            generate_responses(Path(model), prompts, output, overrides)
        # Bytes split at line ends alone, texts also at some characters within JSON's texts.
        lines = output.read_bytes().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines]
