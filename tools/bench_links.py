#!/usr/bin/env python3
"""Measure a job's traffic over slow links between two hosts. Prints JSON. Needs root.

Two hosts of two gloo ranks each (network namespaces of this machine, tests/cluster/hosts.py) have a
link of each of --rates megabits a second, each way. Parts:
- "one host": what ranks of one host send each other, which takes the loopback device, not the link;
- "gradients": sums of gradients over replicas, and the weights that a sharded optimizer gathers;
- "pipeline": whole training steps of pipelines over the link;
- "switch": a model's switch of plans by routing table, Megatron's refit, all-gather and rank 0;
- "hidden": traced DPO steps, with the reference before the policy, in its bubbles, or ahead of it.

"bytes" are what the interfaces to the link sent in the work, from the first host to the second and
back, by the kernel's counters. "counted" are those that have to cross: by the routing tables, by
Megatron's plan, by the action lists, or by rings over the replicas. "least_seconds" is what the
link takes for the larger of the two. "seconds" are from when all ranks begin until the last is
done, after one unmeasured turn at the greatest rate: of one turn, and of a pipeline's step the
least of three. In part "hidden" a transfer lasts from when both ends have posted it until it has
arrived, and is hidden while its receiver computes; seconds of transfers are summed over ranks and
steps, and step_seconds are of the shortest step.

    python tools/bench_links.py --markdown tables.md > links.json    # eight minutes on two cores
    python tools/bench_links.py --dry-run                            # smallest, without figures
"""

import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's
from bench_run import be_rank, parser_of, show

from tests.cluster.hosts import Host, cluster, missing

PARTS = ("one host", "gradients", "pipeline", "switch", "hidden")
PORT = 29500
SMALLEST = {"hidden": 64, "layers": 4, "rows": 4, "row_tokens": 128, "rates": [1600]}
_RANKS_PER_HOST = 2  # link_cases has it too, and imports torch


def measured(options: Namespace) -> list[dict[str, Any]]:
    """Open the hosts, start their ranks, and return what rank 0 measured.

    Raises:
        RuntimeError: if the ranks of a host failed.
    """
    with tempfile.TemporaryDirectory() as folder, cluster(2, f"{max(options.rates)}mbit") as hosts:
        result = Path(folder) / "result.json"
        asked = json.dumps({**vars(options), "result": str(result), "head": hosts[0].address()})
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--on-host"]
        processes = {
            host.number: host.start([*command, str(host.number), asked], environment)
            for host in hosts
        }
        try:
            _wait(hosts, processes)
        finally:
            for process in processes.values():
                process.kill()
        return json.loads(result.read_text())


def _wait(hosts: list[Host], processes: Mapping[int, "subprocess.Popen[str]"]) -> None:
    """Wait until the ranks of all hosts are done, or those of one have failed."""
    while None in (codes := [processes[host.number].poll() for host in hosts]):
        if any(codes):
            break
        time.sleep(0.1)
    for host, code in zip(hosts, codes, strict=True):
        if code:
            raise RuntimeError(f"the ranks on {host.name} ended with exit code {code}")


def on_host(number: int, options: dict[str, Any]) -> None:
    """Be a host's ranks: forks of this process, which has imported everything."""
    import link_trace  # noqa: F401 - before the forks
    import torch.multiprocessing as mp

    arguments = (number * _RANKS_PER_HOST, options)
    mp.start_processes(_rank, arguments, nprocs=_RANKS_PER_HOST, start_method="fork")


def _rank(local_rank: int, first: int, options: dict[str, Any]) -> None:
    be_rank(
        lambda world: _all_rows(world, options),
        Path(options["result"]),
        MASTER_ADDR=options["head"],
        MASTER_PORT=PORT,
        RANK=first + local_rank,
        LOCAL_RANK=local_rank,
        WORLD_SIZE=2 * _RANKS_PER_HOST,
        LOCAL_WORLD_SIZE=_RANKS_PER_HOST,
    )


