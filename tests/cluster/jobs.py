"""Jobs of two ranks, one on each of two hosts, as ``launch/multi_node.sh`` starts them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Host

TIMEOUT_S = 10  # of the ranks, whose imports end seconds apart beside other work
END_S = 15  # more, until all have ended
JOB = (
    "--config",
    "dpo_tiny",
    "data.num_synthetic=64",
    "actor.parallel.pipeline_model_parallel_size=2",
    f"engine.distributed_timeout={TIMEOUT_S}",
    "telemetry.tensorboard=false",
)


@dataclass
class Part:
    """A host's part of a job, and its log."""

    host: Host
    process: subprocess.Popen[str]
    log: Path

    @property
    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ended(self, seconds: float) -> int:
        """The exit code, once it has ended by itself; fails after some seconds."""
        return self.process.wait(seconds)

    def ranks(self) -> list[str]:
        """Processes that train on the host."""
        words = self.host.space.command("pgrep", "-f", "launch/train.py")
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        assert found.returncode in (0, 1), found.stderr
        return found.stdout.split()


def start(
    hosts: Sequence[Host], folder: Path, *overrides: str, head: str = "node0:29500", **keys: str
) -> list[Part]:
    """Start a job on hosts; ``keys`` are variables of ``launch/multi_node.sh``."""
    environment = {
        "NNODES": "2",
        "HEAD": head,
        "NPROC": "1",
        "MAX_RESTARTS": "0",
        "JOIN_TIMEOUT": "60",
        "GLOO_SOCKET_IFNAME": "",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **keys,
    }
    folder.mkdir(exist_ok=True)
    parts = []
    for host in hosts:
        log = folder / f"{host.name}.log"
        command = ["bash", "launch/multi_node.sh", *JOB, f"output_dir={folder}/out", *overrides]
        with log.open("w") as file:
            parts.append(Part(host, host.start(command, environment, file), log))
    return parts


def import_seconds(hosts: Sequence[Host], module: str) -> float:
    """Measure a module's import, by a process on each of the hosts at once."""
    began = time.monotonic()
    importing = [host.start([sys.executable, "-c", f"import {module}"]) for host in hosts]
    assert all(process.wait() == 0 for process in importing)
    return time.monotonic() - began


def until(is_there: Callable[[], bool], parts: Sequence[Part], seconds: float = 200) -> None:
    """Wait until something holds; fails if a part ends before, or after some seconds."""
    end = time.monotonic() + seconds
    while not is_there():
        for part in parts:
            assert part.process.poll() is None and time.monotonic() < end, part.text[-2000:]
        time.sleep(0.02)


def wait_for(part: Part, text: str) -> None:
    """Wait until a part has written a text."""
    until(lambda: text in part.text, [part])
