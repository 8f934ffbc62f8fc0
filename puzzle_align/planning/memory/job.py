"""Device memory of a job, estimated in bytes for every rank, by model and phase.

A model's weights stay on the device all the time, and so do a trained model's gradients and
optimizer state, unless the state is in host memory. The largest phase is added to that; its parts
are counted as in ``memory.model``:

- a context that generates: keys and values of the longest sequences in all slots, a prefill batch
  with the rows that every slot group has sent, and the sampling of a whole decode batch;
- contexts that only run forward: for each the hidden states that arrive and leave, and the largest
  workspace. Beside a trained context they run while it keeps little; a context that runs a batch
  ahead in its bubbles also holds its unused inputs;
- trained contexts: the peak activations of the phase's action lists, and the larger workspace; or,
  if that is more, the two pieces of the host's optimizer state that are on the device in a step
  (``optimizer.adamw``).

If a trained model generates under another plan, that copy's weights are added, except parameters
that a rank holds in the same form under both; if the copy is filled beside the optimizer's step, it
counts in that phase, too. A frozen base's copy stays in memory. A phase that runs once, before the
others, holds only its models. Not counted: the sampled tokens and their values, which are kilobytes
per response, and the two buckets of a switch.

The size of NCCL's communicators is computed from its defaults, not measured. A connection has
buffers of 9.2 MiB per channel, for its three protocols (4 MiB, 4.7 MiB, 0.5 MiB); a group for
reductions and gathers has about 24 channels within a node. Transfers between pipeline ranks have
four channels (``groups.world``) and two of the protocols. CUDA's own memory is declared: half a GiB
for its context and kernels, and 32 MiB each for the workspaces of cuBLAS and Transformer Engine on
Hopper. Added to it are the gradients that Transformer Engine returns to autograd in place of those
that it has accumulated itself: one of each shape of weights, which it keeps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from puzzle_align.files.messages import shown
from puzzle_align.layout.groups import CommunicatorCounts, num_communicators
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import (
    ContextPlan,
    JobPlan,
    OptimizerStates,
    Phase,
    Placed,
    Settings,
    sets_of_ranks,
)
from puzzle_align.layout.model import BYTES_PER_PARAMETER, PIECE_SIZE, ModelSpec
from puzzle_align.layout.rank_order import layer_runs
from puzzle_align.layout.rules import Piece, Shape
from puzzle_align.layout.weights import is_moved, layer_parameters
from puzzle_align.planning.memory.model import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    fp8_weight_bytes,
    head_input_bytes,
    hidden_bytes,
    layer_workspace_bytes,
    merged_parameters,
    rank_parameters,
    shared_parameters,
    trained_parameters,
    workspace_bytes,
)
from puzzle_align.planning.prediction import PredictedRun, most_kept
from puzzle_align.schedules.lookahead import most_held

# Per vocabulary entry, with top_p: logits, the same with tokens forbidden, float64 weights (16);
# results of a sort (12), and on CUDA its buffers (32).
SAMPLING_BYTES = 60


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
    """Inputs of a job's memory estimate beside its plan.

    ``runs`` are by phase, for phases with action lists: a pass with the most microbatches, with
    activations in bytes in their costs.
    """

    settings: Settings
    runs: Mapping[str, PredictedRun]
    generation: GenerationSizes | None = None
    cuda: bool = False  # add CUDA's own memory and the communicators'

    @cached_property
    def kept(self) -> Mapping[str, Mapping[str, tuple[float, ...]]]:
        """Peak activations of each pipeline rank, by phase and trained role."""
        return {name: most_kept(run) for name, run in self.runs.items()}


def estimate_memory(plan: JobPlan, inputs: MemoryInputs) -> dict[str, dict[str, int]]:
    """Bytes by ranks and part: models, phases, the peak (``total``).

    Ranks that hold the same share one entry, such as ``0-3``. The plans must divide their models
    (``division_problems``).
    """
    return {_ranks_name(ranks): parts for ranks, parts in _columns(plan, inputs)}


def fits_memory(plan: JobPlan, inputs: MemoryInputs, most: int) -> bool:
    """Whether no rank needs more than ``most`` bytes; stops at the first that does."""
    return all(parts["total"] <= most for _, parts in _columns(plan, inputs))


def _columns(
    plan: JobPlan, inputs: MemoryInputs
) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Ranks that hold the same, and their bytes by part."""
    counts = num_communicators(plan) if inputs.cuda else []
    for ranks in sets_of_ranks(plan.contexts):
        parts = _of_rank(plan, inputs, ranks[0])
        if inputs.cuda:
            total = parts.pop("total")
            most = max(communicator_bytes(counts[rank]) for rank in ranks)
            own = CUDA_BYTES + _returned_gradients(plan, ranks[0])
            parts |= {"CUDA": own, "communicators": most, "total": total + own + most}
        yield ranks, parts


