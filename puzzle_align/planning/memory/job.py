"""Device memory of a job, estimated in bytes for every rank, by model and phase.

A model's weights are there all the time, a trained one's gradients and optimizer state beside them,
unless the state is in host memory: what of it visits the device in a step does so when activations
are gone, and is less (``optimizer.adamw``).
To that comes what the largest phase needs, for its time; parts are counted as in
``memory.model``:

- a context that generates: keys and values of the longest sequences in all slots; beside them the
  larger of a prompt batch, and the sampling of a whole decode batch;
- contexts that only run forward: of each the hidden states that arrive and leave, and the largest
  one's workspace. Beside a trained one they run while it keeps little; what runs a batch ahead in
  its bubbles also holds the inputs that it has not come to;
- contexts that are trained: the activations that the phase's own action lists are proven to keep,
  and the larger workspace.

Where a trained model generates under another plan, that copy's weights come on top, but for what a
rank has in the same form under both; filled beside the optimizer's step, it is there then too. A
phase that runs once, before the others, holds its own models alone. Not counted: the sampled tokens
and their numbers, which are kilobytes a response, and the two buckets of a switch.

NCCL's communicators are worked out from its defaults, not measured. A connection has buffers of
9.2 MiB a channel, for its three protocols (4 MiB, 4.7 MiB, 0.5 MiB); a group that reduces and
gathers has about 24 channels within a node. Transfers between pipeline ranks have four channels
(``groups.world``), and two of the protocols.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from puzzle_align.files.messages import shown
from puzzle_align.layout.groups import Communicators, num_communicators
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import ContextPlan, JobPlan, OptimizerStates, Phase, sets_of_ranks
from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rank_order import layer_runs
from puzzle_align.layout.rules import Piece, Shape
from puzzle_align.planning.memory.model import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    fp8_weight_bytes,
    head_input_bytes,
    hidden_bytes,
    layer_workspace_bytes,
    rank_parameters,
    workspace_bytes,
)
from puzzle_align.planning.prediction import PredictedRun
from puzzle_align.schedules.lookahead import most_held

SAMPLING_BYTES = 28  # of a token of the vocabulary: logits, and in float64 what they are sorted by


@dataclass(frozen=True, kw_only=True)
class GenerationSizes:
    """Sizes of the sequences that a replica generates at once."""

    prefill_tokens: int
    decode_batch_size: int  # sequences
    num_sequences: int  # of an iteration and a replica
    prompt_tokens: int  # of the longest prompt
    response_tokens: int  # of the longest response


@dataclass(frozen=True, kw_only=True)
class MemoryInputs:
    """The inputs of a job's memory beside its plan.

    ``runs`` are by name of the phases that have action lists, their costs' activations in bytes;
    ``set_aside`` are the parts of trained models that are not there while responses are sampled;
    ``overlap_switch``: the copy to sample with is filled beside the optimizer's step. ``peaks``
    are, by phase and role, the most activations that each pipeline rank keeps; None: as proven of
    the runs' action lists.
    """

    row_tokens: int
    runs: Mapping[str, PredictedRun]
    peaks: Mapping[str, Mapping[str, tuple[float, ...]]] | None = None
    optimizers: OptimizerStates = field(default_factory=OptimizerStates)
    generation: GenerationSizes | None = None
    set_aside: tuple[str, ...] = ()
    overlap_switch: bool = False


def estimate_memory(plan: JobPlan, inputs: MemoryInputs) -> dict[str, dict[str, int]]:
    """Bytes by ranks (``0-3``: they hold the same) and part: models, phases, the peak (``total``).

    The plans must divide their models (``cut_problems``).
    """
    return {_ranks_name(ranks): parts for ranks, parts in _by_ranks(plan, inputs)}


def fits_memory(plan: JobPlan, inputs: MemoryInputs, most: int) -> bool:
    """Whether no rank needs more than ``most`` bytes: the first that does ends it."""
    return all(parts["total"] <= most for _, parts in _by_ranks(plan, inputs))


def _by_ranks(
    plan: JobPlan, inputs: MemoryInputs
) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    peaks = inputs.peaks
    if peaks is None:
        peaks = {name: run.peak_activations() for name, run in inputs.runs.items()}
    for ranks in sets_of_ranks(plan.contexts):
        yield ranks, _of_rank(plan, inputs, peaks, ranks[0])


def _ranks_name(ranks: Sequence[int]) -> str:
    """``0-3,8``: runs of neighbours."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def ranks_named(name: str, where: str, world_size: int = sys.maxsize) -> list[int]:
    """The ranks, of so many, that ``estimate_memory`` calls ``0-3,8``.

    Raises:
        ValueError: one line with ``where``, if they are named otherwise.
    """
    numbers: list[int] = []
    for run in name.split(","):
        ends = run.split("-")
        ranks = range(0)
        if len(ends) <= 2 and all(end.isdecimal() and len(end) < 10 for end in ends):
            ranks = range(int(ends[0]), int(ends[-1]) + 1)
        if not ranks:
            raise ValueError(
                f"{where}: '{shown(name)}' is not a rank range, such as 0-3,8; make it again"
            )
        if ranks[-1] >= world_size:
            raise ValueError(
                f"{where}: ranks {shown(name)} are not among the {world_size}; make it again"
            )
        numbers += ranks
    return numbers


