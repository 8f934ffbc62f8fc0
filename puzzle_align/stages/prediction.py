"""What a plan predicts of a job's training steps, or of its phases: drawn, also beside measures."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

from puzzle_align.config.check_ppo import longest_prompt, longest_segment
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import phase_roles, resolve_placement, trained_role, trained_roles
from puzzle_align.data.loader import PairLoader
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.phases import Phase, PhaseModel
from puzzle_align.planning.steps import PlacedModel, PreferenceRun
from puzzle_align.stages.data_view import plan_view
from puzzle_align.stages.flops import action_costs
from puzzle_align.stages.setup import RoleSetup

Count = Callable[[int], int]  # microbatches of a step on each data rank


def forecast(
    config: JobConfig, setups: Mapping[str, RoleSetup], counts: Mapping[str, Count], num_steps: int
) -> PreferenceRun:
    """The job's run of ``num_steps``; ``setups`` and ``counts`` are by role.

    A reference that runs before training only is left out.
    """
    runs_reference = "reference" in setups and not config.dpo.precompute_ref_log_probs
    placed = {
        role: PlacedModel(
            role=role, plan=setup.plan, ranks=setup.ranks, num_microbatches=counts[role]
        )
        for role, setup in setups.items()
    }
    return PreferenceRun(
        policy=placed[trained_role(config)],
        reference=placed["reference"] if runs_reference else None,
        placement=resolve_placement(config),
        costs=action_costs(setups, config.packing.row_tokens),
        num_steps=num_steps,
    )


def counted(loader: PairLoader, setups: Mapping[str, RoleSetup]) -> dict[str, Count]:
    """The microbatches of every role as the data has them; ``loader`` is any rank's."""
    views = {role: loader.seen_by(**plan_view(s.plan, data_rank=0)) for role, s in setups.items()}

    def count(view: PairLoader, step: int) -> int:
        return len(view.batch(step).microbatches)

    return {role: lru_cache(partial(count, view)) for role, view in views.items()}


def same_in_every_step(
    num_microbatches: int, trained: ParallelPlan, setups: Mapping[str, RoleSetup]
) -> dict[str, Count]:
    """The trained model's as given; another plan splits as many rows over its own data ranks."""
    num_rows = num_microbatches * trained.data
    numbers = {
        role: num_microbatches if setup.plan == trained else spread(num_rows, setup.plan)
        for role, setup in setups.items()
    }
    return {role: lambda step, number=number: number for role, number in numbers.items()}


def spread(num_rows: int, plan: ParallelPlan) -> int:
    """The microbatches of each data rank of a plan that ``num_rows`` rows make."""
    multiple = plan_view(plan, data_rank=0)["microbatch_multiple"]
    return -(-num_rows // (plan.data * multiple)) * multiple


def longest_lengths(config: JobConfig) -> str:
    """What ``phases`` takes for granted of stage ppo's prompts and responses, for people."""
    generation = config.generation
    responses = f"{generation.num_generations} response{'s' * (generation.num_generations > 1)}"
    return f"prompts of {longest_prompt(config)} tokens, {responses} of {generation.max_new_tokens}"


def phases(
    config: JobConfig, setups: Mapping[str, RoleSetup], num_rows: int | None = None
) -> list[Phase]:
    """A job's ``score`` phase, and one mini-batch of its ``learn`` phase.

    ``num_rows`` are those of a mini-batch; None: as many as there may be, if all prompts and
    responses are as long as they may be.
    """
    if num_rows is None:
        per_row = config.packing.row_tokens // longest_segment(config)
        num_rows = -(-config.global_batch_size // config.ppo.num_mini_batches // per_row)
    frozen = set(setups) - set(trained_roles(config))
    costs = action_costs(setups, config.packing.row_tokens, frozen)
    made = []
    for name, parts in (("score", config.ppo.num_mini_batches), ("learn", 1)):
        models = (
            PhaseModel(
                role=role,
                plan=setups[role].plan,
                ranks=setups[role].ranks,
                num_microbatches=spread(num_rows * parts, setups[role].plan),
            )
            for role in phase_roles(config, name)
        )
        made.append(
            Phase(
                name=name,
                models=tuple(models),
                train=name == "learn",
                time_shared=getattr(config.placement, name) != "sequential",
                costs=costs,
            )
        )
    return made
