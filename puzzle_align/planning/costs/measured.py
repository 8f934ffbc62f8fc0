"""Seconds of contexts' work from a profile's measured points, by which plans are chosen.

Times are interpolated between points (``interpolate``); beyond them they are extrapolated and
listed in ``Measured.beyond``; at a measured point no formula is used. The communication of tensor
ranks is added to a shard's times (Megatron's: a layer's forward and backward all-reduce hidden
states twice each, full recompute repeats the forward's two; under sequence parallelism an
all-reduce is a reduce-scatter and an all-gather).
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property

from puzzle_align.layout.attention import BACKENDS
from puzzle_align.layout.flops import balance
from puzzle_align.layout.job_plan import ContextPlan
from puzzle_align.layout.model import BYTES_PER_PARAMETER, ModelSpec, padded_vocab_size
from puzzle_align.planning.costs.interpolate import Estimate, Line, Sheet
from puzzle_align.planning.costs.links import FastestLinks, LinkCosts
from puzzle_align.planning.costs.profile import DecodePoint, ModelProfile, Profile, Time, model_text
from puzzle_align.planning.memory.model import (
    GRADIENT_BYTES,
    hidden_bytes,
    layer_kept_bytes,
    merged_parameters,
    trained_parameters,
)
from puzzle_align.schedules.costs import ModelCosts
from puzzle_align.schedules.timing import TransferTime

_NANOSECONDS = 1e9
_SYNC_BYTES = 4096  # of the few numbers that ranks all-reduce at a step's end


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Mean contents of the data's microbatches."""

    row_tokens: int
    pairs: float  # (query, key) pairs of prompts and responses that attention computes
    predictions: float  # tokens that are predicted, or valued
    padding_pairs: float = 0.0  # pairs of padding, which some backends skip