def _returned_gradients(plan: JobPlan, rank: int) -> int:
    """Bytes of the gradients that Transformer Engine keeps to return them to autograd."""
    shapes = {
        (parameter.shape, BYTES_PER_PARAMETER[context.options.dtype])
        for context in plan.trained.values()
        if context.part(rank) is not None
        and context.options.fusions.gradient_accumulation_fusion
        and context.model.lora is None  # else the weights are frozen
        for parameter in layer_parameters(context.model, context.plan.tensor, 0)
        if len(parameter.shape) == 2
    }
    return sum(prod(shape) * element for shape, element in shapes)


def _ranks_name(ranks: Sequence[int]) -> str:
    """Format ranks as ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def ranks_named(name: str, where: str, world_size: int) -> list[int]:
    """Parse ranks in the format of ``estimate_memory``, such as ``0-3,8``.

    Raises:
        ValueError: one line with ``where``, for another format or ranks outside ``world_size``.
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


def _of_rank(plan: JobPlan, inputs: MemoryInputs, rank: int) -> dict[str, int]:
    settings = inputs.settings
    states: dict[str, int] = {}
    for context in plan.residents.values():
        part, lender = context.part(rank), plan.lender(context)
        for name, size in state_bytes(context, part, settings.optimizers, lender).items():
            states[f"{context.role} {name}"] = size
    for context in plan.contexts:
        if kept := _shadow(context, plan, rank).base:
            states[f"{context.role} weights to {context.workload}"] = kept
    phases = {
        phase.name: _phase(phase, inputs, rank)
        + sum(_shadow(context, plan, rank).moved for context in phase.contexts)
        + _merged(plan, phase, rank, settings.merged)
        for phase in plan.phases
    }
    held, total = sum(states.values()), 0
    aside = sum(states[f"{role} {part}"] for role in plan.trained for part in settings.set_aside)
    for phase in plan.phases:
        if settings.overlap_switch:  # the copy is filled after the activations are freed
            phases[phase.name] = max(phases[phase.name], _filled_in(phase, plan, rank))
        samples = any(context.workload == "generate" for context in phase.contexts)
        beside = 0 if phase.once else held - aside * samples
        total = max(total, beside + phases[phase.name])
    return {**states, **phases, "total": total}


def _filled_in(phase: Phase, plan: JobPlan, rank: int) -> int:
    """Bytes of the copies for sampling of models that the phase trains."""
    trained = {context.role for context in phase.contexts if context.workload == "train"}
    sampling = (c for c in plan.contexts if c.workload == "generate" and c.role in trained)
    return sum(_shadow(context, plan, rank).moved for context in sampling)


