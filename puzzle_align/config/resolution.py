"""Models, plans and ranks of a config, each worked out once.

Read by the checks and by ``config.resolve`` alone: everybody else reads the ``Job``.

Invariants (the tests assert them):
- a path is opened once, so that a folder of checkpoints, in which another run may save any moment,
  stands for one of them;
- an answer that cannot be worked out is a one-line ValueError, the same at every call.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import NamedModel, find_saved, named_model
from puzzle_align.config.roles import (
    fp8_of,
    job_phases,
    optimizer_config,
    reference_loss,
    role_model,
    role_names,
    role_parallel,
    trained_role,
    trained_roles,
)
from puzzle_align.config.saved import Saved
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.config.sections.models import ParallelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.files.messages import shown
from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.flops import balanced_layers
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase, Workload, resolve_order
from puzzle_align.layout.model import ModelOptions, ModelSpec, with_scalar_head
from puzzle_align.layout.plan import MOST_RANKS, ParallelPlan
from puzzle_align.layout.rank_order import ordered_ranks

_RANKS = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")
_SCALAR_ROLES = ("reward", "critic")  # models that give a number in place of logits

P = ParamSpec("P")
R = TypeVar("R")


def _once(
    method: Callable[Concatenate["Resolution", P], R],
) -> Callable[Concatenate["Resolution", P], R]:
    """The method, run once for each of its arguments; a ValueError is kept and raised again."""

    @wraps(method)
    def kept(self: "Resolution", *args: P.args, **kwargs: P.kwargs) -> R:
        key = (method.__name__, *args)
        if key not in self._answers:
            try:
                self._answers[key] = (method(self, *args, **kwargs), None)
            except ValueError as error:
                self._answers[key] = (None, error)
        value, error = self._answers[key]
        if error is not None:
            raise error
        return value

    return kept


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """The model of a role, and where its weights come from.

    Without ``files``, or where they are random, weights are drawn from the job's seed.
    """

    role: str
    key: str  # dotted name of the section that describes it: the actor's, of a reference without
    spec: ModelSpec  # with the head that the role needs
    files: NamedModel | None = None  # a Hugging Face directory, or a model of a checkpoint
    random_weights: bool = False
    optimizer: OptimizerConfig | None = None  # of a role that is trained

    @property
    def path(self) -> str | None:
        """The path of its files."""
        return None if self.files is None else str(self.files.path)

    @property
    def source(self) -> NamedModel | None:
        """The files that its weights are read from; None: they are drawn from the seed."""
        return None if self.random_weights else self.files


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The sizes that the config gives a context, and its ranks where it names any."""

    parallel: ParallelConfig
    key: str  # of the sizes
    own_key: str  # where sizes for this context alone would stand
    ranks: range | None = None
    ranks_key: str = ""


