"""Hosts that find each other, or say in one line why they do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import cluster
from tests.cluster.jobs import Part, start

SHORT = ("max_steps=2", "checkpoint.save_every=0")
HEADS = {
    "second network": "10.78.0.1:29500",  # node0 is 10.77.0.1 by its name
    "name": "node0:29500",
    "address": "10.77.0.1:29500",
    "IPv6": "[fd77::1]:29500",
    "name of IPv6": "node0-v6:29500",
}


@pytest.mark.slow  # by the second network a job starts whose link is cut (test_cuts.py)
@pytest.mark.parametrize("way", HEADS)
def test_a_job_starts_however_its_head_is_named(way: str, tmp_path: Path) -> None:
    with cluster(2) as hosts:
        parts = start(hosts, tmp_path, *SHORT, head=HEADS[way])
        for part in parts:
            assert part.ended(100) == 0, part.text
        on_main = sum(hosts[0].counters().values())
    assert "eval accuracy" in parts[0].text and "eval accuracy" not in parts[1].text
    # Weights and activations are megabytes: they went by the network of the head's address.
    assert (on_main > 2**20) == (way != "second network")


INTERFACES = """
import os, sys
sys.path.insert(0, "launch")
from multi_node import Host
Host(os.environ)
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""


@pytest.mark.parametrize(
    ("chosen", "found"),
    [({}, "eth1 =eth1"), ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib"}, "lo ib")],
)
def test_interfaces_are_those_of_the_way_to_the_head_or_the_user_s(
    chosen: dict[str, str], found: str
) -> None:
    unset = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}
    environment = {"HEAD": "10.78.0.1:29500", "NNODES": "2", **unset, **chosen}
    with cluster(2) as hosts:
        for host in hosts:  # the head and another
            asked = host.start([sys.executable, "-c", INTERFACES], environment, subprocess.PIPE)
            assert asked.communicate()[0] == f"{found}\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["localhost", "node0"])
def test_a_head_may_know_itself_by_its_loopback_address(name: str, tmp_path: Path) -> None:
    """By ``localhost`` as Kubeflow's operator has it, by its own name as Debian does.

    Of two ranks gloo lets that with the smaller address wait for the other's connection: here it is
    the head's that is connected to.
    """
    own = tmp_path / "hosts"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 node0\n")
    with cluster(2) as hosts:
        for host in hosts:
            host.space.network("ip addr flush dev eth1")
            host.space.network(f"ip addr add {host.address('192.168.78.')}/24 dev eth1")
        hosts[0].space.run(f"cp {own} /etc/hosts")
        parts = start(hosts[:1], tmp_path, *SHORT, head=f"{name}:29500")
        parts += start(hosts[1:], tmp_path, *SHORT, head="192.168.78.1:29500")
        for part in parts:
            assert part.ended(100) == 0, part.text


def _last_line(part: Part) -> str:
    return part.text.splitlines()[-1]


SILENT = "error: node1 cannot reach the head, 10.77.0.1 port 29500, for"


def test_a_head_that_does_not_answer_is_named_in_time(tmp_path: Path) -> None:
    with cluster(2) as hosts:
        hosts[0].cut()
        (cut,) = start(hosts[1:], tmp_path / "cut", JOIN_TIMEOUT="3")
        # Its imports and its exit take as long as the machine likes; it says how long it has asked.
        assert cut.ended(40) == 1
    assert cut.text.startswith((f"{SILENT} 3 s", f"{SILENT} 4 s")) and cut.text.count("\n") == 1


@pytest.mark.slow
def test_what_is_wrong_with_the_way_to_the_head_is_said(tmp_path: Path) -> None:
    with cluster(2) as hosts:
        (early,) = start(hosts[1:], tmp_path / "early", JOIN_TIMEOUT="1")
        assert early.ended(20) == 1
        (unknown,) = start(hosts[:1], tmp_path / "unknown", head="nobody:29500")
        assert unknown.ended(20) == 1
        (wrong,) = start(hosts[:1], tmp_path / "wrong", NPROC="many")
        assert wrong.ended(60) == 1
    assert early.text.startswith(f"{SILENT} 1 s (Connection refused): start the same line there")
    assert unknown.text.startswith("error: HEAD: node0 cannot find nobody: its name is not known")
    assert early.text.count("\n") == unknown.text.count("\n") == 1
    assert _last_line(wrong).startswith("error: NPROC=many: node0: ")


@pytest.mark.slow
def test_too_few_hosts_are_named(tmp_path: Path) -> None:
    with cluster(2) as hosts:
        parts = start(hosts, tmp_path, NNODES="3", JOIN_TIMEOUT="4")
        for part in parts:
            assert part.ended(40) == 1
            name = part.host.name
            said = f"error: {name} waited 4 s for its place in the job: node0, node1 came for NNOD"
            assert _last_line(part) == f"{said}ES=3"
            assert "Traceback" not in part.text


@pytest.mark.slow
def test_a_host_too_many_is_told(tmp_path: Path) -> None:
    with cluster(3) as hosts:
        parts = start(hosts, tmp_path, "max_steps=300", JOIN_TIMEOUT="8")
        codes = sorted(part.ended(150) for part in parts)
        assert codes == [0, 0, 1]
    (left_out,) = (part for part in parts if part.process.returncode)
    assert _last_line(left_out).endswith("node0, node1, node2 came for NNODES=2")
    assert left_out.host.number > 0


SRUN = """#!/usr/bin/env bash
# srun on hosts of this machine: the command on each, by nsenter; ends with the worst exit code
shift
worst=0
pids=()
for number in $HOSTS; do
    nsenter --target "$number" --net --uts --ipc --mount --pid -- env --chdir="$PWD" "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit "$worst"
"""
# Who reads the first line alone would end it before the second.
SCONTROL = "#!/usr/bin/env bash\necho node0\nsleep 0.2\necho node1\n"


@pytest.mark.slow
def test_slurm_s_script_starts_a_job(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    with cluster(2) as hosts:
        environment = {
            **os.environ,
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOSTS": " ".join(str(host.space.number) for host in hosts),
            "SLURM_JOB_ID": "123",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "NPROC": "1",
            "GLOO_SOCKET_IFNAME": "",
        }
        command = ["bash", "launch/train.sbatch", "--config", "dpo_tiny", *SHORT]
        own = [f"output_dir={tmp_path}/out", "data.num_synthetic=64"]
        done = subprocess.run(
            [*command, *own], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "eval accuracy" in done.stderr + done.stdout