def state_bytes(
    context: ContextPlan,
    part: int | None,
    optimizers: OptimizerStates,
    lender: ContextPlan | None = None,
) -> dict[str, int]:
    """Bytes of weights and, if trained, gradients and optimizer state; 0 without a ``part``.

    ``lender``: another model in whose memory the base is.
    """
    held = moved = 0
    if part is not None:
        held = rank_parameters(context.model, context.plan, part)
        if lender is not None:
            held -= shared_parameters(context.model, lender.model, context.plan, part)
        moved = trained_parameters(context.model, context.plan, part)
    dtype = context.options.dtype
    trained = context.workload == "train"
    state = {"weights": BYTES_PER_PARAMETER[dtype] * held}
    if part is not None and context.workload != "generate":
        state["weights"] += fp8_weight_bytes(
            context.model, context.plan, context.options, part, trained=trained
        )
    if trained:
        state["gradients"] = GRADIENT_BYTES * moved
        on_device = context.role not in optimizers.on_host
        state["optimizer"] = _optimizer_bytes(context, moved, optimizers) if on_device else 0
    return state


def _optimizer_bytes(context: ContextPlan, parameters: int, optimizers: OptimizerStates) -> int:
    """Bytes of a rank's share of the optimizer state of ``parameters``."""
    shards = context.plan.data if context.role in optimizers.sharded else 1
    precision = "bf16" if context.role in optimizers.small else "fp32"
    return -(-OPTIMIZER_BYTES[context.options.dtype, precision] * parameters // shards)


def _visiting(context: ContextPlan, part: int, optimizers: OptimizerStates) -> int:
    """Most bytes of the host's optimizer state that are on the device in a step."""
    if context.role not in optimizers.on_host:
        return 0
    moved = trained_parameters(context.model, context.plan, part)
    piece = _optimizer_bytes(context, PIECE_SIZE, replace(optimizers, sharded=()))
    return 2 * min(piece, _optimizer_bytes(context, moved, optimizers))


def _merged(plan: JobPlan, phase: Phase, rank: int, roles: Sequence[str]) -> int:
    """Bytes of the weights to which adapters are added while models sample in their own plans."""
    size = 0
    for context in phase.contexts:
        part, is_own = context.part(rank), context.placed == plan.models[context.role].placed
        if context.workload == "generate" and context.role in roles and is_own and part is not None:
            element = BYTES_PER_PARAMETER[context.options.dtype]
            size += element * merged_parameters(context.model, context.plan, part)
    return size


class _Copied(NamedTuple):
    """Sizes of a copy under another plan on a rank, without what it shares with the model."""

    base: int = 0  # of what stays: a frozen base
    moved: int = 0  # of what training moves


def _shadow(context: ContextPlan, plan: JobPlan, rank: int) -> _Copied:
    """Bytes of a trained model's copy under another plan."""
    trained = plan.trained.get(context.role)
    if trained is None or context.placed == trained.placed:
        return _Copied()
    element = BYTES_PER_PARAMETER[context.options.dtype]
    copied = _copied(context.model, trained.placed, context.placed, rank)
    return _Copied(*(element * number for number in copied))


@lru_cache(maxsize=4096)
def _copied(model: ModelSpec, there: Placed, copy: Placed, rank: int) -> _Copied:
    """Numbers of parameters of a copy under another plan."""
    runs = layer_runs(model, there[0], copy[0])
    wanted = _parameters(Holdings(runs.model, runs.after, copy[1]), rank)
    same = _parameters(Holdings(runs.model, runs.before, there[1]), rank)
    own = {True: 0, False: 0}
    for box in wanted - same:
        own[is_moved(model, box[2])] += runs.times(box[2]) * prod(box[0])
    return _Copied(own[False], own[True])


def _parameters(holdings: Holdings, rank: int) -> set[tuple[Shape, tuple[Piece, ...], str]]:
    """Parameters on a rank, each as its shape, its pieces and its first tensor."""
    if rank not in holdings.ranks:
        return set()
    chunks = holdings.parameters(rank)
    return {
        (p.shape, p.pieces, p.tensors[0][0]) for parameters in chunks for p in parameters.values()
    }


def _phase(phase: Phase, inputs: MemoryInputs, rank: int) -> int:
    """Bytes of a phase on a rank beside the states of resident models."""
    here = [(context, context.part(rank)) for context in phase.contexts]
    held = [(context, part) for context, part in here if part is not None]
    generating = [entry for entry in held if entry[0].workload == "generate"]
    if generating:
        assert inputs.generation is not None
        return sum(generation_bytes(*entry, inputs.generation) for entry in generating)
    trained = [entry for entry in held if entry[0].workload == "train"]
    row_tokens = inputs.settings.row_tokens
    kept = max((_kept(*entry, phase, inputs) for entry in trained), default=0)
    passing = 0
    for context, part in held:
        if context.workload == "train":
            continue
        hidden = hidden_bytes(context.model, context.plan, context.options, row_tokens)
        passing += 2 * hidden
        if trained and phase.order == "time_shared":  # unused inputs of the batch ahead
            number = inputs.runs[phase.name].num_microbatches[context.role](0)
            most = most_held(context.plan.pipeline) * context.plan.virtual_pipeline
            kept += min(number, most) * hidden
        if phase.once:
            passing += state_bytes(context, part, OptimizerStates())["weights"]
    workspaces = (  # a forward's is no larger than a backward's
        workspace_bytes(
            context.model,
            context.plan,
            context.options,
            part,
            row_tokens,
            trained=context.workload == "train",
        )
        for context, part in held
    )
    computing = max(kept, passing) + max(workspaces, default=0)
    return max([computing, *(_visiting(*entry, inputs.settings.optimizers) for entry in trained)])


def _kept(context: ContextPlan, part: int, phase: Phase, inputs: MemoryInputs) -> int:
    """Peak activations of rows in flight, by the phase's action lists."""
    kept = int(inputs.kept[phase.name][context.role][part])
    if part < context.plan.pipeline - 1:
        return kept
    values_tokens = context.role == "critic"  # a reward model only the last
    row_tokens = inputs.settings.row_tokens
    return kept + head_input_bytes(
        context.model, context.options, row_tokens, values_tokens=values_tokens
    )


def generation_bytes(context: ContextPlan, part: int, sizes: GenerationSizes) -> int:
    """Bytes of generation on a pipeline rank, beside all models."""
    model, plan, options = context.model, context.plan, context.options
    slots = min(plan.pipeline * sizes.decode_batch_size, sizes.num_sequences)
    longest = sizes.prompt_tokens + sizes.response_tokens
    cache = slots * longest * cache_token_bytes(context, part)
    at_once = min(sizes.decode_batch_size, slots)
    prompts = max(min(sizes.prefill_tokens, at_once * sizes.prompt_tokens), sizes.prompt_tokens)
    is_last = part == plan.pipeline - 1
    # Every slot group's sent rows stay until its next round. The first of several chunks' ranks
    # also receives all groups' rows ahead.
    sent = plan.pipeline * (plan.virtual_pipeline - is_last)
    received = plan.pipeline if part == 0 and plan.virtual_pipeline > 1 else 1
    batch = (max(sent, 1) + received) * hidden_bytes(model, plan, options, prompts)
    batch += layer_workspace_bytes(model, plan, options, prompts)
    sampled = at_once * model.vocab_size * SAMPLING_BYTES if is_last else 0
    return cache + batch + sampled  # decode steps as graphs have a memory pool of their own


def cache_token_bytes(context: ContextPlan, part: int) -> int:
    """Bytes of one token's keys and values on a pipeline rank, all its layers together."""
    model, plan = context.model, context.plan
    keys = model.num_key_value_heads * model.head_dim // plan.tensor
    layers = plan.num_layers_on(part, model.num_hidden_layers)
    return BYTES_PER_PARAMETER[context.options.dtype] * 2 * keys * layers


GROUP_BYTES = int(24 * 9.2 * 2**20)
LINK_BYTES = int(4 * 4.5 * 2**20)  # of a connection to one neighbour, in one direction
CUDA_BYTES = 2**29 + 2 * 2**25


def communicator_bytes(number: CommunicatorCounts) -> int:
    """Bytes of all communicators of a rank."""
    return number.groups * GROUP_BYTES + number.links * LINK_BYTES
