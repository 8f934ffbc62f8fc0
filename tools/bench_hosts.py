#!/usr/bin/env python3
"""Run a job under many plans on two hosts of two ranks, and judge the planner. Prints JSON.

The hosts are network namespaces of this machine (root). The link between them has a rate each way,
and so have the two ranks of each host: copies in the machine's one memory would be as fast as it
lets all ranks be. A rank sleeps as long as a device of ``--gflops`` would take for its matrix
products, and for copies of weights in its memory, in the profile too; all else is real. For each
rate the job is profiled, and run under every plan (at the config's sizes of microbatches), or with
``--best N`` and ``--drawn N`` under the N with the least predicted time and N others. By rate:
- "plans": median seconds of an iteration and of its phases, predicted and measured;
- "choice_over_fastest": measured time of the plan with the least predicted time, over the least;
- "within": share of the runs whose iteration was predicted within 15%, and of the switches within
  25%, and the worst ratios.

A virtual machine's processors may be taken by others: what they took more than 1% of is run again
(``--tries``); "stolen" is the share of the run that counts.

    python tools/bench_hosts.py --config dpo_tiny --rates 100mbit 1600mbit
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's

from bench_predicted import QUIET, choice_of, line_of, plans, result_of, space_of, train_arguments
from bench_run import parser_of, show

from puzzle_align.config.load import dump_job, find_config, load_file
from puzzle_align.planning.search.evaluation import Planned
from tests.cluster.hosts import Host, cluster, missing

_NUM_LOCAL = 2
_MOST_STOLEN = 0.01
_SERVER = str(Path(__file__).with_name("host_rank.py"))


class Cluster:
    """Ranks of two hosts, each a server (``host_rank``) that ends with its host."""

    def __init__(self, hosts: Sequence[Host], gflops: float, folder: Path) -> None:
        self._folder, self._number = folder, 0
        pipe = subprocess.PIPE
        self._servers = [
            subprocess.Popen(
                host.space.command(sys.executable, _SERVER, str(gflops)),
                stdin=pipe,
                stdout=pipe,
                text=True,
            )
            for host in hosts
            for _ in range(_NUM_LOCAL)
        ]
        assert self._answers() == {"ready"}

    def run(self, *arguments: str) -> None:
        """Run a command on every rank; RuntimeError with its output if it fails."""
        self._number += 1
        output = self._folder / f"{self._number}.log"
        for rank, server in enumerate(self._servers):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % _NUM_LOCAL),
                "WORLD_SIZE": str(len(self._servers)),
                "LOCAL_WORLD_SIZE": str(_NUM_LOCAL),
                "GLOO_SOCKET_IFNAME": f"rank{rank % _NUM_LOCAL}",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(20000 + self._number),
                "OMP_NUM_THREADS": "1",
            }
            command = {"arguments": arguments, "environment": environment, "output": str(output)}
            print(json.dumps(command), file=server.stdin, flush=True)
        if self._answers() != {"0"}:  # their exit codes
            raise RuntimeError(f"{' '.join(arguments)}: {output.read_text()[-3000:]}")

    def _answers(self) -> set[str]:
        """The next line of each server."""
        return {server.stdout.readline().strip() for server in self._servers if server.stdout}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all plans at every rate."""
    summary: dict[str, Any] = {
        "config": options.config,
        "overrides": options.overrides,
        "gflops": options.gflops,
        "local_rate": options.local_rate,
    }
    for rate in options.rates:
        with (
            tempfile.TemporaryDirectory() as folder,
            cluster(2, rate, local_rate=options.local_rate) as hosts,
        ):
            ranks = Cluster(hosts, options.gflops, Path(folder))
            summary[rate] = _judged(list(_runs(ranks, options, Path(folder))))
    return summary


