"""Start one host of a job, for ``multi_node.sh``: torchrun, with head and network found out.

Hosts meet before each start of the job (``meeting``), then each runs torchrun, in this process. If
a rank fails or a host is lost, all ranks end (``runtime/liveness``), and the hosts that are left
meet again: so a host may come back, or a link. torchrun's own restarts are not used: a host that is
cut off for longer than its store's time-outs could not come back.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from threading import Lock, Thread
from uuid import uuid4

import psutil
from meeting import ASK_S, Answer, Meeting, Question, ask, serve

_MISTAKE = 2  # exit code of a rank that found a mistake in the job's config or files
_LATER_S = 3.0  # until all hosts have asked
_GRACE_S = 15.0  # from a failure on another host, of which the ranks tell, until this one is ended


class CannotStart(Exception):
    """One line says why."""


def parsed(head: str) -> tuple[str, int]:
    """Host and port of ``HEAD``: ``name:port``, ``10.0.0.1:port`` or ``[fd00::1]:port``."""
    host, _, port = head.rpartition(":")
    if not host or not port.isdigit():
        raise CannotStart(f"HEAD={head}: write host:port, with an IPv6 address in brackets")
    return host.removeprefix("[").removesuffix("]"), int(port)


def whole(environ: Mapping[str, str], key: str, default: str) -> int:
    """Value of a variable that is a whole number."""
    value = environ.get(key, default)
    if not value.isdigit():
        raise CannotStart(f"{key}={value}: write a whole number")
    return int(value)


def resolved(host: str, port: int) -> tuple[str, int]:
    """Address and port of a host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f"its name is not known here ({error.strerror})"
        raise CannotStart(f"HEAD: {socket.gethostname()} cannot find {host}: {why}") from None
    return str(found[0][4][0]), port


def own_address(address: str, port: int) -> str:
    """This host's address on the route to another; ``address`` itself if it is this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # of a datagram socket: sends nothing
        except OSError as error:
            why = f"there is no route to it ({error.strerror})"
            raise CannotStart(f"HEAD: {socket.gethostname()}: {address}: {why}") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address of this host; None if it cannot be told."""
    plain = address.partition("%")[0]
    for name, held in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == plain for each in held):
            return name
    return None


