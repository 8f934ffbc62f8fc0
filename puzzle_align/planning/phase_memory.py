"""What stage ppo needs in device memory, estimated in bytes for every rank, by role and phase.

A role's weights are there all the time, a trained one's gradients and optimizer state beside them.
To that comes what the largest phase needs, for its time; parts are counted as in
``planning.memory``:

- ``generate``, on the actor's ranks: keys and values of the longest sequences in all slots; beside
  them the larger of a prompt visit, and the sampling of a whole decode batch;
- ``score``: of every scoring model on the rank the hidden states that arrive and leave; and the
  largest one's workspace;
- ``learn``: the larger of the trained models' activations, since time-sharing keeps no more than
  the models one after the other; and the larger workspace.

Not counted: the sampled tokens and their numbers, which are kilobytes a response.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelOptions, ModelSpec
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    activation_bytes,
    hidden_bytes,
    layer_workspace_bytes,
    rank_parameters,
    workspace_bytes,
)
from puzzle_align.planning.phases import PhaseModel, first_ranks

SAMPLING_BYTES = 28  # of a token of the vocabulary: logits, and in float64 what they are sorted by


@dataclass(frozen=True, kw_only=True)
class PhaseRole(PhaseModel):
    """A role's model with what its memory depends on; ``num_microbatches`` are a mini-batch's."""

    spec: ModelSpec
    options: ModelOptions
    is_trained: bool
    is_scoring: bool  # runs forward in the score phase
    distributed_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class PhaseSizes:
    """Rows, and what a replica of the actor generates at once."""

    row_tokens: int
    prefill_tokens: int
    decode_batch_size: int  # sequences
    num_sequences: int  # of an iteration and a replica
    prompt_tokens: int  # of the longest prompt
    response_tokens: int  # of the longest response


def estimate_phases(roles: Sequence[PhaseRole], sizes: PhaseSizes) -> dict[str, dict[str, int]]:
    """Bytes by ranks (``0-3``: they hold the same) and part: the roles, the phases, the peak.

    The actor is the first of the roles; plans must divide their models (``layout.divisibility``).
    """
    firsts = first_ranks(roles)
    ends = sorted({*firsts, *(role.ranks.stop for role in roles)})
    columns = {}
    for first in firsts:
        last = next(end for end in ends if end > first) - 1
        columns[f"{first}-{last}" if last > first else f"{first}"] = _of_rank(roles, sizes, first)
    return columns


def _of_rank(roles: Sequence[PhaseRole], sizes: PhaseSizes, rank: int) -> dict[str, int]:
    here = {role.role: (role, role.part(rank)) for role in roles}
    held = {name: (role, part) for name, (role, part) in here.items() if part is not None}
    states = {name: _state(*held[name]) if name in held else 0 for name in here}
    actor = roles[0].role
    phases = {
        "generate": _generation(*held[actor], sizes) if actor in held else 0,
        "score": _scoring([own for own in held.values() if own[0].is_scoring], sizes),
        "learn": _learning(held, sizes),
    }
    return {**states, **phases, "total": sum(states.values()) + max(phases.values())}


def _state(role: PhaseRole, part: int) -> int:
    """Weights; of a trained model also gradients and optimizer state."""
    parameters = rank_parameters(role.spec, role.plan, part)
    state = BYTES_PER_PARAMETER[role.options.dtype] * parameters
    if role.is_trained:
        shards = role.plan.data if role.distributed_optimizer else 1
        state += GRADIENT_BYTES * parameters
        state += -(-OPTIMIZER_BYTES[role.options.dtype] * parameters // shards)
    return state


def _generation(actor: PhaseRole, part: int, sizes: PhaseSizes) -> int:
    spec, plan, options = actor.spec, actor.plan, actor.options
    slots = min(plan.pipeline * sizes.decode_batch_size, sizes.num_sequences)
    longest = sizes.prompt_tokens + sizes.response_tokens
    cache = slots * longest * cache_token_bytes(spec, plan, options)
    at_once = min(sizes.decode_batch_size, slots)
    prompts = max(min(sizes.prefill_tokens, at_once * sizes.prompt_tokens), sizes.prompt_tokens)
    visit = 2 * hidden_bytes(spec, plan, options, prompts)
    visit += layer_workspace_bytes(spec, plan, options, prompts)
    is_last = part == plan.pipeline - 1
    sampled = at_once * spec.vocab_size * SAMPLING_BYTES if is_last else 0
    return cache + max(visit, sampled)


def cache_token_bytes(spec: ModelSpec, plan: ParallelPlan, options: ModelOptions) -> int:
    """Bytes of one token's keys and values on a rank, all its layers together."""
    keys = spec.num_key_value_heads * spec.head_dim // plan.tensor
    layers = spec.num_hidden_layers // plan.pipeline
    return BYTES_PER_PARAMETER[options.dtype] * 2 * keys * layers


def _scoring(held: Sequence[tuple[PhaseRole, int]], sizes: PhaseSizes) -> int:
    """Forwards: what one needs is no more than a backward's workspace."""
    rows = sum(
        2 * hidden_bytes(role.spec, role.plan, role.options, sizes.row_tokens) for role, _ in held
    )
    return rows + max((_workspace(*own, sizes) for own in held), default=0)


def _learning(held: Mapping[str, tuple[PhaseRole, int]], sizes: PhaseSizes) -> int:
    trained = [(role, part) for role, part in held.values() if role.is_trained]
    kept = (
        activation_bytes(
            role.spec,
            role.plan,
            role.options,
            part,
            sizes.row_tokens,
            role.num_microbatches,
            values_tokens=role.spec.head == "scalar",
        )
        for role, part in trained
    )
    return max(kept, default=0) + max((_workspace(*own, sizes) for own in trained), default=0)


def _workspace(role: PhaseRole, part: int, sizes: PhaseSizes) -> int:
    return workspace_bytes(role.spec, role.plan, role.options, part, sizes.row_tokens)
