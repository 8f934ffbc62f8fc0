#!/usr/bin/env python3
"""Run a job under many plans, and compare the planner's predictions with it. Prints JSON.

Each plan is written as a plan.json and run by ``launch/train.py --plan``, on CPU ranks of one
thread. "plans" holds the median seconds of an iteration and of its phases, predicted and measured,
and the ratio of predicted to measured.
- "--plans same": all models under one plan, on one rank and on two.
- "--plans every": all plans on two ranks at the config's sizes of microbatches, also with separate
  plans for sampling and with models on separate ranks. "choice" is the plan with the least
  predicted time; "choice_over_fastest" is its measured time over that of "fastest".

    torchrun --nproc-per-node 2 launch/profile.py --config ppo_tiny --output profile.json
    python tools/bench_predicted.py --config ppo_tiny --profile profile.json --plans every
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_run import parser_of, show

from puzzle_align.config.chosen_plan import ChosenPlan
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.resolve import Engine, resolve
from puzzle_align.planning.costs.measured import Measured
from puzzle_align.planning.costs.profile import load_profile
from puzzle_align.planning.iteration import EVALUATE, Times, predict_iteration
from puzzle_align.planning.plan_file import PlanFile, Predicted, save_plan
from puzzle_align.planning.search.evaluation import Evaluation, Planned
from puzzle_align.planning.search.space import Choice, Cluster, SamplingChoice, Space
from puzzle_align.stages.outlook import open_outlook
from puzzle_align.stages.plan_report import FILE
from puzzle_align.stages.to_plan import job_to_plan, resolution_to_plan

ROOT = Path(__file__).parents[1]
QUIET = (
    "telemetry.progress=false",
    "telemetry.tensorboard=false",
    "checkpoint.save_every=0",
)
MEMORY = 2**40  # bytes: enough for every plan


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all plans, one after the other."""
    path = find_config(options.config)
    overrides = [*options.overrides, *QUIET, f"max_steps={options.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        numbers = (1, 2) if options.plans == "same" else (2,)
        planning = [*overrides, f"output_dir={folder}/planned"]
        spaces = [space_of(path, planning, options.profile, number) for number in numbers]
        every = [(space, planned) for space in spaces for planned in plans(space, options.plans)]
        runs = []
        for number, (space, planned) in enumerate(every):
            output = Path(folder, str(number))
            _train(planned, train_arguments(path, overrides, space, planned, output))
            runs.append(result_of(planned, output))
            print(line_of(runs[-1]), file=sys.stderr)
    ratios = [each["ratio"] for each in runs]
    summary: dict[str, Any] = {"config": options.config, "plans": runs}
    summary["worst_ratio"] = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    return summary | (choice_of(runs) if options.plans == "every" else {})


def space_of(path: Path, overrides: Sequence[str], profile_file: Path, num_ranks: int) -> Space:
    """Plans of a job on ranks of two to a node, with the times of a profile."""
    config = load_file(path, overrides)
    profile = load_profile(profile_file)
    resolution = resolution_to_plan(config, profile)
    job, load = job_to_plan(resolution, profile), open_outlook(resolution.pinned()).load()
    times = Times(Measured(profile), load, job.settings)
    return Space(job, Cluster(num_ranks=num_ranks, ranks_per_node=2, memory_bytes=MEMORY), times)


def plans(space: Space, which: str) -> Iterator[Planned]:
    """Plans to run, at the config's sizes of microbatches."""
    for choice in space.choices():
        if not _is_wanted(space, choice, which):
            continue
        for sampling in _samplings(space, choice, which):
            yield Evaluation(space).planned(choice, sampling)


def _is_wanted(space: Space, choice: Choice, which: str) -> bool:
    context = choice.context(space.job.trained[0])
    usual = (
        choice.row_tokens == space.job.settings.row_tokens
        and context.options.recompute == "none"
        and context.plan.virtual_pipeline == 1
        and not any(c.plan.pipeline_layers for phase in choice.phases for c in phase.contexts)
    )
    return usual and (which == "every" or choice.mode == "colocated")


def _samplings(space: Space, choice: Choice, which: str) -> Iterator[SamplingChoice | None]:
    if not space.job.samples:
        yield None
        return
    settings, trained = space.job.settings, choice.context("actor")
    numbers = {len(trained.ranks), space.cluster.num_ranks}
    grids = {sampling.plan: sampling for n in sorted(numbers) for sampling in space.samplings(n)}
    for plan, sampling in grids.items():
        if which == "every" or plan == trained.plan:
            yield replace(
                sampling,
                prefill_tokens=settings.prefill_tokens,
                decode_batch_size=settings.decode_batch_size,
            )


def train_arguments(
    path: Path, overrides: Sequence[str], space: Space, planned: Planned, output: Path
) -> list[str]:
    """Write the plan file of a run, with its predicted times; the run's arguments of ``train``.

    Raises:
        ValueError: if the job refuses the plan.
    """
    file, overrides = output.with_suffix(".json"), [*overrides, f"output_dir={output}"]
    measured, load = space.times.measured, space.times.load
    device, options = measured.profile.hardware.device, space.job.options
    plan, settings = planned.plan, planned.settings
    chosen = ChosenPlan(source=str(file), plan=plan, settings=settings, device=device)
    resolve(load_file(path, overrides), Engine(device, options), plan.world_size, chosen)
    iteration = predict_iteration(plan, measured, load, settings)
    # An iteration's own phases: its shares of evaluations and of the reference's pass are beside.
    phases = {
        name: each.seconds
        for name, each in iteration.phases.items()
        if name not in (EVALUATE, "precompute")
    }
    predicted = Predicted(iteration=sum(phases.values()), phases=phases, memory={})
    save_plan(PlanFile(job_plan=plan, settings=settings, device="cpu", predicted=predicted), file)
    return ["--config", str(path), "--plan", str(file), *overrides]


def result_of(planned: Planned, output: Path) -> dict[str, Any]:
    """Predicted and measured times of a run that has ended."""
    times = json.loads((output / FILE).read_text())["times"]
    whole = times["iteration"]
    return {
        "plan": planned.text,
        "ranks": planned.plan.world_size,
        "predicted": whole["predicted"],
        "measured": whole["measured"],
        "ratio": whole["predicted"] / whole["measured"],
        "phases": times,
    }


def line_of(run: dict[str, Any]) -> str:
    """A run's result for people."""
    return f"{run['measured']:.4f} s, predicted {run['predicted']:.4f}: {run['plan']}"


def choice_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The plan of least predicted time, beside that of least measured time."""
    choice = min(runs, key=lambda run: run["predicted"])
    fastest = min(runs, key=lambda run: run["measured"])
    return {
        "choice": choice["plan"],
        "fastest": fastest["plan"],
        "choice_over_fastest": choice["measured"] / fastest["measured"],
    }


def _train(planned: Planned, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(planned.plan.world_size)]
    command += [str(ROOT / "launch" / "train.py"), *arguments]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{planned.text}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    parser = parser_of(__doc__)
    parser.add_argument("--config", required=True, help="a file, or the name of a shipped config")
    parser.add_argument("--profile", type=Path, required=True, help="of launch/profile.py")
    parser.add_argument("--plans", choices=("same", "every"), default="same", help="(same)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (20)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    show(measure(parser.parse_intermixed_args(arguments)))


if __name__ == "__main__":
    main()