class Host:
    """This host's part of the job."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Find the head and the way to it, and set the interface for gloo and NCCL.

        Raises:
            CannotStart: the head's name is not known or there is no route; its port is taken.
        """
        self._seconds = whole(environ, "JOIN_TIMEOUT", "600")
        self._nnodes, self._nproc = whole(environ, "NNODES", ""), environ.get("NPROC", "gpu")
        self._job = environ.get("JOB", "puzzle-align")
        self._name, self._id = socket.gethostname(), uuid4().hex
        self._address, self._port = resolved(*parsed(environ["HEAD"]))
        self._environ = environ
        self._own = own_address(self._address, self._port)
        # The head's name may mean its loopback there (Debian's /etc/hosts): no way to others.
        is_loopback = ip_address(self._own.partition("%")[0]).is_loopback
        self._meeting: Meeting | None = None
        self._is_mistake = False
        self._over = ""  # why the head has ended the job
        if is_loopback or self._own == self._address:
            restarts = whole(environ, "MAX_RESTARTS", "3")
            self._meeting = Meeting(self._job, self._id, self._nnodes, restarts)
            try:
                serve(self._meeting, self._port)
            except OSError as error:
                why = f"{self._name} cannot serve port {self._port} ({error.strerror})"
                raise CannotStart(f"HEAD: {why}: choose another, or end what holds it") from None
        if is_loopback:
            self._own = ""
        else:
            self._choose_interface()

    def _choose_interface(self) -> None:
        """Set the interface of this host's address for gloo and NCCL, unless the user did."""
        interface = interface_of(self._own)
        if interface is not None:
            environ = self._environ
            environ["GLOO_SOCKET_IFNAME"] = environ.get("GLOO_SOCKET_IFNAME") or interface
            # Without "=" it would stand for all interfaces that begin so.
            environ["NCCL_SOCKET_IFNAME"] = environ.get("NCCL_SOCKET_IFNAME") or f"={interface}"

    def run(self, arguments: list[str]) -> int:
        """Start the job, again and again if it fails; the exit code.

        Raises:
            CannotStart: the hosts have not met in time, or the head has ended the job; NPROC is
                wrong here.
        """
        self._check_processes()
        failed = ""
        while True:
            answer = self._meet(failed)
            if not self._own and self._meeting is not None and self._meeting.address:
                self._own = self._meeting.address
                self._choose_interface()
            if self._ran(answer, arguments):
                if self._meeting is not None and self._meeting.is_awaited():
                    self._part("the job has come to its end")
                return 0
            if not self._may_go_on():
                return 1
            failed = answer.start

    def _check_processes(self) -> None:
        """Raise CannotStart for an NPROC that this host does not have: others would wait for it."""
        from torch.distributed.run import determine_local_world_size

        try:
            determine_local_world_size(self._nproc)
        except ValueError as error:
            why = f"{self._name}: {error}".rstrip(".")
            raise CannotStart(f"NPROC={self._nproc}: {why}; set NPROC to a number") from None

    def ask(self, waits: bool, failed: str = "") -> Answer:
        """Ask the head how the job is; OSError if it does not answer."""
        question = Question(self._job, self._id, self._name, waits, failed, self._is_mistake)
        if self._meeting is not None:
            return self._meeting.asked(question)
        answer = ask(self._address, self._port, question)
        self._over = self._over or answer.over
        return answer

    def _meet(self, failed: str) -> Answer:
        """Wait for this host's place in the next start."""
        heard, why, answer = time.monotonic(), "", None
        end = heard + self._seconds
        while time.monotonic() < end and not self._over:
            try:
                answer, why = self.ask(waits=True, failed=failed), ""
                heard = time.monotonic()
            except OSError as error:
                why = error.strerror or "no answer"
            else:
                is_next = answer.start != failed and self._id in answer.hosts
                if is_next and not answer.over:
                    return answer
            time.sleep(ASK_S)
        if self._over:
            raise CannotStart(f"{self._name}: {self._over}")
        if why or answer is None:
            ended = "the job has failed, and " if failed else ""
            raise CannotStart(
                f"{ended}{self._name} cannot reach the head, {self._address} port {self._port}, for"
                f" {time.monotonic() - heard:.0f} s ({why}): start the same line there, or open the"
                " way to it"
            )
        came = f"{', '.join(answer.came)} came for NNODES={self._nnodes}"
        said = f"{self._name} waited {self._seconds} s for its place in the job: {came}"
        self._part(said)
        raise CannotStart(said)

    def _may_go_on(self) -> bool:
        """On the head, open the next start; False if this was the last."""
        meeting = self._meeting
        if meeting is None:
            return True  # the head's answer tells
        if self._is_mistake:
            self.ask(waits=False)
        if meeting.end_start():
            start = f"start {meeting.num_restarts + 1} of {meeting.max_restarts + 1}"
            print(f"a host has failed: {start}, once {self._nnodes} hosts are there", flush=True)
            return True
        self._part(meeting.over)
        return False

    def _part(self, why: str) -> None:
        """Tell hosts that wait why the head ends, if this is the head."""
        if self._meeting is not None:
            self._meeting.over = why
            time.sleep(_LATER_S)

    def _ran(self, answer: Answer, arguments: list[str]) -> bool:
        """Run torchrun here; whether the job has come to its end."""
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        address = f"[{self._address}]" if ":" in self._address else self._address
        options = [
            f"--nnodes={self._nnodes}",
            f"--node-rank={answer.hosts.index(self._id)}",
            f"--nproc-per-node={self._nproc}",
            "--max-restarts=0",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={address}:{answer.port}",
            f"--rdzv-id={self._job}.{answer.start}",
            f"--rdzv-conf=timeout={self._seconds}",
            *([f"--local-addr={self._own}"] if self._own else []),
        ]
        observer = _Observer(self, answer.start, self._seconds)
        try:
            with observer:
                run.main([*options, str(Path(__file__).with_name("train.py")), *arguments])
        except SignalException:
            if not observer.has_ended_it:
                raise
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            self._is_mistake = _MISTAKE in codes
            print(f"{self._name}: {error}", file=sys.stderr, flush=True)
        except RuntimeError as error:  # torchrun's store is gone
            print(f"{self._name}: {error}", file=sys.stderr, flush=True)
        else:
            return True
        return False


class _Observer:
    """Thread that ends torchrun in this process where it would wait in vain."""

    def __init__(self, host: Host, start: str, seconds: int) -> None:
        self.has_ended_it = False
        self._host, self._start, self._seconds = host, start, seconds
        self._is_over, self._lock = False, Lock()

    def __enter__(self) -> None:
        Thread(target=self._observe, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True

    def _observe(self) -> None:
        began = time.monotonic()
        failed, has_ranks = 0.0, False  # seconds since a failure elsewhere
        while failed < _GRACE_S:
            time.sleep(ASK_S)
            if self._is_over:
                return
            has_ranks = has_ranks or _has_children()
            if not has_ranks and time.monotonic() > began + self._seconds + _LATER_S:
                line = f"torchrun has not started ranks in {self._seconds} s: a host is lost"
                print(f"error: {socket.gethostname()}: {line}", file=sys.stderr, flush=True)
                os._exit(1)  # torchrun waits for its store, and does not see signals
            if failed or self._has_failed():
                failed += ASK_S
        with self._lock:
            if not self._is_over:
                self.has_ended_it = True
                os.kill(os.getpid(), signal.SIGTERM)

    def _has_failed(self) -> bool:
        """Whether the start has failed on another host; False if the head cannot be reached."""
        try:
            answer = self._host.ask(waits=False)
        except ConnectionRefusedError:
            return True  # the head's process has ended, and torchrun's store with it
        except OSError:
            return False  # the ranks notice, if it lasts
        return answer.has_failed or answer.start != self._start or bool(answer.over)


def _has_children() -> bool:
    """Whether this process has any; also true on a kernel that does not tell."""
    files = list(Path("/proc/self/task").glob("*/children"))
    for file in files:
        with suppress(OSError):  # of a thread that has ended
            if file.read_text():
                return True
    return not files


if __name__ == "__main__":
    try:
        sys.exit(Host(os.environ).run(sys.argv[1:]))
    except CannotStart as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
