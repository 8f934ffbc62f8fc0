"""Hosts on one machine: links have the rate that was asked for, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import cluster

# Opens two hosts with work on them, and says by which numbers their processes are known outside.
OPENER = """
import sys, time
from pathlib import Path
from tests.cluster.hosts import cluster
with cluster(2, "100mbit", [Path(sys.argv[1])]) as hosts:
    for host in hosts:
        host.start(["sleep", "1000"])
    print(hosts[0].switch.number, *(host.space.number for host in hosts), flush=True)
    time.sleep(1000)
"""
MEGABYTES, RATE_MBIT, LOCAL_RATE_MBIT = 25, 100, 400
RECEIVER = f"""
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    left = {MEGABYTES} * 10**6
    while left:
        left -= len(connection.recv(2**20))
    connection.sendall(b".")
"""
SENDER = f"""
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
start = time.monotonic()
connection.sendall(bytes({MEGABYTES} * 10**6))
connection.recv(1)
print(time.monotonic() - start)
"""


def _inside(namespaces: set[str]) -> list[str]:
    """Processes in any of these networks."""
    inside = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/net") in namespaces:
                inside.append(process.name)
        except OSError:  # it has ended
            continue
    return inside


def _links() -> set[str]:
    """Network links of this machine itself."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def test_nothing_is_left_of_hosts_whose_opener_is_killed(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    links = _links()
    opener = subprocess.Popen(
        [sys.executable, "-c", OPENER, str(private)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert opener.stdout is not None
    numbers = opener.stdout.readline().split()
    spaces = {os.readlink(f"/proc/{number}/ns/net") for number in numbers}
    assert len(spaces) == 3 and len(_inside(spaces)) >= 5  # a switch, two hosts, and their work
    opener.send_signal(signal.SIGKILL)
    opener.wait()
    end = time.monotonic() + 10
    while left := _inside(spaces):
        assert time.monotonic() < end, f"processes {left} are left"
        time.sleep(0.05)
    assert _links() == links
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert [*tmp_path.iterdir()] == [private]  # where temporary files were, too


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _sent_seconds(pairs: list[tuple[list[str], list[str], str]]) -> list[float]:
    """Seconds in which every pair's sender, all at once, has sent its megabytes.

    Args:
        pairs: command lines that run Python at the receiver and at the sender; receiver's address.
    """
    code = [[*receiver, sys.executable, "-c", RECEIVER, at] for receiver, _, at in pairs]
    receivers = [_started(command) for command in code]
    for receiver in receivers:
        assert receiver.stdout is not None and receiver.stdout.readline() == "up\n"
    code = [[*sender, sys.executable, "-c", SENDER, to] for _, sender, to in pairs]
    senders = [_started(command) for command in code]
    seconds = [float(sender.communicate(timeout=60)[0]) for sender in senders]
    assert [receiver.wait(10) for receiver in receivers] == [0] * len(pairs)
    return seconds


def test_links_have_the_rate_that_was_asked_for_each_way() -> None:
    with cluster(2, f"{RATE_MBIT}mbit") as hosts:
        one, other = (host.space.command() for host in hosts)
        found = _sent_seconds([(one, other, "node0"), (other, one, "node1")])
    assert found == pytest.approx([8 * MEGABYTES / RATE_MBIT] * 2, rel=0.2)


def test_ranks_of_a_host_have_a_rate_each_way() -> None:
    with cluster(2, f"{RATE_MBIT}mbit", local_rate=f"{LOCAL_RATE_MBIT}mbit") as hosts:
        one, other = (host.space.command() for host in hosts)
        near, beside = hosts[0].rank_address(0), hosts[0].rank_address(1)
        within = _sent_seconds([(one, one, near), (one, one, beside)])
        between = _sent_seconds([(one, other, near), (other, one, hosts[1].rank_address(1))])
    for seconds, rate in ((within, LOCAL_RATE_MBIT), (between, RATE_MBIT)):
        alone = 8 * MEGABYTES / rate  # twice as long with one rate for both; more if others compute
        assert 0.8 * alone < min(seconds) and max(seconds) < 1.6 * alone
