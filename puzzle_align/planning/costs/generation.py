"""Seconds of sampling an iteration's responses, from measured batches.

The pipeline works in rounds (``schedules.generation``): each of P slot groups sends a batch through
it, and a group's next batch waits for the tokens of its last one. So a round takes the longer of
one batch's time through all ranks and the slowest rank's time for the batches of all groups.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import BYTES_PER_PARAMETER
from puzzle_align.planning.costs.measured import BatchTimes, Measured
from puzzle_align.planning.load import GenerationLoad

_TOKEN_BYTES = 16  # a sampled token and its log-probability
_NUM_CONTEXTS = 8  # lengths between prompt and whole response at which a round is timed


def generation_seconds(
    measured: Measured,
    context: ContextPlan,
    load: GenerationLoad,
    *,
    prefill_tokens: int,
    decode_batch_size: int,
) -> float:
    """Seconds of the replica with the most prompts for all its responses.

    All responses are assumed to have the mean length: a slot group's sequences end together, and
    the next ones take their slots. Raises ValueError as ``Measured`` does.
    """
    plan = context.plan
    sequences = ceil(load.num_prompts / plan.data) * load.num_generations
    share = sequences / plan.pipeline
    capacity = min(decode_batch_size, ceil(share))
    whole, rest = divmod(share, capacity)
    seconds = whole * _wave(measured, context, load, capacity, prefill_tokens)
    if rest > 0:
        seconds += _wave(measured, context, load, rest, prefill_tokens)
    return seconds


def _wave(
    measured: Measured,
    context: ContextPlan,
    load: GenerationLoad,
    sequences: float,
    prefill_tokens: int,
) -> float:
    """Seconds of P groups of ``sequences`` each, from their prompts to their last tokens.

    ``sequences`` are a mean over the groups; a batch has one at least.
    """
    sequences = max(1.0, sequences)
    prompts = max(1.0, sequences / load.num_generations)
    tokens = prompts * load.prompt_tokens
    batches = max(1, ceil(tokens / max(prefill_tokens, load.prompt_tokens)))
    each = sequences / batches, tokens / batches
    layers = _layers(context)
    host, transfers = measured.host(context), _transfers(measured, context, each[1], each[0])
    seconds = batches * _round(layers, measured.prefill(context, *each), host, transfers)
    steps = load.response_tokens - 1  # the prefill batch makes the first tokens
    transfers = _transfers(measured, context, sequences, sequences)

    if steps <= 0:
        return seconds
    # Sum over all lengths of the cache, linear between a few of them.
    number = min(_NUM_CONTEXTS, max(2, ceil(steps)))
    lengths = [load.prompt_tokens + steps * place / (number - 1) for place in range(number)]
    batches_at = measured.decode(context, sequences, lengths)
    values = [_round(layers, times, host, transfers) for times in batches_at]
    return seconds + steps * (sum(values) - (values[0] + values[-1]) / 2) / (number - 1)


def _layers(context: ContextPlan) -> list[int]:
    """Number of layers by pipeline rank."""
    plan, number = context.plan, context.model.num_hidden_layers
    return [plan.num_layers_on(part, number) for part in range(plan.pipeline)]


def _round(layers: Sequence[int], times: BatchTimes, host: float, transfers: float) -> float:
    """Seconds in which every group's batch goes through the pipeline once.

    ``layers``: number of them by pipeline rank; ``host``: seconds beside the layers on every rank
    but the last; ``transfers``: a batch's seconds on the links.
    """
    on_ranks = [times.layer * number + host for number in layers]
    on_ranks[-1] += times.rest - host
    return max(sum(on_ranks) + transfers, len(layers) * max(on_ranks))


def _transfers(measured: Measured, context: ContextPlan, tokens: float, sequences: float) -> float:
    """Seconds of a batch's transfers: hidden states from rank to rank, sampled tokens to all."""
    plan, links = context.plan, measured.links
    if plan.pipeline == 1:
        return 0.0
    hidden = BYTES_PER_PARAMETER[context.options.dtype] * context.model.hidden_size * tokens
    pipelines = list(zip(*map(context.ranks_of, range(plan.pipeline)), strict=True))
    at_once = links.at_once(pipelines[0], pipelines)
    # As long as a broadcast:
    seconds = links.all_gather(pipelines[0], _TOKEN_BYTES * sequences, at_once)
    for source, destination in pairwise(range(plan.pipeline)):
        transfer = measured.hidden_transfer(context, source, destination, hidden)
        seconds += plan.virtual_pipeline * transfer
    return seconds
