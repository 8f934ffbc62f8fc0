"""What ``--validate`` tells of stage ppo: prompts, iterations, phases, memory."""

from collections.abc import Mapping

from puzzle_align.commands.summary import length_lines, say
from puzzle_align.config.check_ppo import longest_prompt
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import phase_roles, role_names, trained_roles
from puzzle_align.data.tokenize import Tokenizer
from puzzle_align.planning.memory import columns_table
from puzzle_align.planning.phase_memory import PhaseRole, PhaseSizes, estimate_phases
from puzzle_align.planning.phases import Phase
from puzzle_align.stages.inputs import attempt
from puzzle_align.stages.prediction import longest_lengths, phases
from puzzle_align.stages.rl.reward_function import load_reward_function
from puzzle_align.stages.rl.run import prepare
from puzzle_align.stages.rl.trainer import num_iterations, sampling_of
from puzzle_align.stages.setup import RoleSetup


def show_ppo(
    config: JobConfig,
    setups: Mapping[str, RoleSetup],
    tokenizer: Tokenizer | None,
    found: list[str],
) -> int:
    """Print what the job would do; returns the most bytes that a rank needs (0: not known).

    Args:
        setups: of a job without problems; else empty.
        tokenizer: None: not to be had, or the data's keys are wrong.
        found: the job's problems; what is wrong with data and reward function is added.
    """
    _check_function(config, found)
    if tokenizer is not None:
        attempt(found, lambda: sampling_of(config, tokenizer))
        _show_prompts(config, tokenizer, found)
    if not setups:
        return 0
    made = phases(config, setups)
    say(f"microbatches below: as many as there may be, with {longest_lengths(config)}")
    for phase in made:
        phase.timeline()  # proves its action lists
        say(f"{phase.name}: {_described(phase)}")
    columns = phase_memory(config, setups, made[1])
    say("memory, estimated (models have theirs all the time, phases one after the other):")
    for line in columns_table(columns).splitlines():
        say(f"  {line}")
    return max(parts["total"] for parts in columns.values())


def _check_function(config: JobConfig, found: list[str]) -> None:
    name = config.reward.function
    if name is not None:
        attempt(found, lambda: load_reward_function(name))


def _show_prompts(config: JobConfig, tokenizer: Tokenizer, found: list[str]) -> None:
    progress = config.telemetry.progress
    prompts = attempt(found, lambda: prepare(config, tokenizer, progress=progress))
    if prompts is None:
        return
    say(prompts.summary)
    for line in length_lines({"prompt": prompts.train.prompt_lengths}):
        say(line)
    number = config.global_batch_size
    responses = number * config.generation.num_generations
    say(
        f"iterations: {num_iterations(config, len(prompts.train))}, each of {number} prompts and "
        f"{responses} responses"
    )
    name = config.reward.function
    if name is not None:
        attempt(found, lambda: load_reward_function(name).check_columns(prompts.train.column_names))


def _described(phase: Phase) -> str:
    """Which models run together, and on how many microbatches of a data rank."""
    teams = []
    for team in phase.teams:
        roles = ", ".join(model.role for model in team)
        number = team[0].num_microbatches
        how = ""
        if len(team) > 1:
            how = " time-shared" if team in phase.streams else " one after the other"
        teams.append(f"{roles}{how} ({number} microbatch{'es' * (number > 1)})")
    return ("a mini-batch of " if phase.train else "") + "; ".join(teams)


def phase_memory(
    config: JobConfig, setups: Mapping[str, RoleSetup], learn: Phase
) -> dict[str, dict[str, int]]:
    """``estimate_phases`` of a sound job; ``learn`` is a mini-batch."""
    counts = {model.role: model.num_microbatches for model in learn.models}
    optimizers = {"actor": config.optimizer, "critic": config.critic.optimizer or config.optimizer}
    roles = [
        PhaseRole(
            role=role,
            plan=setups[role].plan,
            ranks=setups[role].ranks,
            num_microbatches=counts.get(role, 0),
            spec=setups[role].spec,
            options=setups[role].options,
            is_trained=role in trained_roles(config),
            is_scoring=role in phase_roles(config, "score"),
            distributed_optimizer=role in optimizers and optimizers[role].use_distributed_optimizer,
        )
        for role in role_names(config)
    ]
    generation = config.generation
    responses = config.global_batch_size * generation.num_generations
    sizes = PhaseSizes(
        row_tokens=config.packing.row_tokens,
        prefill_tokens=generation.prefill_tokens,
        decode_batch_size=generation.decode_batch_size,
        num_sequences=-(-responses // setups["actor"].plan.data),
        prompt_tokens=longest_prompt(config),
        response_tokens=generation.max_new_tokens,
    )
    return estimate_phases(roles, sizes)
