"""``puzzle-align plan``: from config and profile to ``plan.json`` and a report on the choice."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import indent

from puzzle_align.commands.summary import check_writable, save_file, say
from puzzle_align.config.chosen_plan import ChosenPlan, decided_keys, refuse_overrides
from puzzle_align.config.job import JobConfig
from puzzle_align.config.resolution import Resolution
from puzzle_align.config.resolve import resolve
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.costs.profile import Profile, load_profile
from puzzle_align.planning.iteration import EVALUATE, Iteration, Times, predict_iteration
from puzzle_align.planning.load import Load
from puzzle_align.planning.memory.model import columns_table
from puzzle_align.planning.picture.figures import Point, save_scaling
from puzzle_align.planning.picture.panel import Panel, time_text
from puzzle_align.planning.picture.png import save_png
from puzzle_align.planning.picture.text import draw_text
from puzzle_align.planning.plan_file import PlanFile, Predicted, save_plan
from puzzle_align.planning.report import limit_text, report_lines
from puzzle_align.planning.search.evaluation import Planned
from puzzle_align.planning.search.searches import SearchResult, exhaustive, similarity
from puzzle_align.planning.search.space import Cluster, JobToPlan, Space
from puzzle_align.stages.outlook import open_outlook
from puzzle_align.stages.to_plan import job_to_plan, resolution_to_plan

EXHAUSTIVE_UP_TO = 512  # ranks; an automatic search on more is by similarity
PICTURE_WIDTH = 120
_SEARCHES = {"exhaustive": exhaustive, "similarity": similarity}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of the command line beside config and profile.

    ``memory_bytes``: memory of a rank (None: as profiled); ``margin``: the share of it kept free.
    """

    num_ranks: Sequence[int]
    ranks_per_node: int | None
    memory_bytes: int | None
    margin: float
    search: str  # auto | exhaustive | similarity
    response_tokens: float | None
    keep: int
    output: Path
    png: Path | None


class NoPlanFits(ValueError):
    """No plan fits the memory of the ranks."""


def make_plan(overrides: Sequence[str], config: JobConfig, profile: Path, asked: Asked) -> None:
    """Plan the job of ``config``, which includes ``overrides``.

    For one number of ranks, write the plan with a report; for several, print a table of the best
    plan for each and the limit of its speed-up.

    Raises:
        ValueError: one line, if the profile or the data do not fit the job, no plan fits, or the
            output cannot be written.
    """
    if len(asked.num_ranks) == 1:
        check_writable("--output", asked.output)
    measurements = load_profile(profile)
    measured = Measured(measurements, asked.ranks_per_node)
    resolution = resolution_to_plan(config, measurements)
    job = job_to_plan(resolution, measurements)
    others = [text for text in overrides if not text.startswith("engine.")]  # from the profile
    refuse_overrides(others, "puzzle-align plan", decided_keys(job.stage, job.models))
    _check_response_tokens(job, config, asked.response_tokens)
    load = open_outlook(resolution.pinned()).load(asked.response_tokens)
    planner = _Planner(job, measured, load, asked)
    _show_profile(measurements, load)
    if len(asked.num_ranks) > 1:
        _scaling(planner, asked, load.num_examples)
    else:
        number = asked.num_ranks[0]
        results, space = planner.search(number)
        say(*report_lines(results))
        chosen = _as_run(resolution, results.best[0], space, load)
        _show(chosen, asked.png)
        _write(chosen, results, measurements, load, asked.output)


def _check_response_tokens(job: JobToPlan, config: JobConfig, tokens: float | None) -> None:
    longest = config.generation.max_new_tokens
    if tokens is not None and not job.samples:
        raise ValueError(f"--response-tokens: stage {job.stage} samples nothing; leave it out")
    if tokens is not None and tokens > longest:
        raise ValueError(
            f"--response-tokens {tokens:g}: responses have generation.max_new_tokens={longest} at "
            "most; give no more"
        )


class _Planner:
    """Searches for plans on clusters of different sizes."""

    def __init__(self, job: JobToPlan, measured: Measured, load: Load, asked: Asked) -> None:
        self._job, self._measured, self._load, self._asked = job, measured, load, asked

    def search(self, num_ranks: int) -> tuple[SearchResult, Space]:
        """Find the best plans on ``num_ranks`` ranks. ValueError, one line, if none fits."""
        asked = self._asked
        name = asked.search
        if name == "auto":
            name = "exhaustive" if num_ranks <= EXHAUSTIVE_UP_TO else "similarity"
        times = Times(self._measured, self._load, self._job.settings)
        space = Space(self._job, self._cluster(num_ranks), times)
        started = time.monotonic()
        results = _SEARCHES[name](space, asked.keep)
        _logger.info("%s ranks: %s search took %.1f s", num_ranks, name, time.monotonic() - started)
        if not results.best:
            raise NoPlanFits(self._why_none(num_ranks, results))
        return results, space

    def _cluster(self, num_ranks: int) -> Cluster:
        hardware = self._measured.profile.hardware
        memory = self._asked.memory_bytes
        if memory is None:
            shared = hardware.ranks_per_node if hardware.device == "cpu" else 1
            memory = hardware.memory_bytes // shared
        return Cluster(
            num_ranks=num_ranks,
            ranks_per_node=self._measured.links.ranks_per_node,
            memory_bytes=int(memory * (1 - self._asked.margin)),
        )

    def _why_none(self, num_ranks: int, results: SearchResult) -> str:
        has = self._cluster(num_ranks).memory_bytes / 2**30
        if results.nearest is None:
            return (
                f"--gpus {num_ranks}: the models cannot be divided among so many ranks; give "
                "another number, or profile more tensor sizes"
            )
        return (
            f"--gpus {num_ranks}: no plan fits the {has:.2f} GiB of a rank (less the margin); the "
            f"nearest, {results.nearest.text}, needs "
            f"{results.nearest.peak_bytes / 2**30:.2f} GiB: take more ranks, or a "
            "distributed optimizer (optimizer.use_distributed_optimizer=true) and small "
            "state in it (optimizer.state_dtype=bf16)"
        )


