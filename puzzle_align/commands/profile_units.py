"""Units of measurement for a job: its models in several sizes, and the links.

A unit is a few points measured together; an interruption loses only the unit in progress.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from puzzle_align.config.check_ppo import longest_prompt
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import RoleModel
from puzzle_align.layout.job_plan import JobPlan
from puzzle_align.layout.model import ModelOptions, ModelSpec, padded_vocab_size, without_adapters
from puzzle_align.layout.plan import ParallelPlan, division_problems
from puzzle_align.planning.costs.links import BETWEEN_TWO, TRANSPORTS, link_groups
from puzzle_align.planning.costs.profile import Place, Transport, measures
from puzzle_align.planning.profiled_rows import (
    ExampleSize,
    Lengths,
    causal_row,
    num_predictions,
    packed_row,
)
from puzzle_align.runtime.profiler.generation import decode_context, last_length
from puzzle_align.runtime.profiler.shards import ShardSpec

MODES = ("none", "selective", "full")  # of recompute
NUM_END_ROWS = 2  # rows of a unit that also measure the ends (embedding and head)
_ALWAYS = ("none", "full")
_LAYERS = {"cuda": 2, "cpu": 4}  # layers of a shard; more on CPU, where a layer takes little time
_MOST_TENSOR = {"cuda": 8, "cpu": 2}
_MOST_STEPS = {"cuda": 64, "cpu": 16}  # most decoding steps to average
_LINK_SIZES = {  # bytes
    "cuda": tuple(4096 * 4**power for power in range(8)),
    # The C library reuses memory for smaller blocks, and maps those from 32 MiB anew each time.
    "cpu": (4096, 65536, 2**20, 8 * 2**20, 32 * 2**20, 64 * 2**20),
}


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """A model of the job, for all roles whose models have the same measurements."""

    spec: ModelSpec
    roles: tuple[str, ...]
    trained: tuple[str, ...]  # those of its roles that are trained
    recompute: tuple[str, ...]  # none: it only generates
    generates: bool
    merges: bool = False  # its adapters, to generate

    @property
    def name(self) -> str:
        """The roles; a model that only generates may have those of another."""
        return "+".join(self.roles) + ("" if self.recompute else " merged")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes in which models are measured."""

    tensor: tuple[int, ...]
    tokens: tuple[int, ...]  # of a row
    example: ExampleSize
    row_layout: str


@dataclass(frozen=True, kw_only=True)
class ModelUnit:
    """A measurement of a shard of a model."""

    name: str
    model: ProfiledModel
    shard: ShardSpec


@dataclass(frozen=True, kw_only=True)
class RowUnit(ModelUnit):
    """Rows of one length, on a trained shard; ``NUM_END_ROWS`` of them also measure the ends.

    The rows are a packed one, a causal one, and one of examples half as long: a job's rows are in
    between.
    """

    rows: tuple[tuple[str, tuple[Lengths, ...]], ...]  # (row layout, examples)
    with_ends: bool  # the ends are the same under every recompute


@dataclass(frozen=True, kw_only=True)
class OptimizerUnit(ModelUnit):
    """An optimizer step on a trained shard."""


@dataclass(frozen=True, kw_only=True)
class MergeUnit(ModelUnit):
    """Adapters added to a copy of a frozen shard's weights."""


@dataclass(frozen=True, kw_only=True)
class GenerationUnit(ModelUnit):
    """A generation batch: ``steps`` of decoding, or with 0 the prefill."""

    sequences: int
    prompt_tokens: int
    steps: int


FROZEN = (MergeUnit, GenerationUnit)  # units whose shards are not trained


@dataclass(frozen=True, kw_only=True)
class LinkUnit:
    """A transport among ranks, in messages of all sizes."""

    name: str
    transport: Transport
    place: Place
    groups: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    at_once: int | None  # groups that reach from the first node to others


