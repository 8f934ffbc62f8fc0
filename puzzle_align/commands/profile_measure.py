"""Measure a unit on all ranks: points of the profile, from every rank's clock.

The ranks of a node measure at the same time, as they work in a job, where they share its memory and
its power. A point is the median over the repetitions of all ranks, not of the slowest rank: one
disturbed repetition, or a slow rank, shows in the spread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch

from puzzle_align.commands.profile_units import (
    NUM_END_ROWS,
    GenerationUnit,
    LinkUnit,
    ModelUnit,
    OptimizerUnit,
    ProfiledModel,
    RowUnit,
)
from puzzle_align.config.job import JobConfig
from puzzle_align.config.roles import optimizer_config
from puzzle_align.config.sections.optimizer import OptimizerConfig
from puzzle_align.layout.rows import visible_pairs
from puzzle_align.planning.costs.journal import Part
from puzzle_align.planning.costs.profile import (
    DecodePoint,
    EndPoint,
    Link,
    LinkPoint,
    OptimizerPoint,
    PrefillPoint,
    RowPoint,
    Time,
)
from puzzle_align.runtime.context import Context
from puzzle_align.runtime.generation import Sampling
from puzzle_align.runtime.groups.collectives import gather_everywhere
from puzzle_align.runtime.groups.world import World
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.profiler import (
    GenerationCase,
    LinkMeter,
    RowCase,
    Samples,
    decode_context,
    kept_layer_bytes,
    measure_decode,
    measure_prefill,
    measure_row,
    measure_step,
    open_shard,
)
from puzzle_align.stages.outlook import Outlook, microbatch_of, row_case

T = TypeVar("T")
_END_TIMES = (
    "prepare",
    "embedding_forward",
    "embedding_backward",
    "head_forward",
    "head_train_forward",
    "head_backward",
)
_TOO_LARGE = "does not fit in the device's memory"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings of the measurements, equal on all ranks except for ``world``."""

    job: JobConfig
    models: Sequence[ProfiledModel]
    outlook: Outlook
    sampling: Sampling
    repeats: int
    world: World

    def measure_models(self, units: Sequence[ModelUnit]) -> Iterator[tuple[ModelUnit, Part]]:
        """Measure units in order; successive units of one shard share its build. Collective."""

        def opened_alike(unit: ModelUnit) -> tuple[object, ...]:
            return unit.shard, unit.model, not isinstance(unit, GenerationUnit)

        for _, group in groupby(units, opened_alike):
            alike = list(group)
            with ExitStack() as stack:
                trained = self._trained(alike[0])
                shard = open_shard(alike[0].shard, self.world, trained=trained)
                context = _fitting(partial(stack.enter_context, shard))
                for unit in alike:
                    with activity(f"profile of {unit.name}"):
                        yield unit, self._measured(unit, context)

    def measure_links(self, units: Sequence[LinkUnit]) -> Iterator[tuple[LinkUnit, Part]]:
        """Measure links in order. Collective."""
        meter = LinkMeter(self.world)
        for unit in units:
            with activity(f"profile of {unit.name}"):
                times = [
                    pooled(_joined(gather_everywhere({"time": samples})))
                    for samples in (
                        meter.measure(unit.transport, unit.groups, size, self.repeats)
                        for size in unit.sizes
                    )
                ]
            link = Link(
                transport=unit.transport,
                place=unit.place,
                ranks=len(unit.groups[0]),
                points=tuple(
                    LinkPoint(size=size, time=times_of_size["time"])
                    for size, times_of_size in zip(unit.sizes, times, strict=True)
                ),
            )
            yield unit, Part(links=(link,))

    def _measured(self, unit: ModelUnit, context: Context | None) -> Part:
        if isinstance(unit, RowUnit):
            return self._rows(unit, context)
        if isinstance(unit, OptimizerUnit):
            return self._optimizer(unit, context)
        return self._generation(unit, context)

    def _rows(self, unit: RowUnit, context: Context | None) -> Part:
        points: list[RowPoint] = []
        ends: list[EndPoint] = []
        for number, (row_layout, row) in enumerate(unit.rows):
            microbatch = microbatch_of(row, row_layout, unit.shard.spec.vocab_size)
            options, model = unit.shard.options, self.models[unit.model]
            role = (*model.trained, *model.roles)[0]
            make: Callable[[], RowCase] = partial(
                row_case, self.outlook, role, microbatch, options.attention, self.world.device
            )
            rank_samples = self._everywhere(
                context, lambda shard, make=make: _row(shard, make, self.repeats)
            )
            if rank_samples is None:
                return Part(left_out=_TOO_LARGE)
            times = pooled(_joined(rank_samples))
            tokens, pairs = microbatch.layout.num_tokens, visible_pairs(microbatch.layout)
            if not any(point.pairs == pairs for point in points):
                points.append(
                    RowPoint(
                        tensor=unit.tensor,
                        recompute=options.recompute,
                        row_tokens=tokens,
                        pairs=pairs,
                        forward=times["forward"],
                        train_forward=times["train_forward"],
                        backward=times["backward"],
                        kept_bytes=max(round(each["kept_bytes"][0]) for each in rank_samples),
                    )
                )
            predictions = round(rank_samples[0]["predictions"][0])
            known = any(end.predictions == predictions for end in ends)
            if unit.with_ends and number < NUM_END_ROWS and not known:
                ends.append(
                    EndPoint(
                        tensor=unit.tensor,
                        row_tokens=tokens,
                        predictions=predictions,
                        **{name: times[name] for name in _END_TIMES},
                    )
                )
        return Part(rows=tuple(points), ends=tuple(ends))

    def _optimizer(self, unit: OptimizerUnit, context: Context | None) -> Part:
        config = self._trained(unit)
        assert config is not None

        def measure(shard: Context) -> Samples:
            parameters, samples = measure_step(shard, config, self.repeats)
            return {**samples, "parameters": [float(parameters)]}

        rank_samples = self._everywhere(context, measure)
        if rank_samples is None:
            return Part(left_out=_TOO_LARGE)
        parameters = round(rank_samples[0]["parameters"][0])
        point = OptimizerPoint(
            parameters=parameters,
            step=pooled(_joined(rank_samples))["step"],
            state_dtype=config.state_dtype,
            cpu_offload=config.cpu_offload,
        )
        return Part(optimizer=(point,))

    def _generation(self, unit: GenerationUnit, context: Context | None) -> Part:
        case = GenerationCase(
            sequences=unit.sequences,
            prompt_tokens=unit.prompt_tokens,
            vocab_size=self.models[unit.model].spec.vocab_size,
            sampling=self.sampling,
        )
        if unit.steps:
            rank_samples = self._everywhere(
                context, lambda shard: measure_decode(shard, case, unit.steps, self.repeats)
            )
        else:
            rank_samples = self._everywhere(
                context, lambda shard: measure_prefill(shard, case, self.repeats)
            )
        if rank_samples is None:
            return Part(left_out=_TOO_LARGE)
        times = pooled(_joined(rank_samples))
        layer, rest = times["layer"], times["rest"]
        tensor, sequences = unit.tensor, unit.sequences
        if unit.steps:
            cached = decode_context(unit.prompt_tokens, unit.steps)
            decode = DecodePoint(
                tensor=tensor, sequences=sequences, context=cached, layer=layer, rest=rest
            )
            return Part(decode=(decode,))
        tokens = sequences * unit.prompt_tokens
        prefill = PrefillPoint(
            tensor=tensor, sequences=sequences, tokens=tokens, layer=layer, rest=rest
        )
        return Part(prefill=(prefill,))

    def _trained(self, unit: ModelUnit) -> OptimizerConfig | None:
        """Optimizer of a unit's shard: the job's, without the work that ranks share in a step."""
        if isinstance(unit, GenerationUnit):
            return None
        role = next(iter(self.models[unit.model].trained), "")
        config = optimizer_config(self.job, role)
        # Low-precision state, and state on the host, need the distributed optimizer.
        sharded = config.in_pieces
        return replace(config, use_distributed_optimizer=sharded, overlap_grad_reduce=False)

    def _everywhere(
        self, context: Context | None, measure: Callable[[Context], Samples]
    ) -> list[Samples] | None:
        """Samples of every rank; None if the unit did not fit on one of them. Collective."""
        my_samples = None if context is None else _fitting(lambda: measure(context))
        gathered = gather_everywhere(my_samples)
        rank_samples = [samples for samples in gathered if samples is not None]
        return rank_samples if len(rank_samples) == len(gathered) else None


def pooled(samples: Mapping[str, Sequence[float]]) -> dict[str, Time]:
    """Medians, and half the interquartile ranges, of seconds. Medians below 0 are noise: 0."""
    times = {}
    for name, values in samples.items():
        low, median, high = np.percentile(values, (25, 50, 75)).tolist()
        times[name] = Time(median=max(0.0, median), spread=(high - low) / 2)
    return times


def _joined(rank_samples: Sequence[Samples]) -> Samples:
    """Join the samples of all ranks."""
    return {
        name: [x for samples in rank_samples for x in samples[name]] for name in rank_samples[0]
    }


def _row(context: Context, make: Callable[[], RowCase], repeats: int) -> Samples:
    """Samples of a row's times, bytes and number of predictions."""
    samples = measure_row(context, make, repeats)
    case = make()
    return {
        **samples,
        "kept_bytes": [float(kept_layer_bytes(context, case.trained))],
        "predictions": [float(case.num_predictions)],
    }


def _fitting(make: Callable[[], T]) -> T | None:
    """Result of a call; None if the device runs out of memory."""
    try:
        return make()
    except torch.OutOfMemoryError:
        return None
