"""Models, plans and ranks of a config, each resolved once.

For the checks, ``config.resolve`` and the planner; other modules read the ``Job``.

Invariant (the tests assert it): each path is opened once, so that a folder of checkpoints, where
another run may save at any moment, always means the same checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from puzzle_align.config.chosen_plan import ChosenPlan, with_plan
from puzzle_align.config.job import JobConfig
from puzzle_align.config.model_path import ModelPaths, NamedModel
from puzzle_align.config.parallel import (
    least_ranks,
    misfit,
    parse_ranks,
    plan_on,
    ranks_of,
    start_what,
    with_layers,
)
from puzzle_align.config.roles import (
    fp8_of,
    job_phases,
    optimizer_config,
    role_lora,
    role_model,
    role_parallel,
    trained_in,
)
from puzzle_align.config.sections.data import TokenizerConfig
from puzzle_align.config.sections.models import LoraConfig, ParallelConfig, RoleConfig
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.config.stages import STAGES
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import (
    ContextPlan,
    JobPlan,
    OptimizerStates,
    Phase,
    Settings,
    Workload,
    resolve_order,
)
from puzzle_align.layout.model import ModelOptions, ModelSpec, with_scalar_head, without_adapters
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import RANKS_PER_NODE, ordered_ranks

_SCALAR_ROLES = ("reward", "critic")  # models with a scalar head in place of logits


@dataclass(frozen=True)
class Engine:
    """The engine section with every ``auto`` decided, and the ranks of a node."""

    device: str  # cpu | cuda
    options: ModelOptions
    ranks_per_node: int = RANKS_PER_NODE
    orders_ranks: bool = True  # whether process groups number their ranks in any order


@dataclass(frozen=True, kw_only=True)
class RoleModel:
    """The model of a role, and the source of its weights.

    Without ``files``, or with ``random_weights``, weights are drawn from the job's seed.
    """

    role: str
    key: str  # dotted name of its section; for a reference without a model: actor.model
    spec: ModelSpec  # with the head that the role needs
    files: NamedModel | None = None  # a Hugging Face directory, or a model of a checkpoint
    random_weights: bool = False
    optimizer: OptimizerConfig | None = None  # of a trained role
    lora: LoraConfig | None = None  # of the adapters in ``spec``, if the config has them

    @property
    def path(self) -> str | None:
        """The path of ``files``, if any; of a checkpoint of adapters, that of their base."""
        return None if self.files is None else self.files.base_path

    @property
    def has_new_head(self) -> bool:
        """Whether the ``source`` is a language model, and the role needs a scalar head."""
        return self.source is not None and self.source.spec.head != self.spec.head

    @property
    def source(self) -> NamedModel | None:
        """The files to read the weights from; None: weights are drawn from the seed."""
        return None if self.random_weights else self.files


@dataclass(frozen=True, kw_only=True)
class Place:
    """A context's parallel sizes and ranks by the config."""

    parallel: ParallelConfig
    key: str  # dotted name of ``parallel``
    own_key: str  # dotted name under which this context alone could get sizes
    ranks: range | None = None  # None: not named
    ranks_key: str = ""


