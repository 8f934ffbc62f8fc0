"""Evaluation of whole plans: the time of an iteration, and the memory of every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Phase, Settings
from puzzle_align.layout.plan import ParallelPlan, layers_text
from puzzle_align.layout.rank_order import ordered_ranks
from puzzle_align.planning.iteration import PhaseTime
from puzzle_align.planning.memory.job import (
    GenerationSizes,
    MemoryInputs,
    estimate_memory,
    fits_memory,
)
from puzzle_align.planning.search.space import Choice, SamplingChoice, Space


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with its predictions."""

    plan: JobPlan
    settings: Settings
    phases: Mapping[str, PhaseTime]
    memory: Mapping[str, Mapping[str, int]]  # bytes by ranks and part

    @property
    def seconds(self) -> float:
        """Seconds of an iteration."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: seconds; of equally fast plans, the ranks' least work.

        On separate ranks one model may wait for another: its plan then adds no time.
        """
        return self.seconds, sum(phase.busy for phase in self.phases.values())

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank with the most."""
        return max(parts["total"] for parts in self.memory.values())

    @cached_property
    def text(self) -> str:
        """The plan in words: ``actor (P4, D2, T1) V2, samples (P1, D4, T2), batches of 32, ...``.

        Plans with the same text are one plan to a reader.
        """
        parts = []
        number, first = self.plan.world_size, next(iter(self.plan.models.values()))
        for role, context in self.plan.models.items():
            other = context.plan.grid != first.plan.grid or context.ranks != first.ranks
            if context is first or other:
                parts.append(f"{role} {_place_text(context, number)}")
        for phase in self.plan.phases:
            if phase.name == "generate":
                (sampling,) = phase.contexts
                parts.append(f"samples {_place_text(sampling, number)}")
                parts.append(f"batches of {self.settings.decode_batch_size}")
            elif len(phase.contexts) > 1:
                parts.append(f"{phase.name} {phase.order.replace('_', '-')}")
            elif phase.once:
                parts.append("reference before training")
        parts.append(f"rows of {self.settings.row_tokens}")
        recompute = {context.options.recompute for context in self.plan.trained.values()}
        if recompute != {"none"}:
            parts.append(f"recompute {', '.join(sorted(recompute))}")
        return ", ".join(parts)


def _place_text(context: ContextPlan, world_size: int) -> str:
    plan, ranks = context.plan, sorted(context.ranks)
    chunks = f" V{plan.virtual_pipeline}" if plan.virtual_pipeline > 1 else ""
    layers = f" layers {layers_text(plan)}" if plan.pipeline_layers and plan.pipeline <= 8 else ""
    on = "" if len(ranks) == world_size else f" on {ranks[0]}-{ranks[-1]}"
    return f"(P{plan.pipeline}, D{plan.data}, T{plan.tensor}){chunks}{layers}{on}"


class Evaluation:
    """Times and memory of a space's plans; a ``sampling`` of None: without generation."""

    def __init__(self, space: Space) -> None:
        self._space, self._times = space, space.times

    def trained(self, choice: Choice) -> float:
        """Seconds of all phases except generation."""
        phases = self._times.phases(choice.phases, choice.row_tokens)
        return sum(phase.seconds for phase in phases.values())

    def memory(self, choice: Choice, sampling: SamplingChoice | None) -> dict[str, dict[str, int]]:
        """Bytes by ranks and part, as ``estimate_memory`` gives them."""
        return estimate_memory(*self._memory_inputs(choice, sampling))

    def fits(self, choice: Choice, sampling: SamplingChoice | None = None) -> bool:
        """Whether the plan fits in memory; a choice that does not alone fits with no sampling."""
        inputs = self._memory_inputs(choice, sampling)
        return fits_memory(*inputs, self._space.cluster.memory_bytes)

    def _memory_inputs(
        self, choice: Choice, sampling: SamplingChoice | None
    ) -> tuple[JobPlan, MemoryInputs]:
        settings, generation = self._settings(choice, sampling), None
        if sampling is not None:
            context = self._sampling(choice, sampling)
            generation = sampled_at_once(self._space, context.plan, settings)
        inputs = MemoryInputs(
            settings=settings,
            runs={p.name: self._times.fullest(p, choice.row_tokens) for p in choice.phases},
            generation=generation,
            cuda=self._space.measured.profile.hardware.device == "cuda",
        )
        return self._plan(choice, sampling), inputs

    def sampled(self, choice: Choice, sampling: SamplingChoice | None) -> float:
        """Seconds of sampling and a lower bound of the switch to it, together."""
        if sampling is None:
            return 0.0
        context, actor = self._sampling(choice, sampling), choice.context("actor")
        sizes = sampling.prefill_tokens, sampling.decode_batch_size
        return self._times.least_generated(actor, context, *sizes)

    def planned(self, choice: Choice, sampling: SamplingChoice | None) -> Planned:
        """Predict a whole plan: every phase's time, the switch, and every rank's memory."""
        phases: dict[str, PhaseTime] = {}
        if sampling is not None:
            contexts = choice.context("actor"), self._sampling(choice, sampling)
            sizes = sampling.prefill_tokens, sampling.decode_batch_size
            phases = self._times.generate_phases(*contexts, *sizes)
        phases |= self._times.phases(choice.phases, choice.row_tokens)
        return Planned(
            plan=self._plan(choice, sampling),
            settings=self._settings(choice, sampling),
            phases=phases,
            memory=self.memory(choice, sampling),
        )

    def _plan(self, choice: Choice, sampling: SamplingChoice | None) -> JobPlan:
        phases = choice.phases
        if sampling is not None:
            contexts = (self._sampling(choice, sampling),)
            phases = (Phase(name="generate", order="sequential", contexts=contexts), *phases)
        job, number = self._space.job, self._space.cluster.num_ranks
        return JobPlan(stage=job.stage, world_size=number, phases=phases)

    def _sampling(self, choice: Choice, sampling: SamplingChoice) -> ContextPlan:
        """The actor's sampling context; where groups allow, in the order that sends least."""
        trained, plan = choice.context("actor"), sampling.plan
        ranks = tuple(range(plan.world_size))
        if plan.grid == trained.plan.grid and ranks == trained.ranks:
            plan = trained.plan  # nothing moves
        elif self._space.measured.profile.hardware.orders_ranks:
            ranks = _ordered(trained, plan, ranks, self._space.cluster.ranks_per_node)
        recompute = trained.options.recompute
        return self._space.sampling_context(replace(sampling, plan=plan), ranks, recompute)

    def _settings(self, choice: Choice, sampling: SamplingChoice | None) -> Settings:
        settings = replace(self._times.settings, row_tokens=choice.row_tokens)
        if sampling is None:
            return settings
        return replace(
            settings,
            prefill_tokens=sampling.prefill_tokens,
            decode_batch_size=sampling.decode_batch_size,
        )


@lru_cache(maxsize=4096)
def _ordered(
    trained: ContextPlan, plan: ParallelPlan, ranks: tuple[int, ...], ranks_per_node: int
) -> tuple[int, ...]:
    source = Holdings(trained.model, trained.plan, trained.ranks)
    return ordered_ranks(source, plan, ranks, ranks_per_node)


def sampled_at_once(
    space: Space, plan: ParallelPlan, sizes: Settings | SamplingChoice
) -> GenerationSizes:
    """Sizes of the sequences that a replica of the actor generates at once under a plan."""
    load = space.load.generation
    assert load is not None
    return GenerationSizes(
        prefill_tokens=sizes.prefill_tokens,
        decode_batch_size=sizes.decode_batch_size,
        num_sequences=-(-load.num_prompts // plan.data) * load.num_generations,
        prompt_tokens=load.longest_prompt,
        response_tokens=load.longest_response,
    )