def _of_rank(
    plan: JobPlan, inputs: MemoryInputs, peaks: Mapping[str, Mapping[str, tuple]], rank: int
) -> dict[str, int]:
    states: dict[str, int] = {}
    for context in plan.residents.values():
        part = context.part(rank)
        for name, size in state_bytes(context, part, inputs.optimizers).items():
            states[f"{context.role} {name}"] = size
    phases = {
        phase.name: _with_shadows(
            plan, phase, rank, _phase(phase, inputs, peaks.get(phase.name, {}), rank)
        )
        for phase in plan.phases
    }
    held, total = sum(states.values()), 0
    aside = sum(states[f"{role} {part}"] for role in plan.trained for part in inputs.set_aside)
    for phase in plan.phases:
        if inputs.overlap_switch:  # the copy is built when the activations are gone
            phases[phase.name] = max(phases[phase.name], _filled_in(phase, plan, rank))
        samples = any(context.workload == "generate" for context in phase.contexts)
        beside = 0 if phase.once else held - aside * samples
        total = max(total, beside + phases[phase.name])
    return {**states, **phases, "total": total}


def _filled_in(phase: Phase, plan: JobPlan, rank: int) -> int:
    """Bytes of the copies to sample with, of models that the phase trains."""
    trained = {context.role for context in phase.contexts if context.workload == "train"}
    sampling = (c for c in plan.contexts if c.workload == "generate" and c.role in trained)
    return sum(_shadow(context, plan, rank)[0] for context in sampling)


