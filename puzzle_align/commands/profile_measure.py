"""Measure units on all ranks: points of the profile, from every rank's clock.

The ranks of a node measure at the same time, because in a job they share its memory and its power.
A point is the median over the repetitions of all ranks, not of the slowest rank: a disturbed
repetition, or a slow rank, shows in the spread.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch

from puzzle_align.commands.profile_units import (
    FROZEN,
    NUM_END_ROWS,
    GenerationUnit,
    LinkUnit,
    MergeUnit,
    ModelUnit,
    OptimizerUnit,
    RowUnit,
)
from puzzle_align.config.resolve import Job
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.model import AttentionBackend
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.rows import Microbatch, visible_pairs
from puzzle_align.planning.costs.profile import (
    DecodePoint,
    EndPoint,
    Link,
    LinkPoint,
    MergePoint,
    OptimizerPoint,
    PrefillPoint,
    RowPoint,
    Time,
)
from puzzle_align.planning.memory.model import merged_parameters
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation.sampling import Sampling
from puzzle_align.runtime.groups.collectives import gather_everywhere
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.profiler.generation import (
    GenerationCase,
    decode_context,
    measure_decode,
    measure_prefill,
)
from puzzle_align.runtime.profiler.links import LinkMeter, num_at_once
from puzzle_align.runtime.profiler.rows import RowCase, kept_layer_bytes, measure_row
from puzzle_align.runtime.profiler.shards import measure_merge, measure_step, open_shard
from puzzle_align.runtime.profiler.timing import Samples
from puzzle_align.runtime.row_input import to_device
from puzzle_align.stages.outlook import Outlook, microbatch_of

T = TypeVar("T")
_END_TIMES = (
    "prepare",
    "embedding_forward",
    "embedding_backward",
    "head_forward",
    "head_train_forward",
    "head_backward",
)
_LONG_S = 1.0  # of messages that are sent at once


@dataclass(frozen=True, kw_only=True)
class UnitPoints:
    """One unit's points, of a model or of links; ``left_out`` says why some are missing."""

    rows: tuple[RowPoint, ...] = ()
    ends: tuple[EndPoint, ...] = ()
    optimizer: tuple[OptimizerPoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    merge: tuple[MergePoint, ...] = ()
    links: tuple[Link, ...] = ()
    left_out: str = ""


class _TooLarge(Exception):
    """A unit that does not fit in the device memory of some rank."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings of the measurements, equal on all ranks except for ``world``."""

    job: Job
    outlook: Outlook
    repeats: int
    world: World

    def measure_models(self, units: Sequence[ModelUnit]) -> Iterator[tuple[ModelUnit, UnitPoints]]:
        """Measure units in order; successive units of one shard share its build. Collective."""

        def opened_alike(unit: ModelUnit) -> tuple[object, ...]:
            return unit.shard, unit.model, isinstance(unit, FROZEN)

        for _, group in groupby(units, opened_alike):
            alike = list(group)
            with ExitStack() as stack:
                trained = self._trained(alike[0])
                shard = open_shard(alike[0].shard, self.world, trained=trained)
                context = _fitting(partial(stack.enter_context, shard))
                for unit in alike:
                    with activity(f"profile of {unit.name}"):
                        yield unit, self._measured(unit, context)

    def measure_links(self, units: Sequence[LinkUnit]) -> Iterator[tuple[LinkUnit, UnitPoints]]:
        """Measure links in order. Collective."""
        meter = LinkMeter(self.world)
        for unit in units:
            points = []
            with activity(f"profile of {unit.name}"):
                for size in unit.sizes:
                    samples = meter.measure(unit.transport, unit.groups, size, self.repeats)
                    times = pooled(gather_everywhere({"time": samples}))
                    points.append(LinkPoint(size=size, time=times["time"]))
                    if times["time"].median * num_at_once(unit.transport, size) > _LONG_S:
                        break  # on a slow link, larger messages take as much longer
            link = Link(
                transport=unit.transport,
                place=unit.place,
                ranks=len(unit.groups[0]),
                points=tuple(points),
                at_once=unit.at_once,
            )
            yield unit, UnitPoints(links=(link,))

    def _measured(self, unit: ModelUnit, context: Context | None) -> UnitPoints:
        try:
            if isinstance(unit, RowUnit):
                return self._rows(unit, context)
            if isinstance(unit, OptimizerUnit):
                return self._optimizer(unit, context)
            if isinstance(unit, MergeUnit):
                return self._merging(unit, context)
            assert isinstance(unit, GenerationUnit)
            return self._generation(unit, context)
        except _TooLarge:
            return UnitPoints(left_out="does not fit in the device's memory")

    def _rows(self, unit: RowUnit, context: Context | None) -> UnitPoints:
        points: dict[int, RowPoint] = {}  # by pairs
        ends: dict[int, EndPoint] = {}  # by predictions
        options, tensor = unit.shard.options, unit.shard.tensor
        role = (*unit.model.trained, *unit.model.roles)[0]
        for number, (row_layout, row) in enumerate(unit.rows):
            microbatch = microbatch_of(row, row_layout, unit.shard.spec.vocab_size)
            make: Callable[[], RowCase] = partial(
                row_case, self.outlook, role, microbatch, options.attention, self.world.device
            )
            rank_samples = self._everywhere(
                context, lambda shard, make=make: _row(shard, make, self.repeats)
            )
            times = pooled(rank_samples)
            tokens, pairs = microbatch.layout.num_tokens, visible_pairs(microbatch.layout)
            point = RowPoint(
                tensor=tensor,
                recompute=options.recompute,
                row_tokens=tokens,
                pairs=pairs,
                kept_bytes=_most(rank_samples, "kept_bytes"),
                **{name: times[name] for name in ("forward", "train_forward", "backward")},
            )
            points.setdefault(pairs, point)
            if unit.with_ends and number < NUM_END_ROWS:
                predictions = _most(rank_samples, "predictions")
                end = EndPoint(
                    tensor=tensor,
                    row_tokens=tokens,
                    predictions=predictions,
                    **{name: times[name] for name in _END_TIMES},
                )
                ends.setdefault(predictions, end)
        return UnitPoints(rows=tuple(points.values()), ends=tuple(ends.values()))

    def _optimizer(self, unit: OptimizerUnit, context: Context | None) -> UnitPoints:
        config = self._trained(unit)
        assert config is not None
        rank_samples = self._everywhere(
            context, lambda shard: measure_step(shard, config, self.repeats)
        )
        point = OptimizerPoint(
            parameters=_most(rank_samples, "parameters"),
            step=pooled(rank_samples)["step"],
            state_dtype=config.state_dtype,
            cpu_offload=config.cpu_offload,
        )
        return UnitPoints(optimizer=(point,))

    def _merging(self, unit: MergeUnit, context: Context | None) -> UnitPoints:
        rank_samples = self._everywhere(
            context, lambda shard: measure_merge(shard, unit.shard, self.world, self.repeats)
        )
        parameters = merged_parameters(unit.shard.spec, ParallelPlan(), 0)
        return UnitPoints(
            merge=(MergePoint(parameters=parameters, time=pooled(rank_samples)["merge"]),)
        )

    def _generation(self, unit: GenerationUnit, context: Context | None) -> UnitPoints:
        generation = self.job.config.generation
        sampling = Sampling(
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
            min_new_tokens=0,
            max_new_tokens=1,
            stop_token_ids=(),
            seed=self.job.config.seed,
        )
        case = GenerationCase(
            sequences=unit.sequences,
            prompt_tokens=unit.prompt_tokens,
            vocab_size=unit.model.spec.vocab_size,
            sampling=sampling,
        )
        measure = partial(measure_decode, steps=unit.steps) if unit.steps else measure_prefill
        times = pooled(
            self._everywhere(context, lambda shard: measure(shard, case, repeats=self.repeats))
        )
        tensor, sequences = unit.shard.tensor, unit.sequences
        if unit.steps:
            cached = decode_context(unit.prompt_tokens, unit.steps)
            decode = DecodePoint(tensor=tensor, sequences=sequences, context=cached, **times)
            return UnitPoints(decode=(decode,))
        tokens = sequences * unit.prompt_tokens
        prefill = PrefillPoint(tensor=tensor, sequences=sequences, tokens=tokens, **times)
        return UnitPoints(prefill=(prefill,))

    def _trained(self, unit: ModelUnit) -> OptimizerConfig | None:
        """Optimizer of a unit's shard: the job's, without overlap, sharded only if it must be."""
        if isinstance(unit, FROZEN):
            return None
        trained = unit.model.trained
        config = self.job.optimizer(trained[0]) if trained else self.job.config.optimizer
        # Low-precision state, and state on the host, need the distributed optimizer.
        sharded = config.in_pieces
        return replace(config, use_distributed_optimizer=sharded, overlap_grad_reduce=False)

    def _everywhere(
        self, context: Context | None, measure: Callable[[Context], Samples]
    ) -> list[Samples]:
        """Samples of every rank. Collective; _TooLarge on all ranks if one is out of memory."""
        my_samples = None if context is None else _fitting(lambda: measure(context))
        gathered = gather_everywhere(my_samples)
        rank_samples = [samples for samples in gathered if samples is not None]
        if len(rank_samples) < len(gathered):
            raise _TooLarge
        return rank_samples


def pooled(rank_samples: Sequence[Samples]) -> dict[str, Time]:
    """Medians (at least 0: less is noise) and half interquartile ranges of all ranks' seconds."""
    times = {}
    for name in rank_samples[0]:
        values = [x for samples in rank_samples for x in samples[name]]
        low, median, high = np.percentile(values, (25, 50, 75)).tolist()
        times[name] = Time(median=max(0.0, median), spread=(high - low) / 2)
    return times


def _most(rank_samples: Sequence[Samples], name: str) -> int:
    """The largest of all ranks' counts."""
    return max(round(samples[name][0]) for samples in rank_samples)


def _row(context: Context, make: Callable[[], RowCase], repeats: int) -> Samples:
    """Samples of a row's times, bytes and number of predictions."""
    samples = measure_row(context, make, repeats)
    case = make()
    return {
        **samples,
        "kept_bytes": [float(kept_layer_bytes(context, case.trained))],
        "predictions": [float(len(case.trained.predictions.predict_from))],
    }


def _fitting(make: Callable[[], T]) -> T | None:
    """Call ``make``; None if the device runs out of memory."""
    try:
        return make()
    except torch.OutOfMemoryError:
        return None


def row_case(
    outlook: Outlook,
    role: str,
    microbatch: Microbatch,
    attention: AttentionBackend,
    device: torch.device,
) -> RowCase:
    """Case to measure a role's model on a row: a forward, and training with the role's loss.

    A model that the stage does not train gets a plain sum as its loss.
    """
    scored = to_device(microbatch, attention, device, outlook.reading(role, "infer"))
    reading = outlook.reading(role, "train")
    trained = to_device(microbatch, attention, device, reading, like=scored)
    loss = outlook.row_loss(role, microbatch, device)

    def learn(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.sum() if loss is None else loss(trained, outputs)

    return RowCase(scored, trained, learn, outlook.statistics)
