"""Space of the plans for a job on a cluster: choices for training, and samplings.

A *choice* is the models' placement and order in all phases except generation, with the tokens of a
row. A *sampling* is the actor's plan while it samples, with the sizes of its batches. A plan is any
choice with any sampling on the actor's ranks, or on all.

Choices of stage ppo: all models on all ranks under one grid; or actor and reference on the first
ranks, critic and reward model on the others. Choices of stages dpo and kto: both models under one
grid; the reference under another grid on the same ranks, or on separate ranks; or the reference run
once before the training. Each is tried with even and balanced layers and with every recompute and
row size, and on all ranks with every number of chunks of the first model's grid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from heapq import nsmallest
from math import inf

from puzzle_align.config.roles import PhaseRoles
from puzzle_align.layout.job_plan import (
    ContextPlan,
    Order,
    Phase,
    Settings,
    Workload,
    resolve_order,
)
from puzzle_align.layout.model import ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan, division_problems, divisors
from puzzle_align.planning.iteration import Times
from puzzle_align.planning.load import Load

CHUNKS = (1, 2, 4)
_LARGEST_SPLIT = 8  # ranks are split between models by eighths
NUM_BESIDE = 3  # plans of the second models tried on separate ranks, for each grid of the first
_FOLLOWS = {"reference": "actor", "reward": "critic"}  # the trained model that it is placed with


@dataclass(frozen=True, kw_only=True)
class JobToPlan:
    """A job to plan for, without its ranks.

    ``phases`` are an iteration's with every model in it; ``before``, if not empty, are the phases
    if the reference runs once before the training. ``models`` are by role.
    """

    stage: str
    trained: tuple[str, ...]
    phases: tuple[PhaseRoles, ...]
    models: Mapping[str, ModelSpec]
    options: ModelOptions
    settings: Settings
    before: tuple[PhaseRoles, ...] = ()
    bases: Mapping[str, str | None] = field(default_factory=dict)  # by role: ``ContextPlan.base``
    sequence_parallel: bool = False
    ranks_by_role: bool = False

    @property
    def samples(self) -> bool:
        """Whether the job generates responses."""
        return any(phase.name == "generate" for phase in self.phases)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Ranks, and the bytes of each that the job may use (without the margin)."""

    num_ranks: int
    ranks_per_node: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All phases except generation, and the tokens of their rows."""

    phases: tuple[Phase, ...]
    row_tokens: int
    mode: str  # of placement: colocated, before, apart, another grid

    def context(self, role: str) -> ContextPlan:
        """A role's context on the ranks that keep its weights."""
        contexts = [c for phase in self.phases for c in phase.contexts if c.role == role]
        return next((c for c in contexts if c.workload == "train"), contexts[0])


@dataclass(frozen=True, kw_only=True)
class Group:
    """Choices under one place of the first models, made when they are needed.

    No choice's phases without generation take less than ``seconds``.
    """

    seconds: float
    num_ranks: int  # of the first models
    choices: Callable[[], Iterator[Choice]]


@dataclass(frozen=True, kw_only=True)
class SamplingChoice:
    """The actor's plan while it samples, on the first ranks, and the sizes of its batches."""

    plan: ParallelPlan
    prefill_tokens: int
    decode_batch_size: int


@dataclass(frozen=True)
class _Place:
    """A model's place: a grid, on ranks from ``first`` on."""

    grid: ParallelPlan
    first: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.first + self.grid.world_size))


def _wanted_rows(load: Load) -> str:
    """Rows that a profile should have, for an error."""
    fixed, least = load.fixed_row_tokens, load.least_row_tokens
    if fixed is not None:
        return f"and the job's rows, packed beforehand, have {fixed}: profile with --tokens {fixed}"
    return (
        f"and an example, as long as data.max_length allows, needs {least}: profile with --tokens "
        f"{least} or more, or lower data.max_length"
    )