def profiled_models(plan: JobPlan, merged: Sequence[str] = ()) -> list[ProfiledModel]:
    """Models of the job, trained ones first; those with the same measurements are listed once.

    Roles that may generate with ``merged`` adapters also do so as a model without any.
    """
    models: dict[tuple[object, ...], ProfiledModel] = {}
    for context in plan.contexts:
        key = measures(context.model)
        known = models.get(key) or ProfiledModel(
            spec=context.model, roles=(), trained=(), recompute=_ALWAYS, generates=False
        )
        modes = {*known.recompute, context.options.recompute}
        trains = (context.role,) if context.workload == "train" else ()
        models[key] = replace(
            known,
            roles=tuple(dict.fromkeys([*known.roles, context.role])),
            trained=known.trained + trains,
            recompute=tuple(mode for mode in MODES if mode in modes),
            generates=known.generates or context.workload == "generate",
        )
    for model in [each for each in models.values() if each.generates and {*each.roles} & {*merged}]:
        models[measures(model.spec)] = replace(model, merges=True)
        base = without_adapters(model.spec)
        alone = ProfiledModel(
            spec=base, roles=model.roles, trained=(), recompute=(), generates=True
        )
        known = models.get(measures(base), alone)
        models[measures(base)] = replace(known, generates=True)
    return list(models.values())


def tensor_sizes_of(
    roles: Mapping[str, RoleModel],
    models: Sequence[ProfiledModel],
    asked: Sequence[int],
    device: str,
) -> tuple[int, ...]:
    """Tensor sizes to measure: the user's, or the powers of two that divide all models.

    Raises:
        ValueError: one line, for a size that does not divide a model.
    """

    def problems(size: int) -> Iterator[str]:
        for model in models:
            plan, key = ParallelPlan(tensor=size), roles[model.roles[0]].key
            yield from division_problems(model.spec, plan, f"--tensor {size}", key)

    if not asked:
        powers = (2**power for power in range(_MOST_TENSOR[device].bit_length()))
        return tuple(size for size in powers if not any(problems(size)))
    for size in asked:
        for problem in problems(size):
            raise ValueError(problem)
    return tuple(sorted(set(asked)))