def _all_rows(world: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure every part at every rate. Collective over the world."""
    import link_cases
    import link_trace

    from puzzle_align.runtime.groups.collectives import gather_everywhere

    makers = dict(zip(PARTS, (*link_cases.MAKERS, link_trace.hidden), strict=True))
    rates = sorted(options["rates"], reverse=True)
    rows: list[dict[str, Any]] = []
    for part in options["parts"]:
        began = time.perf_counter()
        for case in makers[part](world, options):
            if case.has_first_turn:
                _set_rate(world, rates[0])
                case.before()
                case.run()
                assert case.is_right(), f"{case.name}: the weights differ from loaded ones"
            for rate in rates:
                if gather_everywhere(time.perf_counter() - began)[0] > options["limit"]:
                    rows.append({"part": part, "case": case.name, "mbit": rate, "left_out": True})
                    continue
                rows.append(_row(world, case, rate))
                if world.rank == 0:
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _row(world: Any, case: Any, rate: int) -> dict[str, Any]:
    """Measure a case at a rate. Collective over the world."""
    _set_rate(world, rate)
    seconds, sent = min(_turn(case) for _ in range(case.repeats))
    counted = case.counted()
    return {
        "part": case.part,
        "case": case.name,
        "mbit": rate,
        "seconds": seconds,
        "bytes": sent,
        "counted": counted,
        "least_seconds": max(counted) * 8 / (rate * 1e6),
        **case.figures(),
    }


def _turn(case: Any) -> tuple[float, list[int]]:
    """Run a case once: seconds, and bytes that each host sent. Collective over the world."""
    from puzzle_align.runtime.groups.collectives import barrier, gather_everywhere

    case.before()
    barrier()
    sent = _sent()
    barrier()  # both hosts' counters are read: only now may any rank send
    started = time.perf_counter()
    case.run()
    seconds = time.perf_counter() - started
    barrier()
    taken = gather_everywhere((seconds, _sent() - sent))
    return max(seconds for seconds, _ in taken), [sent for _, sent in taken[::_RANKS_PER_HOST]]


def _set_rate(world: Any, rate: int) -> None:
    """Set the rate of the link each way. Collective over the world."""
    from puzzle_align.runtime.groups.collectives import barrier

    if world.rank % _RANKS_PER_HOST == 0:
        limit = f"root tbf rate {rate}mbit burst 256kb latency 50ms"
        subprocess.run(["tc", "qdisc", "replace", "dev", "eth0", *limit.split()], check=True)
    barrier()


def _sent() -> int:
    """Bytes that this host's interface to the link has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.lstrip().startswith("eth0:"))
    return int(line.split()[9])


def _parser() -> ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rates", type=int, nargs="+", default=[100, 400, 1600], help="Mbit/s (100 400 1600)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="all")
    add("--hidden", type=int, default=512, help="hidden size of the model that is switched (512)")
    add("--layers", type=int, default=8, help="its layers (8); gradients are of half the width")
    add("--rows", type=int, default=8, help="microbatches of a pipeline's step (8)")
    add("--row-tokens", type=int, default=512, help="tokens of a microbatch (512)")
    add("--bucket", type=int, default=64, help="MiB of a switch at once (64, as in runs)")
    add("--limit", type=float, default=300, help="seconds of a part; the rest is left out (300)")
    add("--markdown", type=Path, help="file for tables")
    add("--dry-run", action="store_true", help="the smallest models, to see that all parts run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print the measurements; 1 and one line on stderr where there can be no hosts."""
    options = _parser().parse_args(arguments)
    if options.dry_run:
        vars(options).update(SMALLEST)
    if why := missing():
        print(f"error: {why}", file=sys.stderr)
        return 1
    tables, options.markdown = options.markdown, None
    rows = measured(options)
    show({"settings": vars(options), "rows": rows})
    if tables is not None:
        from link_tables import markdown

        tables.write_text(markdown(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-host"]:
        on_host(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        sys.exit(main())