class Space:
    """All plans of a job on a cluster for which the profile has measurements."""

    def __init__(self, job: JobToPlan, cluster: Cluster, times: Times) -> None:
        """Raise ValueError if a model was not measured, or no row size holds the data."""
        measured, load = times.measured, times.load
        self.job, self.cluster, self.times = job, cluster, times
        self.measured, self.load = measured, load
        self.context = cache(self._context)
        self.plans_on = cache(self._plans_on)
        roles = job.models
        sizes = [measured.row_sizes(model) for model in roles.values()]
        self.row_sizes = [*filter(load.allows_rows_of, sorted(set.intersection(*sizes)))]
        if not self.row_sizes:
            profiled = ", ".join(map(str, sorted(set.union(*sizes))))
            raise ValueError(f"the profile has rows of {profiled} tokens, {_wanted_rows(load)}")
        kinds = [measured.recomputes(roles[role]) for role in job.trained]
        self.recomputes = sorted(set.intersection(*kinds), key=("none", "selective", "full").index)

    def groups(self) -> Iterator[Group]:
        """Every choice, for every row size and recompute, in groups."""
        for row_tokens in self.row_sizes:
            for recompute in self.recomputes:
                make = _Maker(self, row_tokens, recompute)
                yield from self._on_all(make)
                yield from self._apart(make)

    def choices(self) -> Iterator[Choice]:
        """Every choice."""
        for group in self.groups():
            yield from group.choices()

    def samplings(self, num_ranks: int) -> list[SamplingChoice]:
        """Every sampling on ``num_ranks``; none for a job that does not sample."""
        load = self.load.generation
        if load is None:
            return []
        model, settings = self.job.models["actor"], self.job.settings
        profiled = self.measured.profile.of(model)
        prompts = sorted({settings.prefill_tokens, *(point.tokens for point in profiled.prefill)})
        samplings = []
        for grid in self.grids(num_ranks, ["actor"], chunks=(1,), most_data=load.num_prompts):
            plan = self._even(grid, model)
            each = -(-load.num_prompts // grid.data) * load.num_generations
            share = -(-each // grid.pipeline)
            sizes = {min(share, point.sequences) for point in self.measured.decode_points(model)}
            powers = (2**n for n in range(max(sizes).bit_length()))
            sizes |= {size for size in powers if size < share}
            samplings += [
                SamplingChoice(plan=plan, prefill_tokens=tokens, decode_batch_size=size)
                for size in sorted(sizes)
                for tokens in prompts
            ]
        return samplings

    def sampling_context(
        self, sampling: SamplingChoice, ranks: tuple[int, ...], recompute: str = "none"
    ) -> ContextPlan:
        """The actor's context while it samples, on ranks in the plan's order.

        ``recompute`` is the training's: it has no effect here, but a model has one value of it.
        """
        return self.context("actor", "generate", sampling.plan, ranks, recompute)

    def grids(
        self,
        num_ranks: int,
        roles: Sequence[str],
        *,
        chunks: Sequence[int] = CHUNKS,
        most_data: int | None = None,
    ) -> Iterator[ParallelPlan]:
        """Every grid on ``num_ranks`` that fits the models of ``roles``."""
        models = [self.job.models[role] for role in roles]
        measured = set.intersection(*(self.measured.tensor_sizes(m) for m in models))
        least_layers = min(model.num_hidden_layers for model in models)
        most = most_data or max(1, self.load.num_examples // self.load.mini_batches)
        for tensor in sorted(measured):
            if tensor > self.cluster.ranks_per_node or num_ranks % tensor:
                continue
            alone = ParallelPlan(tensor=tensor)
            if any(any(division_problems(model, alone, "", "")) for model in models):
                continue
            for pipeline in divisors(num_ranks // tensor):
                data = num_ranks // tensor // pipeline
                for number in chunks if pipeline > 1 else (1,):
                    if pipeline * number <= least_layers and data <= most:
                        yield ParallelPlan(
                            pipeline=pipeline,
                            data=data,
                            tensor=tensor,
                            virtual_pipeline=number,
                            sequence_parallel=self.job.sequence_parallel and tensor > 1,
                        )

    def _on_all(self, make: "_Maker") -> Iterator[Group]:
        """Groups with all models on all ranks, for every grid of the first model."""
        number, roles = self.cluster.num_ranks, list(self.job.models)
        shared = set(self.grids(number, roles))
        if self.job.ranks_by_role or "reference" not in self.job.models:
            first, others = roles, []
        else:
            first, others = ["actor"], list(self.grids(number, ["reference"], chunks=(1,)))
        for grid in self.grids(number, first):
            yield Group(
                seconds=make.least_seconds(grid, first),
                num_ranks=number,
                choices=partial(self._under, make, grid, grid in shared, others),
            )

    def _under(
        self, make: "_Maker", grid: ParallelPlan, shared: bool, others: Sequence[ParallelPlan]
    ) -> Iterator[Choice]:
        """Choices with the first model under a grid: the others too, or the reference not."""
        if shared:
            places = {role: _Place(grid, 0) for role in self.job.models}
            yield from make(self.job.phases, places, "colocated")
            if self.job.before:
                yield from make(self.job.before, places, "before")
        for other in others:
            if other != grid:
                places = {"actor": _Place(grid, 0), "reference": _Place(other, 0)}
                yield from make(self.job.phases, places, "another grid")

    def _apart(self, make: "_Maker") -> Iterator[Group]:
        """Groups with models on separate ranks: for stage ppo the critic, else the reference.

        Each grid of the first models is combined with the fastest grids of the second ones.
        """
        one, other = self._sides()
        number = self.cluster.num_ranks if other else 0
        for first in self._splits(number):
            beside_them = partial(self.grids, number - first, other, chunks=(1,))
            fastest = cache(partial(make.fastest, beside_them, other))
            for grid in self.grids(first, one, chunks=(1,)):
                yield Group(
                    seconds=make.least_seconds(grid, one),
                    num_ranks=first,
                    choices=partial(self._beside, make, grid, fastest),
                )

    def _splits(self, number: int) -> list[int]:
        """Numbers of ranks for the first models: eighths of all, and those in whole nodes."""
        eighths = range(unit := max(1, number // _LARGEST_SPLIT), number, unit)
        node = self.cluster.ranks_per_node
        whole = {round(first / node) * node for first in eighths}
        return sorted({*eighths, *(first for first in whole if 0 < first < number)})

    def _beside(
        self, make: "_Maker", grid: ParallelPlan, fastest: Callable[[], list[ParallelPlan]]
    ) -> Iterator[Choice]:
        one, other = self._sides()
        for beside in fastest():
            places = {role: _Place(grid, 0) for role in one}
            places |= {role: _Place(beside, grid.world_size) for role in other}
            yield from make(self.job.phases, places, "apart")

    def _sides(self) -> tuple[list[str], list[str]]:
        """Roles of the first and of the second ranks if models are separated; may be empty."""
        leads = self.job.trained if self.job.ranks_by_role else tuple(self.job.models)
        sides: dict[str, list[str]] = {role: [] for role in leads}
        for role in self.job.models:
            lead = role if role in sides else _FOLLOWS[role]
            sides[lead if lead in sides else leads[0]].append(role)
        one, *others = sides.values()
        return one, others[0] if others else []

    def _even(self, grid: ParallelPlan, model: ModelSpec) -> ParallelPlan:
        """The grid with even layers; balanced by count if they do not divide evenly."""
        each, left = divmod(model.num_hidden_layers, grid.num_positions)
        if left == 0:
            return grid
        layers = [each + (number < left) for number in range(grid.num_positions)]
        return replace(grid, pipeline_layers=tuple(layers))

    def _plans_on(
        self, role: str, grid: ParallelPlan, row_tokens: int, recompute: str
    ) -> tuple[ParallelPlan | None, ParallelPlan]:
        """A role's plan with even layers (None if they do not divide), and with balanced layers."""
        workload: Workload = "train" if role in self.job.trained else "infer"
        context = self.context(role, workload, grid, tuple(range(grid.world_size)), recompute)
        load = self.load.rows(row_tokens, self.load.mini_batches, grid)
        layers = self.measured.balanced_layers(context, load.row)
        even = None if context.model.num_hidden_layers % grid.num_positions else grid
        balanced = even is not None and len(set(layers)) == 1
        return even, grid if balanced else replace(grid, pipeline_layers=layers)

    def _context(
        self,
        role: str,
        workload: Workload,
        plan: ParallelPlan,
        ranks: tuple[int, ...],
        recompute: str,
    ) -> ContextPlan:
        """A role's context; the same object for the same arguments."""
        return ContextPlan(
            role=role,
            workload=workload,
            model=self.job.models[role],
            options=replace(self.job.options, recompute=recompute),
            plan=plan,
            ranks=ranks,
            base=self.job.bases.get(role),
        )


class _Maker:
    """Maker of choices of one row size and recompute."""

    def __init__(self, space: Space, row_tokens: int, recompute: str) -> None:
        self._space, self._row_tokens, self._recompute = space, row_tokens, recompute

    def __call__(
        self, phases: Sequence[PhaseRoles], places: Mapping[str, _Place], mode: str
    ) -> Iterator[Choice]:
        """Make a choice with even layers, if they divide, and one with balanced layers."""
        grids = [place.grid for place in places.values()]
        if any(self._row_tokens % grid.sequence_shards for grid in grids):
            return
        plans = {
            role: self._space.plans_on(role, place.grid, self._row_tokens, self._recompute)
            for role, place in places.items()
        }
        even = {role: plan for role, (plan, _) in plans.items() if plan is not None}
        balanced = {role: plan for role, (_, plan) in plans.items()}
        if len(even) == len(places):
            yield self._choice(phases, places, even, mode)
        if even != balanced:
            yield self._choice(phases, places, balanced, mode)

    def least_seconds(self, grid: ParallelPlan, roles: Sequence[str]) -> float:
        """Lower bound of the phases' seconds with these roles alone, without generation."""
        phases = [
            replace(p, contexts=tuple(c for c in p.contexts if c[0] in roles))
            for p in self._space.job.phases
        ]
        working = [phase for phase in phases if phase.contexts]
        made = self(working, {role: _Place(grid, 0) for role in roles}, "")
        times = self._space.times
        bounds = (times.least_seconds(choice.phases, self._row_tokens) for choice in made)
        return min(bounds, default=inf)

    def fastest(
        self, grids: Callable[[], Iterator[ParallelPlan]], roles: Sequence[str]
    ) -> list[ParallelPlan]:
        """The fastest grids for these roles alone, by lower bounds."""
        return nsmallest(NUM_BESIDE, grids(), key=partial(self.least_seconds, roles=roles))

    def _choice(
        self,
        phases: Sequence[PhaseRoles],
        places: Mapping[str, _Place],
        plans: Mapping[str, ParallelPlan],
        mode: str,
    ) -> Choice:
        made = []
        for phase in phases:
            if phase.name == "generate":
                continue
            contexts = tuple(
                self._space.context(
                    role, workload, plans[role], places[role].ranks, self._recompute
                )
                for role, workload in phase.contexts
            )
            order: Order = resolve_order(contexts, share=True)
            made.append(Phase(name=phase.name, order=order, contexts=contexts, once=phase.once))
        return Choice(phases=tuple(made), row_tokens=self._row_tokens, mode=mode)
