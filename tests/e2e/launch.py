"""The software as a user starts it: under torchrun on this machine, or as if it were."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore

from tests import fork_server
from tests.dist.spawn import rank_environment

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "launch" / "train.py"
# dpo_tiny, made smaller still.
SMALL = (
    "--config",
    "dpo_tiny",
    "actor.model.config.hidden_size=32",
    "actor.model.config.intermediate_size=64",
    "data.num_synthetic=64",
    "packing.row_tokens=64",
    "data.max_length=64",
    "global_batch_size=16",
)


def python_path() -> str:
    """This checkout, before what was inherited: a GPU's host may bring Megatron by PYTHONPATH."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def torchrun(
    *arguments: str, script: Path = TRAIN, ranks: int = 2, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a script with ``arguments`` on ``ranks`` CPU processes; output and errors as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), str(script)]
    own = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path()}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    kept.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(
        [*command, *arguments], env={**kept, **own}, capture_output=True, text=True, timeout=timeout
    )


def run_job(
    *arguments: str, script: Path = TRAIN, ranks: int = 2, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """As ``torchrun``, for tests of what a job does: neither launcher nor imports run anew.

    The ranks are forks of a process that has imported everything. As under torchrun, the job's
    store is not theirs, and a rank that fails ends the others.
    """
    with _store() as port:
        return _run_forked(script, arguments, _environments(ranks, port), timeout)


@contextmanager
def running_job(
    *arguments: str, log: Path, script: Path = TRAIN, ranks: int = 2
) -> Iterator[list[fork_server.Process]]:
    """The ranks of a job as of ``run_job`` while the block runs; then they are killed, all at once.

    What they say is appended to ``log``.
    """
    with (
        _store() as port,
        log.open("a") as out,
        _forked(script, arguments, _environments(ranks, port), out, out) as processes,
    ):
        yield processes


@contextmanager
def _store() -> Iterator[int]:
    """A job's store, as a launcher keeps it; its port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def _environments(ranks: int, port: int) -> list[dict[str, str]]:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return [{**agent, **rank_environment(rank, ranks, port)} for rank in range(ranks)]


def run_tool(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As ``python script arguments``, in a fork of a process that has imported everything."""
    return _run_forked(script, arguments, [{}], timeout=300.0)


def _run_forked(
    script: Path, arguments: tuple[str, ...], environments: list[dict[str, str]], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` once for each of ``environments``, which come on top of this one."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with _forked(script, arguments, environments, out, err) as processes:
            code = _end_of_all(processes, timeout)
        return subprocess.CompletedProcess(arguments, code, _text(out), _text(err))


@contextmanager
def _forked(
    script: Path,
    arguments: tuple[str, ...],
    environments: list[dict[str, str]],
    out: IO[str],
    err: IO[str],
) -> Iterator[list[fork_server.Process]]:
    processes: list[fork_server.Process] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, environment in enumerate(environments):
                call = Path(folder) / f"call{number}"
                fork_server.write_call(
                    call, _run_script, script, arguments, environment=environment
                )
                outputs = (out.fileno(), err.fileno())
                processes.append(fork_server.fork(number, call, outputs))
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _run_script(script: Path, arguments: tuple[str, ...]) -> None:
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _end_of_all(processes: list[fork_server.Process], timeout: float) -> int:
    """Wait for all; the first failure's code, or 0. A failure asks the others to end."""
    deadline, failed = time.monotonic() + timeout, 0
    while None in (codes := [process.poll() for process in processes]):
        if any(codes) and not failed:
            failed = next(code for code in codes if code)
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("forked processes", timeout)
        time.sleep(0.02)
    return failed or next((code for code in codes if code), 0)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