@dataclass(frozen=True, kw_only=True)
class RowTimes:
    """Seconds of a row on one tensor rank: in a layer, and at the pipeline's ends."""

    layer: float
    layer_backward: float
    embedding: float
    embedding_backward: float
    head: float
    head_backward: float
    kept_bytes: float  # of a layer, from forward to backward


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Seconds of a generation batch on one tensor rank: of one layer, and of all else."""

    layer: float
    rest: float


class Measured:
    """Times of contexts under plans, from one profile."""

    def __init__(self, profile: Profile, ranks_per_node: int | None = None) -> None:
        """``ranks_per_node``: of the cluster to plan for; None: of the profiled machine."""
        self.profile = profile
        self.links = LinkCosts(profile.links, ranks_per_node or profile.hardware.ranks_per_node)
        self._beyond: set[str] = set()
        self._sheet = cache(self._make_sheet)
        self._tensor_groups = cache(self._groups_by_place)
        self._shard_row = cache(self._measured_row)
        self._shard_batch = cache(self._measured_batch)

    @cached_property
    def on_fastest_links(self) -> "Measured":
        """These times with every message on the fastest links: lower bounds for all placements."""
        other = copy(self)
        other.links = FastestLinks(self.profile.links, self.links.ranks_per_node)
        return other

    @property
    def beyond(self) -> list[str]:
        """Readable lines on sizes beyond the measured points."""
        return sorted(self._beyond | self.links.beyond)

    def tensor_sizes(self, model: ModelSpec) -> set[int]:
        """Measured tensor sizes of a model."""
        return {point.tensor for point in self.profile.of(model).rows}

    def recomputes(self, model: ModelSpec) -> set[str]:
        """Measured kinds of recompute."""
        return {point.recompute for point in self.profile.of(model).rows}

    def row_sizes(self, model: ModelSpec) -> set[int]:
        """Tokens of the measured rows."""
        return {point.row_tokens for point in self.profile.of(model).rows}

    def row(self, context: ContextPlan, row: RowShape, *, train: bool) -> RowTimes:
        """A row's times on a rank of the context, with communication among tensor ranks.

        Raises ValueError if the model, its tensor size or its recompute was not measured.
        """
        kind = context.options.recompute if train else "none"
        if not BACKENDS[context.options.attention].skips_padding:
            row = replace(row, pairs=row.pairs + row.padding_pairs, padding_pairs=0.0)
        costs = self._shard_row(context.model, context.plan.tensor, kind, row, train)
        reduction = self._tensor_reduction(context, row.row_tokens)
        again = 2 * reduction if kind == "full" else 0.0
        is_lm = context.model.head == "lm"
        kept = costs.kept_bytes
        if train and context.plan.sequence_parallel:
            kept -= _sequence_parallel_saving(context, row.row_tokens)
        return RowTimes(
            layer=costs.layer + 2 * reduction,
            layer_backward=costs.layer_backward + 2 * reduction + again if train else 0.0,
            embedding=costs.embedding + reduction,
            embedding_backward=costs.embedding_backward,
            head=costs.head + self._head_transfers(context, row),
            head_backward=costs.head_backward + reduction * is_lm if train else 0.0,
            kept_bytes=kept,
        )

    def _measured_row(
        self, model: ModelSpec, tensor: int, kind: str, row: RowShape, train: bool
    ) -> RowTimes:
        """Seconds on one tensor rank, without communication."""
        each, predicted = row.pairs / row.row_tokens, row.predictions / row.row_tokens

        def layer(name: str) -> float:
            return self._at("rows", (model, tensor, kind), name, row.row_tokens, each)

        def end(name: str) -> float:
            return self._at("ends", (model, tensor), name, row.row_tokens, predicted)

        prefix = "train_" if train else ""
        return RowTimes(
            layer=layer(f"{prefix}forward"),
            layer_backward=layer("backward") if train else 0.0,
            embedding=end("embedding_forward"),
            embedding_backward=end("embedding_backward") if train else 0.0,
            head=end(f"head_{prefix}forward"),
            head_backward=end("head_backward") if train else 0.0,
            kept_bytes=layer("kept_bytes") if train else 0.0,
        )

    def prepare(self, context: ContextPlan, row: RowShape) -> float:
        """Seconds of a rank to prepare a row's tensors, before any action."""
        ends = context.model, context.plan.tensor
        return self._at("ends", ends, "prepare", row.row_tokens, row.predictions / row.row_tokens)

    def action_costs(self, context: ContextPlan, row: RowShape) -> ModelCosts:
        """Costs of the context's actions: seconds by virtual position, and bytes kept."""
        plan, model, train = context.plan, context.model, context.workload == "train"
        times = self.row(context, row, train=train)
        positions = range(plan.num_positions)
        layers = [len(plan.layers_of(position, model.num_hidden_layers)) for position in positions]
        forward = [number * times.layer for number in layers]
        forward[0] += times.embedding
        forward[-1] += times.head
        if not train:
            return ModelCosts(tuple(forward))
        backward = [number * times.layer_backward for number in layers]
        backward[0] += times.embedding_backward
        backward[-1] += times.head_backward
        hidden = hidden_bytes(model, plan, context.options, row.row_tokens)
        kept = tuple(number * times.kept_bytes + hidden for number in layers)
        return ModelCosts(tuple(forward), tuple(backward), kept)

    def balanced_layers(self, context: ContextPlan, row: RowShape) -> tuple[int, ...]:
        """Layers by virtual position that balance the measured times."""
        train = context.workload == "train"
        times = self.row(context, row, train=train)
        layer, head = times.layer + times.layer_backward, times.head + times.head_backward
        plan = context.plan
        units = (max(1, round(seconds * _NANOSECONDS)) for seconds in (layer, head))
        number = context.model.num_hidden_layers
        return balance(number, plan.pipeline, plan.virtual_pipeline, *units)

    def transfer(self, contexts: Sequence[ContextPlan], row: RowShape) -> TransferTime:
        """Transfer time of a row's hidden states between pipeline ranks, by role."""
        by_role = {
            context.role: (
                context,
                hidden_bytes(context.model, context.plan, context.options, row.row_tokens),
            )
            for context in contexts
        }

        @cache
        def seconds(role: str, source: int, destination: int) -> float:
            context, size = by_role[role]
            return self.hidden_transfer(context, source, destination, size)

        return seconds

    def hidden_transfer(
        self, context: ContextPlan, source: int, destination: int, size: float
    ) -> float:
        """Seconds of ``size`` bytes from a pipeline rank to another, in the slowest pipeline.

        All pipelines send at once.
        """
        pairs = tuple(zip(context.ranks_of(source), context.ranks_of(destination), strict=True))
        return max(
            self.links.p2p(pair[0], pair[1], size, at_once)
            for pair, at_once in self.links.by_place(pairs)
        )

    def reduce_gradients(self, context: ContextPlan, *, sharded: bool) -> float:
        """Seconds of reducing gradients over replicas (and tied embeddings) after the backwards.

        ``sharded``: the distributed optimizer's reduce-scatter, and its all-gather of weights.
        """
        return max(self._reduce(context, part, sharded) for part in range(context.plan.pipeline))

    def optimizer_step(self, context: ContextPlan, *, sharded: bool) -> float:
        """Seconds of an optimizer step on the rank with the most parameters."""
        plan, model = context.plan, context.model
        held = max(trained_parameters(model, plan, part) for part in range(plan.pipeline))
        updated = held / plan.data if sharded else held
        points = self.profile.of(model).optimizer
        if not points:
            raise ValueError(
                f"the profile has no optimizer step of a {model_text(model)}: profile it where it "
                "is trained"
            )
        step = Line((p.parameters, p.step.median) for p in points).at(updated)
        # All ranks all-reduce the gradient norm and whether it is finite.
        return step.value + 2 * self.links.all_reduce(context.ranks, _SYNC_BYTES, 1)

    def decode_points(self, model: ModelSpec) -> Sequence[DecodePoint]:
        """Measured decode steps of a model; ValueError if there are none."""
        points = self.profile.of(model).decode
        if not points:
            raise ValueError(
                f"the profile has no generation of a {model_text(model)}: profile this job"
            )
        return points

    def merge(self, context: ContextPlan) -> float:
        """Seconds of adding adapters to a copy of the weights, on the rank with the most."""
        plan, model = context.plan, context.model
        points = self.profile.of(model).merge
        if not points:
            raise ValueError(
                f"the profile has no merging of a {model_text(model)}: profile this job"
            )
        held = max(merged_parameters(model, plan, part) for part in range(plan.pipeline))
        return Line((p.parameters, p.time.median) for p in points).at(held).value

    def prefill(self, context: ContextPlan, sequences: float, tokens: float) -> BatchTimes:
        """Times of a prefill batch; ``tokens`` are those of all its prompts together."""
        (seconds,) = self._batches("prefill", context, sequences, tokens, [sequences / tokens])
        return seconds

    def decode(
        self, context: ContextPlan, sequences: float, lengths: Sequence[float]
    ) -> list[BatchTimes]:
        """Times of a decode batch for each of ``lengths``, the tokens per sequence in the cache."""
        return self._batches("decode", context, sequences, sequences, lengths)

    def _batches(
        self, kind: str, context: ContextPlan, sequences: float, size: float, each: Sequence[float]
    ) -> list[BatchTimes]:
        """Times of batches of one size that differ in the work per unit of it (``each``)."""
        reduction = self._tensor_reduction(context, size)
        logits_transfer = self._logits_transfer(context, sequences)
        model, tensor = context.model, context.plan.tensor
        points = (self._shard_batch(kind, model, tensor, size, one) for one in each)
        return [
            BatchTimes(layer=layer + 2 * reduction, rest=rest + reduction + logits_transfer)
            for layer, rest in points
        ]

    def _measured_batch(
        self, kind: str, model: ModelSpec, tensor: int, size: float, each: float
    ) -> tuple[float, float]:
        """Seconds of a layer, and of the rest, on one tensor rank without communication."""
        layer, rest = (
            self._at(kind, (model, tensor), name, size, each) for name in ("layer", "rest")
        )
        return layer, rest

    def host(self, context: ContextPlan) -> float:
        """Seconds of every pipeline rank's host for a generation batch.

        Estimated as the time beside the layers of the smallest batch, which is mostly the host's.
        """
        points = self.decode_points(context.model)
        fewest = min(p.sequences for p in points)
        return min(p.rest.median for p in points if p.sequences == fewest)

    def _reduce(self, context: ContextPlan, part: int, sharded: bool) -> float:
        plan, model = context.plan, context.model
        held = trained_parameters(model, plan, part)
        part_ranks = context.ranks_of(part)
        # The slowest of the groups; groups in one place are alike.
        groups = tuple(part_ranks[tensor :: plan.tensor] for tensor in range(plan.tensor))
        seconds = max(
            self._over_replicas(context, group, held, at_once, sharded)
            for group, at_once in self.links.by_place(groups)
        )
        is_end = plan.pipeline > 1 and part in (0, plan.pipeline - 1)
        if model.tie_word_embeddings and is_end and model.lora is None:  # else it is frozen
            table = padded_vocab_size(model) * model.hidden_size // plan.tensor * GRADIENT_BYTES
            groups = context.topology.embedding_groups()
            ends = groups[0]
            seconds += self.links.all_reduce(ends, table, self.links.at_once(ends, groups))
        return seconds

    def _over_replicas(
        self, context: ContextPlan, group: Sequence[int], held: int, at_once: int, sharded: bool
    ) -> float:
        if not sharded:
            return self.links.all_reduce(group, GRADIENT_BYTES * held, at_once)
        sizes = (GRADIENT_BYTES * held, BYTES_PER_PARAMETER[context.options.dtype] * held)
        return sum(self.links.all_gather(group, size, at_once) for size in sizes)

    def _tensor_reduction(self, context: ContextPlan, tokens: float) -> float:
        """Seconds of one all-reduce of the tokens' hidden states over the tensor ranks."""
        plan = context.plan
        if plan.tensor == 1:
            return 0.0
        size = BYTES_PER_PARAMETER[context.options.dtype] * context.model.hidden_size * tokens
        groups = self._tensor_groups(context.ranks, plan.tensor)
        if plan.sequence_parallel:
            return max(2 * self.links.all_gather(group, size) for group in groups)
        return max(self.links.all_reduce(group, size) for group in groups)

    def _groups_by_place(self, ranks: tuple[int, ...], tensor: int) -> list[tuple[int, ...]]:
        """One tensor group for each place that has any: within a node, between nodes."""
        groups = (ranks[first : first + tensor] for first in range(0, len(ranks), tensor))
        return list({self.links.place(group): group for group in groups}.values())

    def _head_transfers(self, context: ContextPlan, row: RowShape) -> float:
        """Seconds of combining log-probabilities over the parts of the vocabulary, for a row.

        0 for a scalar head, which is replicated on every tensor rank, like its gradient.
        """
        if context.model.head == "scalar":
            return 0.0
        tensor, size = context.plan.tensor, 4 * row.predictions
        groups = self._tensor_groups(context.ranks, tensor)
        gathered = max(self.links.all_gather(group, tensor * size) for group in groups)
        return gathered + max(self.links.all_reduce(group, size) for group in groups)

    def _logits_transfer(self, context: ContextPlan, sequences: float) -> float:
        """Seconds of all-gathering the whole vocabulary's logits, in float32."""
        size = 4 * padded_vocab_size(context.model) * sequences
        groups = self._tensor_groups(context.ranks, context.plan.tensor)
        return max(self.links.all_gather(group, size) for group in groups)

    def _at(self, kind: str, key: tuple, name: str, size: float, each: float) -> float:
        estimate: Estimate = self._sheet(kind, key, name).at(size, each)
        if estimate.beyond:
            self._beyond.add(_beyond_text(kind, key, size))
        return estimate.value

    def _make_sheet(self, kind: str, key: tuple, name: str) -> Sheet:
        """Measured values of one name, by size and by work per unit of it."""
        model, tensor, *recompute = key
        profiled = self.profile.of(model)
        points = [p for p in getattr(profiled, kind) if p.tensor == tensor]
        if recompute:
            points = [p for p in points if p.recompute == recompute[0]]
        if not points:
            raise ValueError(_missing(profiled, kind, tensor, *recompute))
        return Sheet([(*_PLACES[kind](point), _value(getattr(point, name))) for point in points])