class Resolution:
    """Models, plans and ranks of a config on ``world_size`` ranks."""

    def __init__(self, config: JobConfig, world_size: int = 1) -> None:
        self.config, self.world_size = config, world_size
        self.roles = role_names(config)
        self._answers: dict[Any, Any] = {}
        self._opened: dict[str, Saved | None] = {}

    @_once
    def files(self, role: str) -> NamedModel | None:
        """The files that a role's path names; None where it has no path."""
        model, key = role_model(self.config, role)
        return None if model.path is None else self._named(model.path, key)

    @_once
    def _named(self, path: str, key: str) -> NamedModel:
        return named_model(path, key, self._find)

    def _find(self, path: str, key: str) -> Saved | None:
        if path not in self._opened:
            self._opened[path] = find_saved(path, key)
        return self._opened[path]

    @_once
    def model(self, role: str) -> RoleModel:
        """A role's model, with the head that the role needs.

        Raises:
            ValueError: there is none, or it is not supported; or a reward model is given for a
                policy, or a language model as the reward model of stage ppo, where its head would
                never be trained.
        """
        model, key = role_model(self.config, role)
        files = self.files(role)
        spec = self._spec(role)
        is_trained = role in trained_roles(self.config)
        if role in _SCALAR_ROLES:
            is_read = files is not None and not model.random_weights
            is_reward = "reward" not in trained_roles(self.config) and key == "reward.model"
            if is_reward and is_read and spec.head != "scalar":
                raise ValueError(
                    f"{key}.path: {model.path} is a language model, which has no trained reward "
                    "head; train one with stage=reward and give its checkpoint"
                )
            spec = with_scalar_head(spec)
        elif spec.head != "lm":
            raise ValueError(
                f"{key}: a sequence classifier gives no next-token logits; give a language model"
            )
        return RoleModel(
            role=role,
            key=key,
            spec=spec,
            files=files,
            random_weights=model.random_weights,
            optimizer=optimizer_config(self.config, role) if is_trained else None,
        )

    def _spec(self, role: str) -> ModelSpec:
        """The dimensions of the model at a role's path, else of the inline config."""
        model, key = role_model(self.config, role)
        files = self.files(role)
        if files is not None:
            return files.spec
        if model.config is None:
            raise ValueError(
                f"{key}: no model; set {key}.path to a Hugging Face directory or a checkpoint, or "
                f"give {key}.config"
            )
        return from_hf_config(model.config, f"{key}.config")

    def tokenizer(self) -> TokenizerConfig:
        """The job's tokenizer: as configured, else of the first model that is trained; else bytes.

        That of a checkpoint is its own job's, with the chat template that the job gave it.
        """
        configured, files = self.config.tokenizer, None
        if configured.path is None:
            files = self.files(trained_role(self.config))
        if files is None:
            return configured
        if files.saved is None:
            model, _ = role_model(self.config, trained_role(self.config))
            return replace(configured, path=model.path)
        saved = files.saved.tokenizer
        template = configured.chat_template or saved.get("chat_template")
        return replace(configured, path=saved["path"] or "byte", chat_template=template)

    def parallel(self, role: str, workload: Workload = "train") -> tuple[ParallelConfig, str]:
        """The sizes that the config gives a context, and the dotted key of them."""
        place = self._place(role, workload)
        return place.parallel, place.key

    @_once
    def grid(self, role: str, workload: Workload = "train") -> ParallelPlan:
        """A context's plan on its ranks, without its layers: no model is looked at.

        Raises:
            ValueError: if there are not as many ranks as its sizes multiply to.
        """
        place = self._place(role, workload)
        parallel, ranks = place.parallel, self.ranks(role, workload)
        if place.ranks is not None and place.ranks[-1] >= self.world_size:
            raise ValueError(
                f"{place.ranks_key}: rank {place.ranks[-1]} is not among the job's "
                f"{self.world_size} ranks: start more, or name others"
            )
        grid = plan_on(parallel, len(ranks))
        if grid is not None:
            return grid
        if place.ranks is not None:
            cure = "change the sizes" if place.key == place.own_key else f"give {place.own_key}"
            available = f"the {ranks_of(len(ranks))} of {place.ranks_key}"
            raise ValueError(f"{place.key}: {misfit(parallel, available)}: name others, or {cure}")
        reference_size, available = 0, ranks_of(len(ranks))
        if self.is_concurrent:
            reference_size = _least_ranks(role_parallel(self.config, "reference")[0])
            available += f" ({self.world_size}, less the reference's {reference_size})"
        start = start_what(parallel, reference_size)
        raise ValueError(
            f"{place.key}: {misfit(parallel, available)}: start {start}, or change the sizes"
        )

    @_once
    def ranks(self, role: str, workload: Workload = "train") -> range:
        """The ranks that hold a context.

        All; in stage ppo, those that the config names; in the others, the last ones for a
        concurrent reference, the rest for the policy.
        """
        named = self._place(role, workload).ranks
        if named is not None:
            return named
        if not self.is_concurrent:
            return range(self.world_size)
        reference_size = _least_ranks(role_parallel(self.config, "reference")[0])
        split = max(0, self.world_size - reference_size)
        return range(split, split + reference_size) if role == "reference" else range(split)

    @_once
    def plan(self, role: str) -> ParallelPlan:
        """A role's plan on its ranks, with its model's layers."""
        return self.with_layers(self.grid(role, "train"), role)

    def with_layers(
        self, grid: ParallelPlan, role: str, workload: Workload = "train"
    ) -> ParallelPlan:
        """A grid with the layers of a role's model that the config gives each position."""
        return with_layers(
            grid,
            self.config,
            self._place(role, workload).parallel,
            self.model(role).spec,
            train=workload == "train" and role in trained_roles(self.config),
        )

    def context(self, role: str, workload: Workload, options: ModelOptions) -> ContextPlan:
        """One context of the job; ``options`` are the engine's."""
        plan, ranks = self.plan(role), tuple(self.ranks(role))
        if workload == "generate" and self.samples_elsewhere:
            plan, ranks = self._sampling(Holdings(self.model(role).spec, plan, ranks))
        fp8 = None if options.fp8 is None else fp8_of(self.config, role)
        recompute = role_parallel(self.config, role)[0].recompute
        return ContextPlan(
            role=role,
            workload=workload,
            model=self.model(role).spec,
            options=replace(options, recompute=recompute, fp8=fp8),
            plan=plan,
            ranks=ranks,
        )

    def _sampling(self, trained: Holdings) -> tuple[ParallelPlan, tuple[int, ...]]:
        """The plan that the actor samples under, and its ranks, in the order of least traffic."""
        # Sampling trains nothing: another schedule alone would not make it another plan.
        grid = replace(self.grid("actor", "generate"), schedule=trained.plan.schedule)
        plan = self.with_layers(grid, "actor", "generate")
        return plan, ordered_ranks(trained, plan, tuple(self.ranks("actor", "generate")))

    def job_plan(self, options: ModelOptions) -> JobPlan:
        """Every context of the job on its ranks; ``options`` say how the device computes models.

        Raises:
            ValueError: if a plan does not fit the ranks, or a model is not supported.
        """
        phases = []
        for phase in job_phases(self.config):
            contexts = tuple(self.context(*each, options) for each in phase.contexts)
            order = resolve_order(contexts, share=phase.placement in ("auto", "time_shared"))
            phases.append(Phase(name=phase.name, order=order, contexts=contexts, once=phase.once))
        return JobPlan(stage=self.config.stage, world_size=self.world_size, phases=tuple(phases))

    @property
    def samples_elsewhere(self) -> bool:
        """Whether the config gives sampling a plan, or ranks, of its own."""
        generation = self.config.generation
        return generation.parallel is not None or generation.ranks is not None

    @property
    def is_concurrent(self) -> bool:
        """Whether the reference runs on ranks of its own, beside the policy."""
        wanted = self.config.placement.reference == "concurrent"
        return wanted and concurrency_obstacle(self.config) is None

    def smallest_world_size(self) -> int:
        """The fewest ranks on which all plans can lie, as far as there are any."""
        places = [self._place(role, "train") for role in self.roles]
        if any(phase.name == "generate" for phase in job_phases(self.config)):
            places.append(self._place("actor", "generate"))
        sizes = [_least_ranks(place.parallel) for place in places]
        if STAGES[self.config.stage].ranks_by_role:
            step = math.lcm(
                *(size for size, p in zip(sizes, places, strict=True) if p.ranks is None)
            )
            last = max((p.ranks[-1] + 1 for p in places if p.ranks is not None), default=1)
            return -(-last // step) * step
        return sum(sizes) if self.is_concurrent else math.lcm(*sizes)

    @_once
    def _place(self, role: str, workload: Workload) -> _Place:
        config, key = self.config, f"{role}.parallel"
        parallel, parallel_key = role_parallel(config, role)
        ranks, ranks_key = named_ranks(config, role)
        if workload == "generate" and self.samples_elsewhere:
            key = "generation.parallel"
            if config.generation.parallel is not None:
                parallel, parallel_key = config.generation.parallel, key
            if config.generation.ranks is not None:
                ranks_key = "generation.ranks"
                ranks = parse_ranks(config.generation.ranks, ranks_key)
        return _Place(
            parallel=parallel, key=parallel_key, own_key=key, ranks=ranks, ranks_key=ranks_key
        )


def named_ranks(config: JobConfig, role: str) -> tuple[range | None, str]:
    """The ranks that the config names for a role, None for all; and the dotted key.

    A model under the actor's plan, without ranks of its own, is where the actor is.
    """
    if not STAGES[config.stage].ranks_by_role:
        return None, ""
    section: RoleConfig = getattr(config, role)
    if section.ranks is None and section.parallel is None and role != "actor":
        return named_ranks(config, "actor")
    key = f"{role}.ranks"
    return (None if section.ranks is None else parse_ranks(section.ranks, key)), key


def parse_ranks(text: str, key: str) -> range:
    """The ranks of ``0-3``, or of a single number; ValueError where it is neither."""
    match = _RANKS.fullmatch(text.strip())
    ranks = range(0)
    if match is not None:
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1)
    if not ranks or ranks[-1] >= MOST_RANKS:
        raise ValueError(
            f"{key}: '{shown(text)}' is not a rank range; write the first and the last, as in 0-3 "
            f"(at most {MOST_RANKS} ranks)"
        )
    return ranks