class Resolution:
    """Models, plans and ranks of a job on ``world_size`` ranks."""

    def __init__(
        self,
        config: JobConfig,
        world_size: int = 1,
        engine: Engine | None = None,
        chosen: ChosenPlan | None = None,
        paths: ModelPaths | None = None,
    ) -> None:
        """Resolve phases and roles; open no path yet.

        Args:
            engine: None: not known yet; plans get the default ``ModelOptions``.
            chosen: a plan from a file, in place of the config's.
            paths: models that another resolution has already opened.
        """
        self.config = config if chosen is None else with_plan(config, chosen)
        self.world_size, self.chosen = world_size, chosen
        self.engine = engine or Engine("cpu", ModelOptions())
        self.paths = paths or ModelPaths()
        self.phases = job_phases(self.config)
        self.trained = trained_in(config.stage, self.phases)  # the main role first
        working = (role for phase in self.phases for role, _ in phase.contexts)
        self.roles = tuple(dict.fromkeys([*self.trained, *working]))

    @cached_property
    def _models(self) -> dict[str, RoleModel | ValueError]:
        models: dict[str, RoleModel | ValueError] = {}
        for role in self.roles:
            try:
                models[role] = self._model(role)
            except ValueError as error:
                models[role] = error
        return models

    @property
    def models(self) -> dict[str, RoleModel]:
        """The usable models by role, trained ones first; roles with an error are left out."""
        return {role: made for role, made in self._models.items() if isinstance(made, RoleModel)}

    def model(self, role: str) -> RoleModel:
        """A role's model, with the head that the role needs.

        Raises:
            ValueError: the model is missing or not supported; a reward model is given for a
                policy; or a language model is the reward model of stage ppo, where its head would
                never be trained.
        """
        made = self._models[role]
        if isinstance(made, ValueError):
            raise made
        return made

    def all_models(self) -> Mapping[str, RoleModel]:
        """The models of all roles; a one-line ValueError as from ``model``."""
        return {role: self.model(role) for role in self.roles}

    def _files(self, role: str) -> NamedModel | None:
        model, key = role_model(self.config, role)
        return None if model.path is None else self.paths.model(model.path, key)

    def _model(self, role: str) -> RoleModel:
        model, key = role_model(self.config, role)
        files = self._files(role)
        if files is not None:
            spec = files.spec
        elif model.config is not None:
            spec = from_hf_config(model.config, f"{key}.config")
        else:
            raise ValueError(
                f"{key}: no model; set {key}.path to a Hugging Face directory or a checkpoint, or "
                f"give {key}.config"
            )
        if role in _SCALAR_ROLES:
            is_read = files is not None and not model.random_weights
            is_frozen = role == "reward" and role not in self.trained
            has_head = spec.head == "scalar" or role_lora(self.config, role)[0] is not None
            if is_frozen and is_read and not has_head:
                raise ValueError(
                    f"{key}.path: {model.path} is a language model, which has no trained reward "
                    "head; train one with stage=reward and give its checkpoint"
                )
            spec = with_scalar_head(spec)
        elif spec.head != "lm":
            raise ValueError(
                f"{key}: a sequence classifier gives no next-token logits; give a language model"
            )
        lora, _ = role_lora(self.config, role)
        if lora is not None:
            if spec.lora is not None and lora.path is None and key == f"{role}.model":
                raise ValueError(
                    f"{role}.lora: given, and {files} has adapters, which are trained further; "
                    f"leave it out, or give {key}.path what 'puzzle-align convert --merge' makes "
                    "of it"
                )
            spec = replace(spec, lora=lora.spec)
        elif model.random_weights or getattr(self.config, role).base is not None:
            spec = without_adapters(spec)
        return RoleModel(
            role=role,
            key=key,
            spec=spec,
            files=files,
            random_weights=model.random_weights,
            optimizer=optimizer_config(self.config, role) if role in self.trained else None,
            lora=lora,
        )

    def tokenizer(self) -> TokenizerConfig:
        """The job's tokenizer: the configured one, else the main model's, else bytes.

        A checkpoint brings the tokenizer and chat template of the job that saved it.

        Raises:
            ValueError: one line, if the main model is missing, or its checkpoint names no
                tokenizer.
        """
        configured, role = self.config.tokenizer, self.config.main_role
        files = self._files(role) if configured.path is None else None
        if files is None:
            return configured
        if files.saved is None:
            return replace(configured, path=role_model(self.config, role)[0].path)
        saved = files.saved.tokenizer
        template = configured.chat_template or saved.get("chat_template")
        return replace(configured, path=saved["path"] or "byte", chat_template=template)

    def pinned(self, tokenizer: TokenizerConfig | None = None) -> JobConfig:
        """The config with the resolved paths of checkpoints and tokenizer filled in.

        ``tokenizer`` replaces the job's, for a job whose tokenizer is missing.
        """
        config = replace(self.config, tokenizer=tokenizer or self.tokenizer())
        for model in self.models.values():
            if model.files is not None and model.files.saved is not None:
                config = with_path(config, model.key.partition(".")[0], str(model.files.path))
        return config

    def place(self, role: str, workload: Workload = "train") -> Place:
        """A context's parallel sizes and ranks by the config."""
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
        return Place(
            parallel=parallel, key=parallel_key, own_key=key, ranks=ranks, ranks_key=ranks_key
        )

    def grid(self, role: str, workload: Workload = "train") -> ParallelPlan:
        """A context's plan on its ranks, without pipeline layers; reads no model.

        ValueError if the sizes do not multiply to the number of ranks.
        """
        place = self.place(role, workload)
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
            reference_size = self._reference_size
            available += f" ({self.world_size}, less the reference's {reference_size})"
        start = start_what(parallel, reference_size)
        alone = self.world_size == 1 and not reference_size
        example = ", as dpo_7b_1gpu does for one GPU" if alone else ""
        raise ValueError(
            f"{place.key}: {misfit(parallel, available)}: start {start}, or change the sizes"
            f"{example}"
        )

    def ranks(self, role: str, workload: Workload = "train") -> range:
        """The ranks that hold a context.

        In stage ppo the ranks that the config names. In other stages the last ranks hold a
        concurrent reference, the rest the policy. By default all ranks.
        """
        named = self.place(role, workload).ranks
        if named is not None:
            return named
        if not self.is_concurrent:
            return range(self.world_size)
        split = max(0, self.world_size - self._reference_size)
        return range(split, split + self._reference_size) if role == "reference" else range(split)

    @property
    def _reference_size(self) -> int:
        """Ranks of a concurrent reference."""
        return least_ranks(self.place("reference").parallel)

    def with_layers(
        self, grid: ParallelPlan, role: str, workload: Workload = "train"
    ) -> ParallelPlan:
        """The grid with a role's layers at each pipeline position, as configured."""
        return with_layers(
            grid,
            self.config,
            self.place(role, workload).parallel,
            self.model(role).spec,
            train=workload == "train" and role in self.trained,
        )

    @cached_property
    def plan(self) -> JobPlan:
        """Every context of the job on its ranks: the chosen plan, else the config's.

        ValueError if a plan does not fit the ranks, or a model is not supported.
        """
        if self.chosen is not None:
            return self._on_bases(self.chosen.plan)
        kept = {role: self.context(role) for role in self.roles}
        phases = []
        for phase in self.phases:
            contexts = tuple(
                self._sampling(kept[role])
                if workload == "generate" and self.samples_elsewhere
                else replace(kept[role], workload=workload)
                for role, workload in phase.contexts
            )
            order = resolve_order(contexts, share=phase.placement in ("auto", "time_shared"))
            phases.append(Phase(name=phase.name, order=order, contexts=contexts, once=phase.once))
        return JobPlan(stage=self.config.stage, world_size=self.world_size, phases=tuple(phases))

    def _on_bases(self, plan: JobPlan) -> JobPlan:
        """A plan from a file, with this job's bases, so that no other weights are shared."""
        phases = [
            replace(p, contexts=tuple(replace(c, base=self.base(c.role)) for c in p.contexts))
            for p in plan.phases
        ]
        return replace(plan, phases=tuple(phases))

    def base(self, role: str) -> str | None:
        """Name of the frozen weights that a role's model has, or is built on; None: it has none.

        Roles whose models come from one section have the same; adapters and heads are apart.
        """
        model = self.model(role)
        return model.key if model.spec.lora is not None or role not in self.trained else None

    def context(self, role: str) -> ContextPlan:
        """A role's context on the ranks that hold its weights between phases."""
        options = self.engine.options
        fp8 = None if options.fp8 is None else fp8_of(self.config, role)
        recompute = self.place(role).parallel.recompute
        return ContextPlan(
            role=role,
            workload="train" if role in self.trained else "infer",
            model=self.model(role).spec,
            options=replace(options, recompute=recompute, fp8=fp8),
            plan=self.with_layers(self.grid(role), role),
            ranks=tuple(self.ranks(role)),
            base=self.base(role),
        )

    def _sampling(self, kept: ContextPlan) -> ContextPlan:
        """The actor's sampling context; where groups allow, in the order that sends least."""
        # Sampling ignores the schedule: a different one alone must not count as another plan.
        grid = replace(self.grid("actor", "generate"), schedule=kept.plan.schedule)
        plan = self.with_layers(grid, "actor", "generate")
        ranks = tuple(self.ranks("actor", "generate"))
        if self.engine.orders_ranks:
            source = Holdings(kept.model, kept.plan, kept.ranks)
            ranks = ordered_ranks(source, plan, ranks, self.engine.ranks_per_node)
        return replace(kept, workload="generate", plan=plan, ranks=ranks)

    def settings(self) -> Settings:
        """Settings that decide step time and memory together with the plans."""
        config, generation = self.config, self.config.generation
        optimizers = {role: optimizer_config(config, role) for role in self.trained}
        set_aside: tuple[str, ...] = ()
        if generation.offload_optimizer:
            # On a CPU, optimizer state is in host memory already.
            on_gpu = self.engine.device == "cuda"
            set_aside = ("gradients", "optimizer") if on_gpu else ("gradients",)
        return Settings(
            row_tokens=config.packing.row_tokens,
            optimizers=OptimizerStates(
                sharded=tuple(r for r, o in optimizers.items() if o.use_distributed_optimizer),
                small=tuple(r for r, o in optimizers.items() if o.state_dtype == "bf16"),
                on_host=tuple(r for r, o in optimizers.items() if o.cpu_offload),
            ),
            prefill_tokens=generation.prefill_tokens,
            decode_batch_size=generation.decode_batch_size,
            overlap_switch=generation.overlap_switch,
            set_aside=set_aside,
            merged=self.merged,
        )

    @property
    def merged(self) -> tuple[str, ...]:
        """Roles that sample with their adapters added to their weights, if in their own plan."""
        sampling = any(phase.name == "generate" for phase in self.phases)
        lora, _ = role_lora(self.config, "actor")
        if not sampling or lora is None:
            return ()
        is_exact = self.engine.options.dtype == "fp32"
        corrected = is_exact or self.config.ppo.recompute_log_probs
        return ("actor",) if (corrected if lora.merge is None else lora.merge) else ()

    @property
    def samples_elsewhere(self) -> bool:
        """Whether ``generation`` has a separate plan or ranks for sampling."""
        generation = self.config.generation
        return generation.parallel is not None or generation.ranks is not None

    @property
    def is_concurrent(self) -> bool:
        """Whether the reference runs on separate ranks, beside the policy."""
        wanted = self.config.placement.reference == "concurrent"
        return wanted and self.concurrency_obstacle is None

    @property
    def concurrency_obstacle(self) -> str | None:
        """Why the reference cannot have separate ranks; None if it can."""
        why = self.idle_reference
        if why is None and self.config.reference.parallel is None:
            why = "reference.parallel=null does not say how many ranks it gets"
        return why

    @property
    def idle_reference(self) -> str | None:
        """Why no reference runs concurrently with the policy's training; None if it can."""
        config = self.config
        phase_of = {role: phase for phase in self.phases for role, _ in phase.contexts}
        if "reference" not in phase_of:
            return f"the loss of stage {config.stage} uses no reference"
        if phase_of["reference"].once:
            section = STAGES[config.stage].loss
            return f"{section}.precompute_ref_log_probs=true runs the reference before training"
        loss = config.reference_loss
        return None if loss is None else loss.sequence_reason

    def smallest_world_size(self) -> int:
        """The fewest ranks that all configured plans fit."""
        places = [self.place(role) for role in self.roles]
        if any(phase.name == "generate" for phase in self.phases):
            places.append(self.place("actor", "generate"))
        # A size below 1 is an error that the checks report.
        sizes = [max(1, least_ranks(place.parallel)) for place in places]
        if STAGES[self.config.stage].ranks_by_role:
            step = math.lcm(
                *(size for size, p in zip(sizes, places, strict=True) if p.ranks is None)
            )
            last = max((p.ranks[-1] + 1 for p in places if p.ranks is not None), default=1)
            return -(-last // step) * step
        return sum(sizes) if self.is_concurrent else math.lcm(*sizes)


def named_ranks(config: JobConfig, role: str) -> tuple[range | None, str]:
    """The ranks that the config names for a role (None: all), and their dotted key.

    A role with neither ``ranks`` nor ``parallel`` shares the actor's ranks.
    """
    if not STAGES[config.stage].ranks_by_role:
        return None, ""
    section: RoleConfig = getattr(config, role)
    if section.ranks is None and section.parallel is None and role != "actor":
        return named_ranks(config, "actor")
    key = f"{role}.ranks"
    return (None if section.ranks is None else parse_ranks(section.ranks, key)), key


def with_path(config: JobConfig, role: str, path: str) -> JobConfig:
    """The config with ``<role>.model.path`` replaced."""
    section: RoleConfig = getattr(config, role)
    return replace(config, **{role: replace(section, model=replace(section.model, path=path))})