# A point's place on its sheet: size, and work per unit of it.
_PLACES = {
    "rows": lambda p: (p.row_tokens, p.pairs / p.row_tokens),
    "ends": lambda p: (p.row_tokens, p.predictions / p.row_tokens),
    "prefill": lambda p: (p.tokens, p.sequences / p.tokens),
    "decode": lambda p: (p.sequences, p.context),
}


def _value(measured: Time | int) -> float:
    return measured.median if isinstance(measured, Time) else float(measured)


def _beyond_text(kind: str, key: tuple, size: float) -> str:
    of = {"rows": "a layer's row", "ends": "the ends' row"}.get(kind, f"a {kind} batch")
    unit = "sequences" if kind == "decode" else "tokens"
    return f"{of} of {size:.0f} {unit} at tensor size {key[1]} ({key[0].model_type})"


def _missing(profiled: ModelProfile, kind: str, tensor: int, recompute: str | None = None) -> str:
    sizes = sorted({point.tensor for point in getattr(profiled, kind)})
    which = f"{kind} at tensor size {tensor}"
    if tensor in sizes and recompute is not None:
        return (
            f"the profile has no {which} with recompute={recompute} of a "
            f"{model_text(profiled.model)}: profile it with that"
        )
    there = f"only {', '.join(map(str, sizes))}" if sizes else "none"
    return (
        f"the profile has no {which} of a {model_text(profiled.model)} ({there}): profile it with "
        f"--tensor {tensor}"
    )


def _sequence_parallel_saving(context: ContextPlan, row_tokens: int) -> int:
    """Estimate the bytes that sequence parallelism saves of a layer's kept ones: profiles lack it.

    They are of a tensor rank alone, whose norms and residuals have all of the row's tokens.
    """
    plans = replace(context.plan, sequence_parallel=False), context.plan
    model, options = context.model, context.options
    whole, sharded = (layer_kept_bytes(model, plan, options, row_tokens) for plan in plans)
    return whole - sharded
