"""``--validate``: what a job would do, and everything that is wrong with it; trains nothing.

One process, no process group: the job may be for other machines, and larger ones.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from puzzle_align.commands.summary import length_lines, ranks_text, say
from puzzle_align.commands.validate_ppo import show_ppo
from puzzle_align.config.check import JobProblems, problems
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import (
    resolve_placement,
    resolve_role_spec,
    role_model,
    role_names,
    runs_concurrently,
    trained_role,
)
from puzzle_align.data.loader import PairLoader
from puzzle_align.data.packing import pair_lengths
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.layout.model import num_parameters
from puzzle_align.planning.memory import estimate_frozen, estimate_preference, table
from puzzle_align.stages.data_view import plan_view
from puzzle_align.stages.inputs import attempt, check_inputs
from puzzle_align.stages.preference.data import PreferenceData, prepare, total_steps, train_loader
from puzzle_align.stages.setup import Engine, RoleSetup, resolve_engine, resolve_role
from puzzle_align.stages.tokenizer import check_vocabulary, open_tokenizer
from puzzle_align.telemetry.text import num_bytes, quantity

NUM_SAMPLED_STEPS = 32  # of which fill and microbatches are measured
# Where one of these is wrong, the data is not looked at.
DATA_KEYS = ("data.", "packing.", "generation.")


def run(config: JobConfig, world_size: int) -> None:
    """Check the job for ``world_size`` ranks; print models, data, steps and memory.

    Raises:
        JobProblems: with a line for everything that is wrong.
    """
    found = problems(config, world_size)
    data_keys_are_right = not any(line.startswith(DATA_KEYS) for line in found)
    engine = resolve_engine(config.engine, elsewhere=True)
    setups = {} if found else _models(config, engine, world_size)
    found += [line for line in check_inputs(config) if line not in found]
    tokenizer = _tokenizer(config, found) if data_keys_are_right else None
    show = show_ppo if config.stage == "ppo" else _show_preference
    needed = show(config, setups, tokenizer, found)
    if needed:
        _compare(engine, needed)
    if found:
        raise JobProblems(found)
    say(f"valid: {config.stage} on {world_size} ranks; nothing was trained")


def _show_preference(
    config: JobConfig,
    setups: Mapping[str, RoleSetup],
    tokenizer: Tokenizer | None,
    found: list[str],
) -> int:
    """Print data, steps and memory of a preference stage; returns the most bytes of a rank."""
    data = None if tokenizer is None else _data(config, tokenizer, found)
    num_microbatches = config.global_batch_size  # at most, until the rows are known
    if setups and data is not None:
        loader = attempt(found, lambda: _loader(config, data, setups[trained_role(config)]))
        if loader is not None:
            num_microbatches = _show_steps(config, loader)
    return _show_memory(config, setups, num_microbatches) if setups else 0


def _models(config: JobConfig, engine: Engine, world_size: int) -> dict[str, RoleSetup]:
    """Every role of a job without problems, on its plan, described."""
    setups = {}
    for role in role_names(config):
        setup = setups[role] = resolve_role(config, role, engine, world_size)
        weights = setup.model.path or "random weights"
        if setup.model.random_weights:
            weights = f"random weights, for {setup.model.path}"
        parameters = quantity(num_parameters(setup.spec))
        where = ""
        if config.stage == "ppo":
            where = f", {ranks_text(setup.ranks)}"
        say(
            f"{role}: {setup.spec.model_type}, {parameters} parameters, {setup.plan}{where}, "
            f"{weights}"
        )
    if config.stage == "dpo" and "reference" in setups and not config.dpo.precompute_ref_log_probs:
        ranks = setups["reference"].ranks
        where = f", on {ranks_text(ranks)}" if runs_concurrently(config) else ""
        say(f"placement.reference: {resolve_placement(config)}{where}")
    return setups


def _tokenizer(config: JobConfig, found: list[str]) -> Tokenizer | None:
    """The job's tokenizer, held against every model; None if there is none to be had."""
    tokenizer = attempt(found, lambda: open_tokenizer(config))
    if tokenizer is None:
        return None
    for role in role_names(config):
        _, key = role_model(config, role)
        spec = attempt(found, partial(resolve_role_spec, config, role))
        if spec is not None:
            attempt(found, partial(check_vocabulary, tokenizer, spec, key))
    return tokenizer


def _data(config: JobConfig, tokenizer: Tokenizer, found: list[str]) -> PreferenceData | None:
    """The tokenized pairs, described; None if there are none to be had."""
    data = attempt(found, lambda: prepare(config, tokenizer, progress=config.telemetry.progress))
    if data is not None:
        say(data.summary)
        layout = config.packing.row_layout
        prompts, responses = data.train.prompt_lengths, data.train.response_lengths
        lengths = {
            "prompt": prompts,
            "response": responses,
            f"pair, {layout}": pair_lengths(prompts, responses, layout),
        }
        for line in length_lines(lengths):
            say(line)
    return data


def _loader(config: JobConfig, data: PreferenceData, trained: RoleSetup) -> PairLoader:
    return train_loader(config, data, plan_view(trained.plan, data_rank=0))


def _show_steps(config: JobConfig, loader: PairLoader) -> int:
    """Print steps, microbatches and fill; returns the most microbatches of a step and replica."""
    per_epoch = loader.steps_per_epoch
    sampled = np.unique(np.linspace(0, per_epoch - 1, NUM_SAMPLED_STEPS, dtype=np.int64))
    batches = [loader.batch(int(step)) for step in sampled]
    counts = [len(batch.microbatches) for batch in batches]
    fewest, most = min(counts), max(counts)
    fill = sum(b.num_tokens for b in batches) / sum(b.num_row_tokens for b in batches)
    microbatches = f"{most}" if fewest == most else f"{fewest} to {most}"
    say(f"steps: {total_steps(config, loader)} ({per_epoch} an epoch)")
    say(f"microbatches of a step and data rank: {microbatches}; fill {100 * fill:.1f}%")
    return most


def _show_memory(config: JobConfig, setups: Mapping[str, RoleSetup], num_microbatches: int) -> int:
    """Print the estimate; returns the most bytes of a rank."""
    trained, reference = setups[trained_role(config)], setups.get("reference")
    beside = runs_concurrently(config)
    held = None
    if reference is not None and not config.dpo.precompute_ref_log_probs and not beside:
        held = reference.spec, reference.plan
    row_tokens = config.packing.row_tokens
    estimates = estimate_preference(
        trained.spec,
        trained.plan,
        trained.options,
        row_tokens=row_tokens,
        num_microbatches=num_microbatches,
        distributed_optimizer=config.optimizer.use_distributed_optimizer,
        reference=held,
        reference_ahead=held is not None and resolve_placement(config) == "time_shared",
    )
    say("memory, estimated:")
    for line in table(estimates).splitlines():
        say(f"  {line}")
    if reference is not None and beside:
        of_reference = estimate_frozen(
            reference.spec, reference.plan, reference.options, row_tokens=row_tokens
        )
        say("memory of the reference's ranks, estimated:")
        for line in table(of_reference).splitlines():
            say(f"  {line}")
        estimates += of_reference
    return max(estimate.total for estimate in estimates)


def _compare(engine: Engine, needed: int) -> None:
    """Print what the device here has, if there is one."""
    if engine.device == "cuda" and torch.cuda.is_available():
        has = torch.cuda.get_device_properties(0).total_memory
        say(f"  the device here has {num_bytes(has)}: {'enough' if needed < has else 'NOT enough'}")