def _runs(ranks: Cluster, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Profile the job, then run its plans, one after the other."""
    path, profile = folder / "config.yaml", folder / "profile.json"
    # A file: overrides of what a plan decides are refused.
    job = load_file(find_config(options.config), options.overrides)
    path.write_text(dump_job(job))
    overrides = [*QUIET, f"max_steps={options.steps}"]
    own = ["--config", str(path), "--output", str(profile), "--repeats", str(options.repeats)]
    own += ["--tokens", str(job.packing.row_tokens)]  # plans keep it
    if options.profile is None:
        share = _undisturbed(lambda: ranks.run("profile", *own), options.tries)
        print(f"profiled; {100 * share:.1f}% stolen", file=sys.stderr, flush=True)
    else:
        shutil.copy(options.profile, profile)
    space = space_of(path, [*overrides, f"output_dir={folder}/planned"], profile, 4)
    every = sorted(plans(space, "every"), key=lambda planned: planned.rank)
    chosen = _chosen(every, options)
    print(f"{len(chosen)} of {len(every)} plans", file=sys.stderr, flush=True)
    for number, planned in enumerate(chosen):
        output = folder / str(number)

        def run(planned: Planned = planned, output: Path = output) -> None:
            shutil.rmtree(output, ignore_errors=True)  # else the run would be resumed
            ranks.run("train", *train_arguments(path, overrides, space, planned, output))

        share = _undisturbed(run, options.tries)
        result = {**result_of(planned, output), "stolen": share}
        print(f"{line_of(result)}; {100 * share:.1f}% stolen", file=sys.stderr, flush=True)
        yield result


def _undisturbed(run: Callable[[], None], most_tries: int) -> float:
    """Run until others take little of the processors; the share that they took the last time."""
    share = 1.0
    for _ in range(most_tries):
        before = _stolen()
        run()
        stolen, whole = (now - then for now, then in zip(_stolen(), before, strict=True))
        share = stolen / max(whole, 1)
        if share <= _MOST_STOLEN:
            break
    return share


def _stolen() -> tuple[int, int]:
    """Time that other machines had this one's processors, and all time, by Linux."""
    times = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return int(times[7]), sum(map(int, times))


def _chosen(every: Sequence[Planned], options: argparse.Namespace) -> Sequence[Planned]:
    if options.best is None:
        return every
    best, others = every[: options.best], every[options.best :]
    drawn = random.Random(options.seed).sample(others, min(options.drawn, len(others)))
    return [*best, *drawn]


def _judged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = {"iteration": [run["ratio"] for run in runs], "switch": []}
    for run in runs:
        switch = run["phases"].get("switch", {})
        if switch.get("measured") and switch.get("predicted"):
            ratios["switch"].append(switch["predicted"] / switch["measured"])
    within = {
        name: {
            "share": sum(1 / (1 + most) <= r <= 1 + most for r in of) / len(of),
            "least": min(of),
            "greatest": max(of),
        }
        for name, most in (("iteration", 0.15), ("switch", 0.25))
        if (of := ratios[name])
    }
    return {**choice_of(runs), "within": within, "plans": list(runs)}


def main(arguments: list[str] | None = None) -> None:
    """Print the measurements."""
    parser = parser_of(__doc__)
    parser.add_argument("--config", required=True, help="a file, or the name of a shipped config")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1600mbit"], help="as tc's")
    parser.add_argument("--local-rate", default="3200mbit", help="within a host (3200mbit)")
    parser.add_argument("--gflops", type=float, default=10, help="of a rank's device (10)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run (5)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of the profile (3)")
    parser.add_argument("--tries", type=int, default=3, help="of what others disturbed (3)")
    parser.add_argument("--profile", help="of an earlier run of this job at the rate; not measured")
    parser.add_argument("--best", type=int, help="plans of least predicted time (all plans)")
    parser.add_argument("--drawn", type=int, default=15, help="of the others, with --best (15)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--set", nargs="*", dest="overrides", default=[], metavar="key=value")
    options = parser.parse_args(arguments)
    if why := missing():
        parser.error(why)
    show(measure(options))


if __name__ == "__main__":
    main()