def row_tokens_of(job: JobConfig, longest: int, asked: Sequence[int]) -> tuple[int, ...]:
    """Tokens of the rows to measure: the user's, or sizes around the job's own.

    Raises:
        ValueError: one line, for a row that does not hold an example of ``longest`` tokens.
    """
    row_tokens = job.packing.row_tokens
    if not asked:
        around = {row_tokens // 4, row_tokens // 2, row_tokens, 2 * row_tokens}
        return tuple(sorted(tokens for tokens in around if tokens >= longest))
    for tokens in asked:
        if tokens < longest:
            raise ValueError(
                f"--tokens {tokens}: does not hold the longest segment of the job, {longest} "
                "tokens; give as many, or lower data.max_length"
            )
    return tuple(sorted(set(asked)))


def model_units(
    job: JobConfig,
    models: Sequence[ProfiledModel],
    sizes: Sizes,
    options: ModelOptions,
    device: str,
) -> list[ModelUnit]:
    """Units of all models; units of one shard follow each other."""
    units: list[ModelUnit] = []
    layers = _LAYERS[device]
    for model, tensor in product(models, sizes.tensor):
        name = f"{model.name}, tensor {tensor}"
        for mode in model.recompute:
            shard = tensor_shard(model.spec, tensor, layers, replace(options, recompute=mode))
            units += _row_units(name, model, sizes, shard)
        # Two sizes separate a step's fixed time from its time per parameter.
        two = {n: tensor_shard(model.spec, tensor, n, options) for n in (1, layers)}
        if model.trained and tensor == sizes.tensor[0]:
            units += (
                OptimizerUnit(name=f"{name}, optimizer, {n} layers", model=model, shard=shard)
                for n, shard in two.items()
            )
        if model.merges and tensor == sizes.tensor[0]:
            units += (
                MergeUnit(name=f"{name}, merge, {n} layers", model=model, shard=shard)
                for n, shard in two.items()
            )
        if model.generates:
            prefilled = ((*batch, 0) for batch in prefill_batches(job))
            decoded = decode_batches(job, model.spec, _MOST_STEPS[device])
            for sequences, prompt_tokens, steps in (*prefilled, *decoded):
                work = f"decode of {steps} steps" if steps else "prefill"
                units.append(
                    GenerationUnit(
                        name=f"{name}, {work}, {sequences} sequences of {prompt_tokens} tokens",
                        model=model,
                        shard=two[layers],
                        sequences=sequences,
                        prompt_tokens=prompt_tokens,
                        steps=steps,
                    )
                )
    return units


def link_units(num_nodes: int, ranks_per_node: int, device: str) -> list[LinkUnit]:
    """Units of the links between the job's ranks."""
    units = []
    for place, groups in link_groups(num_nodes, ranks_per_node):
        ranks, at_once = len(groups[0]), None
        if place == "network":
            at_once = sum(min(group) < ranks_per_node for group in groups)
        alone = ", alone" if at_once == 1 < ranks_per_node and 1 not in groups[0] else ""
        for transport in TRANSPORTS:
            if transport not in BETWEEN_TWO or ranks == 2:
                units.append(
                    LinkUnit(
                        name=f"{transport} in {place} among {ranks} ranks{alone}",
                        transport=transport,
                        place=place,
                        groups=tuple(groups),
                        sizes=_LINK_SIZES[device],
                        at_once=at_once,
                    )
                )
    copy = LinkUnit(
        name="copy",
        transport="copy",
        place="node",
        groups=tuple((rank,) for rank in range(num_nodes * ranks_per_node)),
        sizes=_LINK_SIZES[device],
        at_once=None,
    )
    return [*units, copy]


def _row_units(
    name: str, model: ProfiledModel, sizes: Sizes, shard: ShardSpec
) -> Iterator[RowUnit]:
    mode, layout = shard.options.recompute, sizes.row_layout
    for tokens in sizes.tokens:
        packed = packed_row(tokens, sizes.example, layout)
        halves = packed_row(tokens, sizes.example.halved, layout)
        # Far fewer predictions, because a job's rows are not full and have fewer than a packed row.
        causal = causal_row(tokens, len(sizes.example.responses), num_predictions(packed) // 4)
        yield RowUnit(
            name=f"{name}, recompute {mode}, rows of {tokens}",
            model=model,
            shard=shard,
            rows=((layout, tuple(packed)), ("shared", tuple(causal)), (layout, tuple(halves))),
            with_ends=mode == model.recompute[0],
        )


def prefill_batches(job: JobConfig) -> list[tuple[int, int]]:
    """Prefill batches as (prompts, tokens of each), with short and long prompts.

    Their sizes go from few tokens to the most that the job allows.
    """
    generation, longest = job.generation, longest_prompt(job)
    short = max(1, longest // 4)
    long = short * (longest // short)
    most = max(1, min(generation.decode_batch_size, generation.prefill_tokens // long))
    return sorted(
        {
            (number * long // tokens, tokens)
            for number in (1, max(1, most // 4), most)
            for tokens in (short, long)
        }
    )


def decode_batches(job: JobConfig, model: ModelSpec, most_steps: int) -> list[tuple[int, int, int]]:
    """Decode batches as (sequences, tokens of their prompts, steps), from short to full."""
    total = longest_prompt(job) + job.generation.max_new_tokens
    steps = max(1, min(most_steps, total // 4))
    around, after = decode_context(0, steps), last_length(0, steps)
    limit = min(model.max_position_embeddings, model.sliding_window or total + after)
    most = job.generation.decode_batch_size
    batches = {
        (batch, max(1, min(context - around, limit - after)), steps)
        for batch in {1, max(1, most // 4), most}
        for context in (total // 8, total // 2, total)
    }
    return sorted(batches)


def tensor_shard(
    model: ModelSpec, tensor: int, num_layers: int, options: ModelOptions
) -> ShardSpec:
    """Shard of the first of ``tensor`` ranks, with ``num_layers`` layers.

    Heads, MLP and vocabulary are divided (``tensor_sizes_of`` has checked that they can be), and
    nothing else. The shard has no communication, and a separate head even if the model's is tied:
    the computation is the same.
    """
    rows = padded_vocab_size(model) // tensor
    spec = replace(
        model,
        num_hidden_layers=num_layers,
        num_attention_heads=model.num_attention_heads // tensor,
        num_key_value_heads=model.num_key_value_heads // tensor,
        intermediate_size=model.intermediate_size // tensor,
        vocab_size=min(model.vocab_size, rows),
        tie_word_embeddings=False,
    )
    return ShardSpec(spec=spec, tensor=tensor, vocab_rows=rows, options=options)