def with_layers(
    plan: ParallelPlan, config: JobConfig, parallel: ParallelConfig, spec: ModelSpec, *, train: bool
) -> ParallelPlan:
    """The plan with the layers that ``parallel.pipeline_layers`` gives each position of ``spec``.

    Layers that do not fit the model stand as they are: ``cut_problems`` finds them.
    """
    wanted, num_layers = parallel.pipeline_layers, spec.num_hidden_layers
    is_even = num_layers % plan.num_positions == 0
    if num_layers < plan.num_positions or (wanted is None and is_even):
        return plan.grid
    if isinstance(wanted, list):
        layers = tuple(wanted)
    else:
        # Attention left to the machine never computes all pairs.
        backend = config.engine.attention
        attention = backend if backend in BACKENDS else "flex"
        options = ModelOptions(attention=attention, recompute=parallel.recompute)
        row_tokens = config.packing.row_tokens
        layers = balanced_layers(spec, plan, options, row_tokens=row_tokens, train=train)
    if is_even and layers == (num_layers // plan.num_positions,) * plan.num_positions:
        return plan.grid
    return replace(plan, pipeline_layers=layers)


def one_replica(parallel: ParallelConfig) -> ParallelPlan:
    """The plan without its data axis, which cuts nothing and may not fit the world."""
    return ParallelPlan(
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        virtual_pipeline=parallel.virtual_pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        schedule=parallel.pipeline_schedule,
    )


def plan_on(parallel: ParallelConfig, num_ranks: int) -> ParallelPlan | None:
    """The plan on all of ``num_ranks`` ranks; None where the sizes do not multiply to them."""
    replica = one_replica(parallel)
    data = parallel.data_parallel_size or max(1, num_ranks // replica.world_size)
    return replace(replica, data=data) if replica.world_size * data == num_ranks else None


def misfit(parallel: ParallelConfig, available: str) -> str:
    """The mismatch between sizes and the ``available`` ranks, for errors."""
    least = _least_ranks(parallel)
    if parallel.data_parallel_size is None:
        return f"P·T = {least} does not divide {available}"
    return f"P·D·T = {least} does not make {available}"


def ranks_of(number: int) -> str:
    """``1 rank``, ``8 ranks``."""
    return f"{number} rank{'s' * (number != 1)}"


def start_what(parallel: ParallelConfig, others: int = 0) -> str:
    """The number of ranks to start for sizes, beside ``others`` of another model, for errors."""
    least = _least_ranks(parallel)
    if parallel.data_parallel_size is None:
        return f"a multiple of {least}" + (f" and {others} more" if others else "")
    return f"{least + others}"


def _least_ranks(parallel: ParallelConfig) -> int:
    """Ranks that a plan takes; one replica where their number is left open."""
    return one_replica(parallel).world_size * (parallel.data_parallel_size or 1)


def concurrency_obstacle(config: JobConfig) -> str | None:
    """Why the reference cannot have ranks of its own; None if it can."""
    if config.reference.parallel is None:
        why = "reference.parallel=null does not say how many ranks it gets"
        return idle_reference(config) or why
    return idle_reference(config)


def idle_reference(config: JobConfig) -> str | None:
    """Why no reference runs while the policy trains; None if it does."""
    phases = job_phases(config)
    phase_of = {role: phase for phase in phases for role, _ in phase.contexts}.get("reference")
    if phase_of is None:
        return f"the loss of stage {config.stage} uses no reference"
    if phase_of.once:
        section = STAGES[config.stage].loss
        return f"{section}.precompute_ref_log_probs=true runs the reference before training"
    loss = reference_loss(config)
    assert loss is not None, "only such a loss has a reference beside training"
    return loss.sequence_reason
