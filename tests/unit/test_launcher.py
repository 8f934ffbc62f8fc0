"""A rank that is orphaned while it starts ends, also where the job's store lives on elsewhere."""

import os
import socket
import subprocess
import sys

LAUNCHER = "import signal, subprocess, sys; subprocess.Popen(sys.argv[1:]); signal.pause()"
RANK = """
import os, time
from puzzle_align.runtime.liveness.launcher import end_with_launcher
launcher = os.getppid()
print("started", flush=True)
while os.getppid() == launcher:
    time.sleep(0.01)
end_with_launcher()
print("goes on", flush=True)
"""


def test_a_rank_whose_launcher_dies_while_it_starts_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:  # another node's
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, sys.executable, "-c", RANK],
            env={**os.environ, **place, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert launcher.stdout is not None
        with launcher.stdout as told:
            assert told.readline() == "started\n"
            launcher.kill()
            launcher.wait()
            assert told.read() == "the launcher is gone: this rank ends\n"
