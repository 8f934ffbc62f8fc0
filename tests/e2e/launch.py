"""The software as a user starts it: under torchrun on this machine, or as if it were."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import IO

import psutil
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


# Puts all ranks on the first GPU. NCCL refuses two ranks of one host there, so each gets a host of
# its own: they exchange through sockets, and take turns on the device.
_ON_ONE_GPU = 'LOCAL_RANK=0 NCCL_HOSTID=rank$RANK exec "$@"'
_NCCL_ON_ONE_GPU = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}


def python_path() -> str:
    """This checkout, before what was inherited: a GPU's host may bring Megatron by PYTHONPATH."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def torchrun(
    *arguments: str,
    script: Path = TRAIN,
    ranks: int = 2,
    timeout: float = 240.0,
    on_one_gpu: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a script with ``arguments`` on ``ranks`` processes; output and errors as text.

    On CUDA every rank has its own GPU, unless they are to be ``on_one_gpu``.
    """
    command = [sys.executable, "-m", "torch.distributed.run", *launcher_arguments(ranks)]
    own = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path()}
    if on_one_gpu:
        command += ["--no-python", "bash", "-c", _ON_ONE_GPU, "bash", sys.executable, "-u"]
        own |= _NCCL_ON_ONE_GPU
    command.append(str(script))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    kept.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(
        [*command, *arguments], env={**kept, **own}, capture_output=True, text=True, timeout=timeout
    )


def launched(
    *arguments: str, script: Path = TRAIN, ranks: int = 2, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run like ``torchrun``, without imports: the launcher is a fork of a process that did them.

    Asserts that nothing outlives the launcher.
    """
    mark = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        asked = (*launcher_arguments(ranks), str(script), *arguments)
        environment = {"GLOO_SOCKET_IFNAME": "lo", "JOB": mark}
        launcher = fork_launcher(Path(folder) / "call", asked, environment, out, err)
        try:
            code = launcher.wait(timeout)
        finally:
            launcher.kill()
            launcher.wait()
        assert not (left := [p for p in psutil.process_iter() if _mark_of(p) == mark]), left
        return subprocess.CompletedProcess(arguments, code, _text(out), _text(err))


def launcher_arguments(ranks: int) -> tuple[str, ...]:
    """Arguments for torchrun about the ranks of a job on this machine."""
    return ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks))


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("JOB")
    except psutil.Error:
        return None


def fork_launcher(
    call: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: IO[str],
    err: IO[str],
) -> fork_server.Process:
    """Start torchrun as a fork, whose ranks are forks of it; ``call`` is a file for the call."""
    fork_server.write_call(call, _be_launcher, arguments, environment=environment)
    return fork_server.fork(0, call, (out.fileno(), err.fileno()))


def _be_launcher(arguments: Sequence[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    gates: list[tuple[int, int]] = []

    def start(_handler: object, command: Sequence[str], environment: dict[str, str]) -> _Rank:
        # A rank that ran at once would connect to the launcher's store, whose thread then looks up
        # its address under a lock of libc: a rank forked meanwhile would wait for it forever.
        if environment["LOCAL_RANK"] == "0":
            gates.append(os.pipe())
        rank = _Rank(command, environment, gates[-1])
        if int(environment["LOCAL_RANK"]) + 1 == int(environment["LOCAL_WORLD_SIZE"]):
            for descriptor in gates.pop():
                os.close(descriptor)
        return rank

    vars(subprocess_handler)["SubprocessHandler"]._popen = start
    _as_main(lambda: run.main(list(arguments)))


class _Rank:
    """A rank as torchrun's agent sees it: what it uses of ``subprocess.Popen``.

    It begins when all that hold the second end of its ``gate``, a pipe, have closed it.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], gate: tuple[int, int]
    ) -> None:
        _, unbuffered, script, *arguments = command
        assert unbuffered == "-u"
        work = (environment, Path(script), tuple(arguments), gate)
        self._process = get_context("fork").Process(target=_be_rank, args=work)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit code, or minus the signal that ended it; None as long as it lives."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return code


def _be_rank(
    environment: dict[str, str], script: Path, arguments: tuple[str, ...], gate: tuple[int, int]
) -> None:
    """Run a script as a new process would: with none of the launcher's files and handlers."""
    os.close(gate[1])
    os.read(gate[0], 1)  # the end of the file
    os.setsid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_server.set_environment(environment)
    fork_server.draw_seeds()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _as_main(lambda: _run_script(script, arguments))


def _as_main(program: Callable[[], object]) -> None:
    """Run a program and show its error as Python itself does."""
    try:
        program()
    except Exception:  # noqa: BLE001 - whatever it is
        traceback.print_exc()
        sys.exit(1)


def run_job(
    *arguments: str, script: Path = TRAIN, ranks: int = 2, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run like ``torchrun``, to test a job alone: neither launcher nor imports run anew.

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
    """Run ``python script arguments`` in a fork of a process that has imported everything."""
    return _run_forked(script, arguments, [{}], timeout=560.0)


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
