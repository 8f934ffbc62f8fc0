"""A rank's own failure and another's; the end of a process, and of a rank without a launcher."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError

from puzzle_align.files.messages import ending
from puzzle_align.runtime.liveness import failure
from puzzle_align.runtime.liveness.activity import activity
from puzzle_align.runtime.liveness.neighbours import Neighbour, neighbours, own_card
from puzzle_align.runtime.liveness.watch import Watch

CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    "error", [RuntimeError(CLOSED), DistBackendError("NCCL error"), DistNetworkError("no answer")]
)
def test_lost_connections_are_another_rank_s_failure(error: Exception) -> None:
    assert failure.lost_peer(error)
    with pytest.raises(ValueError) as wrapped:
        try:
            raise error
        except RuntimeError as caught:
            raise ValueError("the checkpoint could not be written") from caught
    assert failure.lost_peer(wrapped.value)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("bad row")])
def test_other_errors_are_this_rank_s_own(error: Exception) -> None:
    assert not failure.lost_peer(error)


def test_a_failure_is_reported_with_what_was_being_done(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(RuntimeError) as raised, activity("action actor:F3.0 (12 of 40)"):
        raise RuntimeError("out of memory\nby far")
    failure.report(raised.value)
    headline, *trace = capsys.readouterr().err.splitlines()
    assert headline == "rank 0 failed in action actor:F3.0 (12 of 40): RuntimeError: out of memory"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-3:] == [
        "RuntimeError: out of memory",
        "by far",
        "in action actor:F3.0 (12 of 40)",
    ]
    words = json.loads((tmp_path / "error.json").read_text())["message"]
    assert words["message"] == headline
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


class _FailedStream:
    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_failed_kernel_is_not_the_launcher_s_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread reports it; the watch's thread goes on."""
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _device: _FailedStream())
    watch = Watch(0, 1)
    watch._device = torch.device("cuda", 0)
    try:
        assert not watch._is_device_at_work()
    finally:
        watch.close()


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_without_the_kernel_s_boot_id_ranks_of_a_host_see_each_other(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text

    def read(path: Path, *args: str) -> str:
        if path.name == "boot_id":
            raise error(path)
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", read)
    with open(__file__, "rb") as memory:  # any file of this process
        here = own_card(memory.fileno())
        monkeypatch.setattr(socket, "gethostname", lambda: "another.host")
        elsewhere = own_card(memory.fileno())
        (seen,) = neighbours(0, [here, here, elsewhere])
    assert (seen.rank, seen.process) == (1, os.getpid())
    assert seen.activity is not None
    os.close(seen.activity)
    os.close(seen.descriptor)


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
        with launcher.stdout as output:
            assert output.readline() == "started\n"
            launcher.kill()
            launcher.wait()
            assert output.read() == "the launcher is gone: this rank ends\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with code 0"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")],
)
def test_every_ending_has_words(code: int, words: str) -> None:
    assert ending(code) == words
    how = f"os.kill(os.getpid(), {-code})" if code else "0"
    dead = subprocess.Popen([sys.executable, "-c", f"import os; {how}"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # as before its parent asks
    assert Neighbour(1, dead.pid, "", error_file=None, descriptor=0).ending() == words
    dead.wait()