def _show_profile(profile: Profile, load: Load) -> None:
    hardware = profile.hardware
    say(
        f"profile: {hardware.name}, {hardware.ranks_per_node} ranks a node, {profile.options.dtype}"
    )
    declared = sorted({link.declared for link in profile.links if link.declared})
    if declared:
        say(f"links declared, not measured: {', '.join(declared)}")
    if load.generation is not None:
        lengths = load.generation
        say(
            f"responses are taken to have {lengths.response_tokens:.0f} tokens "
            f"(--response-tokens), prompts {lengths.prompt_tokens:.0f} in the mean"
        )


@dataclass(frozen=True)
class _Chosen:
    """A plan with predictions from its action lists.

    ``memory``: bytes by ranks and part, with the most and the longest examples; ``beyond``: lines
    on extrapolated predictions.
    """

    plan: ChosenPlan
    iteration: Iteration
    memory: Mapping[str, Mapping[str, int]]
    beyond: list[str]


def _as_run(resolution: Resolution, planned: Planned, space: Space, load: Load) -> _Chosen:
    """The plan as a job would run it, with times simulated from its action lists."""
    measured = Measured(space.measured.profile, space.cluster.ranks_per_node)
    config, engine = resolution.config, resolution.engine
    overlaps = planned.settings.overlap_switch and planned.plan.switches
    settings = replace(planned.settings, overlap_switch=overlaps)
    chosen = ChosenPlan(
        source="the plan", plan=planned.plan, settings=settings, device=engine.device
    )
    resolve(config, engine, planned.plan.world_size, chosen, resolution.paths)
    iteration = predict_iteration(planned.plan, measured, load, planned.settings)
    return _Chosen(chosen, iteration, planned.memory, measured.beyond)


def _show(chosen: _Chosen, png: Path | None) -> None:
    """Print the chosen plan's memory, and draw its passes."""
    say("memory, by ranks:")
    say(indent(columns_table(chosen.memory), "  "))
    panels = [
        Panel(
            f"{name}, {run.phase.order}, a pass",
            next(islice(run.passes(), run.num_passes // 2, None)),
            labels=run.phase.lane_names,
        )
        for name, run in chosen.iteration.runs.items()
    ]
    say(draw_text(panels, PICTURE_WIDTH, colour=False))
    if png is not None:
        save_file("--png", png, partial(save_png, panels))
    for line in chosen.beyond:
        say(f"extrapolated, as the profile has no point there: {line}")


def _write(
    chosen: _Chosen, results: SearchResult, profile: Profile, load: Load, output: Path
) -> None:
    """Write ``plan.json``, with predictions under the names that a run reports."""
    seconds = {name: time.seconds for name, time in chosen.iteration.phases.items()}
    times_in_job = {phase.name: 1 for phase in chosen.plan.plan.phases if phase.once}
    times_in_job[EVALUATE] = load.num_evaluations
    beside = {
        name: seconds.pop(name) * load.num_iterations / number
        for name, number in times_in_job.items()
        if name in seconds
    }
    predicted = Predicted(
        iteration=sum(seconds.values()),
        phases=seconds,
        memory={ranks: _allocated(parts) for ranks, parts in chosen.memory.items()},
        beside=beside,
    )
    plan = PlanFile(
        job_plan=chosen.plan.plan,
        settings=chosen.plan.settings,
        device="cuda" if chosen.plan.device == "cuda" else "cpu",
        predicted=predicted,
        notes=(f"profile: {profile.hardware.name}", *report_lines(results), *chosen.beyond),
    )
    save_file("--output", output, partial(save_plan, plan))
    for name, each in beside.items():
        say(f"beside the iterations: {name} {time_text(each)}, {times_in_job[name]} in the job")
    say(f"{output}: {time_text(predicted.iteration)} an iteration; run it with --plan")


def _allocated(parts: Mapping[str, int]) -> int:
    """Bytes that a run finds allocated at the peak: not CUDA's own."""
    return parts["total"] - parts.get("CUDA", 0) - parts.get("communicators", 0)


def _scaling(planner: _Planner, asked: Asked, num_examples: int) -> None:
    """Print the best plan for every number of ranks, and what limits its speed-up.

    ``num_examples``: pairs, or responses, in an iteration.
    """
    say(f"{'ranks':>6} {'iteration':>10} {'examples/s':>11} {'efficiency':>11}  limited by; plan")
    before: Planned | None = None
    points: list[Point] = []
    for number in asked.num_ranks:
        try:
            results, _ = planner.search(number)
        except NoPlanFits as error:
            say(f"{number:>6} {'-':>10} {'-':>11} {'-':>11}  {error}")
            continue
        best = results.best[0]
        rate = num_examples / best.seconds
        seconds = {name: phase.seconds for name, phase in best.phases.items()}
        points.append(Point(number, rate, seconds))
        efficiency = rate / number / (points[0].rate / points[0].num_ranks)
        limit = "-" if before is None else limit_text(before, best)
        say(
            f"{number:>6} {time_text(best.seconds):>10} {rate:>11.3g} {100 * efficiency:>10.0f}%  "
            f"{limit}; {best.text}"
        )
        before = best
    if not points:
        raise NoPlanFits("--gpus: no plan fits any of the numbers; see above for what they need")
    if asked.png is not None:
        save_file("--png", asked.png, partial(save_scaling, points))