def state_bytes(
    context: ContextPlan, part: int | None, optimizers: OptimizerStates
) -> dict[str, int]:
    """Weights; of a trained model also gradients and optimizer state; zeros where it is not."""
    held = 0 if part is None else rank_parameters(context.model, context.plan, part)
    dtype = context.options.dtype
    trained = context.workload == "train"
    state = {"weights": BYTES_PER_PARAMETER[dtype] * held}
    if part is not None and context.workload != "generate":
        state["weights"] += fp8_weight_bytes(
            context.model, context.plan, context.options, part, trained=trained
        )
    if trained:
        shards = context.plan.data if context.role in optimizers.sharded else 1
        number = OPTIMIZER_BYTES[dtype, "bf16" if context.role in optimizers.small else "fp32"]
        state["gradients"] = GRADIENT_BYTES * held
        on_device = context.role not in optimizers.on_host
        state["optimizer"] = -(-number * held // shards) if on_device else 0
    return state


def _with_shadows(plan: JobPlan, phase: Phase, rank: int, work: int) -> int:
    """A phase's ``work`` with the copies that trained models have for it under other plans.

    A copy is built whole; what a rank has under both plans in the same form is then there once.
    """
    copies = [_shadow(context, plan, rank) for context in phase.contexts]
    copied = sum(kept for _, kept in copies)
    return max(sum(built for built, _ in copies), copied + work)


def _shadow(context: ContextPlan, plan: JobPlan, rank: int) -> tuple[int, int]:
    """Bytes of a trained model's copy under another plan: as it is built, and what is its own."""
    trained = plan.trained.get(context.role)
    if trained is None or (context.plan, context.ranks) == (trained.plan, trained.ranks):
        return 0, 0
    element = BYTES_PER_PARAMETER[context.options.dtype]
    places = (trained.plan, trained.ranks), (context.plan, context.ranks)
    built, kept = _copied(context.model, *places, rank)
    return element * built, element * kept


_Placed = tuple[ParallelPlan, tuple[int, ...]]  # a plan, and the ranks that it is on


@lru_cache(maxsize=4096)
def _copied(model: ModelSpec, there: _Placed, copy: _Placed, rank: int) -> tuple[int, int]:
    """Numbers on a rank of a copy under another plan: all, and those not there in the same form."""
    runs = layer_runs(model, there[0], copy[0])
    wanted = _parameters(Holdings(runs.model, runs.after, copy[1]), rank)
    same = _parameters(Holdings(runs.model, runs.before, there[1]), rank)
    sizes = [(box in same, runs.times(box[2]) * prod(box[0])) for box in wanted]
    return sum(size for _, size in sizes), sum(size for is_there, size in sizes if not is_there)


def _parameters(holdings: Holdings, rank: int) -> set[tuple[Shape, tuple[Piece, ...], str]]:
    """The parameters on a rank: their shapes, what they hold, and the first tensor in each."""
    if rank not in holdings.ranks:
        return set()
    chunks = holdings.parameters(rank)
    return {
        (p.shape, p.pieces, p.tensors[0][0]) for parameters in chunks for p in parameters.values()
    }


def _phase(
    phase: Phase, inputs: MemoryInputs, peaks: Mapping[str, tuple[float, ...]], rank: int
) -> int:
    """Bytes of a phase on a rank beside the states of the models that stay."""
    here = [(context, context.part(rank)) for context in phase.contexts]
    held = [(context, part) for context, part in here if part is not None]
    generating = [entry for entry in held if entry[0].workload == "generate"]
    if generating:
        assert inputs.generation is not None
        return sum(generation_bytes(*entry, inputs.generation) for entry in generating)
    trained = [entry for entry in held if entry[0].workload == "train"]
    frozen = [entry for entry in held if entry[0].workload != "train"]
    kept = max((_kept(*entry, inputs, peaks) for entry in trained), default=0)
    passing = sum(2 * _hidden(context, inputs) for context, _ in frozen)
    if trained and phase.order == "time_shared":
        kept += sum(_waiting(context, inputs.runs[phase.name], inputs) for context, _ in frozen)
    if phase.once:
        passing += sum(state_bytes(*entry, OptimizerStates())["weights"] for entry in frozen)
    workspaces = (_workspace(*entry, inputs) for entry in held)
    return max(kept, passing) + max(workspaces, default=0)


def _kept(
    context: ContextPlan, part: int, inputs: MemoryInputs, peaks: Mapping[str, tuple[float, ...]]
) -> int:
    """Activations of the rows under way, as the phase's lists are proven to keep them."""
    kept = int(peaks[context.role][part])
    if part == context.plan.pipeline - 1:
        values_tokens = context.role == "critic"  # at every token; a reward, at the last ones
        kept += head_input_bytes(
            context.model, context.options, inputs.row_tokens, values_tokens=values_tokens
        )
    return kept


def _hidden(context: ContextPlan, inputs: MemoryInputs) -> int:
    return hidden_bytes(context.model, context.plan, context.options, inputs.row_tokens)


def _waiting(context: ContextPlan, run: PredictedRun, inputs: MemoryInputs) -> int:
    """Inputs that a context a batch ahead holds and has not come to."""
    number = run.num_microbatches[context.role](0)
    return min(number, most_held(context.plan.pipeline)) * _hidden(context, inputs)


def _workspace(context: ContextPlan, part: int, inputs: MemoryInputs) -> int:
    """A forward's is no larger than a backward's."""
    return workspace_bytes(context.model, context.plan, context.options, part, inputs.row_tokens)


def generation_bytes(context: ContextPlan, part: int, sizes: GenerationSizes) -> int:
    """Bytes of sampling on a pipeline rank, beside all models."""
    model, plan, options = context.model, context.plan, context.options
    slots = min(plan.pipeline * sizes.decode_batch_size, sizes.num_sequences)
    longest = sizes.prompt_tokens + sizes.response_tokens
    cache = slots * longest * cache_token_bytes(context, part)
    at_once = min(sizes.decode_batch_size, slots)
    prompts = max(min(sizes.prefill_tokens, at_once * sizes.prompt_tokens), sizes.prompt_tokens)
    batch = 2 * hidden_bytes(model, plan, options, prompts)
    batch += layer_workspace_bytes(model, plan, options, prompts)
    is_last = part == plan.pipeline - 1
    sampled = at_once * model.vocab_size * SAMPLING_BYTES if is_last else 0
    return cache + max(batch, sampled)


def cache_token_bytes(context: ContextPlan, part: int) -> int:
    """Bytes of one token's keys and values on a pipeline rank, all its layers together."""
    model, plan = context.model, context.plan
    keys = model.num_key_value_heads * model.head_dim // plan.tensor
    layers = plan.num_layers_on(part, model.num_hidden_layers)
    return BYTES_PER_PARAMETER[context.options.dtype] * 2 * keys * layers


GROUP_BYTES = int(24 * 9.2 * 2**20)
LINK_BYTES = int(4 * 4.5 * 2**20)  # to one neighbour, in one direction


def communicator_bytes(number: Communicators) -> int:
    """Bytes of all communicators of a rank."""
    return number.groups * GROUP_BYTES + number.links * LINK_BYTES


def with_communicators(
    plan: JobPlan, columns: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """``estimate_memory``'s columns with a part more, the largest of the column's ranks."""
    widened = {}
    of_ranks = [communicator_bytes(number) for number in num_communicators(plan)]
    for name, parts in columns.items():
        added = max(of_ranks[rank] for rank in ranks_named(name, "estimate"))
        *others, (_, total) = parts.items()
        widened[name] = {**dict(others), "communicators": added, "total": total + added}
    return widened
