"""Hosts of a job meet before each start of it: the head keeps who is there, all ask it each second.

Each question is a connection of its own with a time-out, and one line of JSON each way. (torch's
store, once connected, waits for hours for a host that is cut off.)
"""

import json
import re
import socket
import socketserver
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from threading import Lock, Thread
from uuid import uuid4

ASK_S = 1.0  # between questions
_ANSWER_S = 5.0  # for a question and its answer
_SILENT_S = 15.0  # after which a host that waits for its place counts as gone


@dataclass(frozen=True)
class Question:
    """A host tells how it is."""

    job: str
    host: str  # of this process: no two have the same
    name: str
    waits: bool  # for a place in a start
    failed: str = ""  # the start that has failed on this host
    is_mistake: bool = False  # in the job, which ends if its first start finds one


@dataclass(frozen=True)
class Answer:
    """State of the job.

    Attributes:
        start: name of the start that runs, or that hosts meet for.
        hosts: those that take part in it, in the order of their ranks; empty until all are there.
        port: of torchrun's store on the head.
        has_failed: whether it has failed on some host.
        came: names of the hosts in it, and of those that wait.
        over: why there is no other start; empty while there may be one.
    """

    start: str
    hosts: list[str]
    port: int
    has_failed: bool
    came: list[str]
    over: str


@dataclass
class Meeting:
    """The head's list of hosts. Methods may be called from several threads."""

    job: str
    head: str
    num_hosts: int
    max_restarts: int
    over: str = ""
    num_restarts: int = 0
    address: str = ""  # of the head, by which another host has reached it
    _life: str = field(default_factory=lambda: uuid4().hex[:8])  # a head that died begins anew
    _names: dict[str, str] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)  # hosts that wait, in order
    _hosts: list[str] = field(default_factory=list)
    _port: int = 0
    _has_failed: bool = False
    _lock: Lock = field(default_factory=Lock)

    @property
    def start(self) -> str:
        """Name of the start that runs, or that hosts meet for."""
        return f"{self._life}.{self.num_restarts}"

    def asked(self, question: Question) -> Answer:
        """Note how a host is, and tell it the job's state."""
        with self._lock:
            now = time.monotonic()
            has_failed = question.failed == self.start
            self._has_failed |= has_failed
            if question.is_mistake and not self.num_restarts:
                self.over = f"the job cannot run, as {question.name} says"
            self._names[question.host] = question.name
            if question.waits and (has_failed or question.host not in self._hosts):
                self._heard.setdefault(question.host, now)
                self._heard[question.host] = now
            self._heard = {h: t for h, t in self._heard.items() if now - t < _SILENT_S}
            is_complete = len(self._heard) >= self.num_hosts
            if not self._hosts and self.head in self._heard and is_complete:
                self._begin()
            came = [self._names[host] for host in (*self._hosts, *self._heard)]
            state = (self.start, self._hosts, self._port, self._has_failed)
            return Answer(*state, sorted(dict.fromkeys(came), key=_natural), self.over)

    def end_start(self) -> bool:
        """Begin to meet for the next start; False if there is none left."""
        with self._lock:
            self._has_failed = True
            if self.num_restarts >= self.max_restarts:
                self.over = self.over or f"MAX_RESTARTS={self.max_restarts}: the job has failed"
            if self.over:
                return False
            self.num_restarts += 1
            self._hosts, self._has_failed = [], False
            return True

    def is_awaited(self) -> bool:
        """Whether a host waits for its place."""
        return bool(self._heard)

    def _begin(self) -> None:
        """Give places to the head and to those that came first: the head's is the first."""
        others = [host for host in self._heard if host != self.head][: self.num_hosts - 1]
        others.sort(key=lambda host: _natural(self._names[host]))
        self._hosts = [self.head, *others]
        self._heard = {h: t for h, t in self._heard.items() if h not in self._hosts}
        self._port = _free_port()


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: node2 before node10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _free_port() -> int:
    with closing(_listening(0)) as probe:
        return int(probe.getsockname()[1])


def _listening(port: int) -> socket.socket:
    """Socket on all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def serve(meeting: Meeting, port: int) -> None:
    """Answer questions in the background; OSError if the port is taken."""

    class Handler(socketserver.StreamRequestHandler):
        timeout = _ANSWER_S

        def handle(self) -> None:
            question = Question(**json.loads(self.rfile.readline()))
            if question.job == meeting.job:
                meeting.address = self.request.getsockname()[0].removeprefix("::ffff:")
                self.wfile.write(f"{json.dumps(asdict(meeting.asked(question)))}\n".encode())

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore who connects and does not ask, as a scanner of ports does."""

    server = Server(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = _listening(port)
    Thread(target=server.serve_forever, daemon=True).start()


def ask(address: str, port: int, question: Question) -> Answer:
    """Ask the head; OSError if it does not answer, or if it is another job's."""
    with socket.create_connection((address, port), _ANSWER_S) as connection:
        connection.sendall(f"{json.dumps(asdict(question))}\n".encode())
        line = connection.makefile(encoding="utf-8", errors="replace").readline()
    try:
        return Answer(**json.loads(line))
    except (ValueError, TypeError):
        raise OSError(0, f"what answers is not the head of job {question.job}") from None
