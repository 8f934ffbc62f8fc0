"""Run a command on several hosts of this machine, which have networks and names of their own.

python -m tests.cluster 2 --rate 400mbit -- bash launch/multi_node.sh --config dpo_tiny
"""

import argparse
import subprocess
import sys
from threading import Thread

from tests.cluster.hosts import Host, cluster, missing


def main() -> int:
    """Run the command; the exit code is the greatest of the hosts', or a signal's number."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description="Run a command on several hosts of this machine (network namespaces, as root).",
        epilog="The command gets NNODES, NPROC and HEAD, as launch/multi_node.sh takes them.",
    )
    parser.add_argument("hosts", type=int, help="number of hosts: node0, node1, ...")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a host (1)")
    parser.add_argument("--rate", default="", help="of each link, as tc writes it: 400mbit")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    options = parser.parse_args()
    if why := missing():
        parser.error(why)
    environment = {
        "NNODES": str(options.hosts),
        "NPROC": str(options.ranks),
        "HEAD": "node0:29500",
        "GLOO_SOCKET_IFNAME": "",
    }
    with cluster(options.hosts, options.rate) as hosts:
        parts = [host.start(options.command, environment, subprocess.PIPE) for host in hosts]
        shown = [
            Thread(target=_show, args=pair, daemon=True) for pair in zip(hosts, parts, strict=True)
        ]
        for thread in shown:
            thread.start()
        codes = [part.wait() for part in parts]
        for thread in shown:
            thread.join()
        for host in hosts:
            print(f"{host.name}: bytes {host.counters()}")
    return max(map(abs, codes))


def _show(host: Host, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{host.name}: {line}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
