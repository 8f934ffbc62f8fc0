"""Several hosts on one machine: network namespaces with names and folders of their own.

A host is a process that waits, and is process 1 of its namespaces (network, names, mounts,
processes): with it, all that runs on the host ends. It ends itself when its standard input does,
which the process that opened the cluster holds: so nothing is left behind, however that ends.
Addresses are 10.77.0.1, 10.77.0.2, ... and fd77::1, ...; each host has also 10.78.0.1, ... on a
second network. Names are node0, node1, ...; ``/etc/hosts`` has them with the first address.

With a rate within hosts, each has two more addresses, of two ranks that send one another: 10.77.1.1
is that of the first host's rank 0, 10.77.2.1 of its rank 1, on interfaces ``rank0`` and ``rank1``.
The loopback device then has a rate for each. Ranks have no networks of their own: a queue outside
the sender's network would drop packets, or delay other ranks'.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")


def missing() -> str:
    """Why this machine can have no hosts; empty if it can."""
    if os.geteuid():
        return "hosts on one machine need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"hosts on one machine need {', '.join(absent)}"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "ip", "link", "add", "name", "br", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class _Space:
    """A process that keeps namespaces, and its standard input."""

    process: subprocess.Popen[bytes]
    number: int  # of the process inside, which is process 1 there

    @classmethod
    def open(cls) -> "_Space":
        process = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.read(1)  # it is up
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return cls(process, int(children.read_text().split()[0]))

    def command(self, *words: str) -> list[str]:
        """The command line that runs another in these namespaces."""
        entered = ["nsenter", "--target", str(self.number), *_NAMESPACES, "--"]
        return [*entered, "env", f"--chdir={Path.cwd()}", *words]

    def run(self, line: str) -> None:
        subprocess.run(self.command(*line.split()), check=True)

    def network(self, line: str) -> None:
        """Run ``ip`` or ``tc`` in the network alone: it finds processes by their outer numbers."""
        target = ["nsenter", "--target", str(self.number), "--net", "--"]
        subprocess.run([*target, *line.split()], check=True)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Host:
    """One host; ``number`` from 0."""

    number: int
    switch: _Space
    names: str  # its ``/etc/hosts``
    rate: str
    local_rate: str  # of what each of two ranks receives from the other
    private: Sequence[Path]
    space: _Space = field(init=False)

    def __post_init__(self) -> None:
        """Start it."""
        self.revive()

    @property
    def name(self) -> str:
        """Host name."""
        return f"node{self.number}"

    def address(self, network: str = "10.77.0.") -> str:
        """Its address on a network: ``10.77.0.``, ``10.78.0.`` or ``fd77::``."""
        return f"{network}{self.number + 1}"

    def rank_address(self, local: int) -> str:
        """Address of one of two ranks, if there is a rate within the host."""
        return self.address(f"10.77.{local + 1}.")

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on the host; stdout and stderr go to ``output`` together."""
        return subprocess.Popen(
            self.space.command(*command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            text=True,
        )

    def cut(self) -> None:
        """Cut the links to the other hosts, which looks as if they were silent."""
        for letter in "hs":
            self.switch.network(f"ip link set {letter}{self.number} nomaster")

    def heal(self) -> None:
        """Undo ``cut``."""
        for letter, network in (("h", "main"), ("s", "second")):
            self.switch.network(f"ip link set {letter}{self.number} master {network}")

    def die(self) -> None:
        """End all that runs on the host at once, its network too."""
        self.space.close()

    def revive(self) -> None:
        """Start it again after ``die``: as it was, with nothing running."""
        self.space = _Space.open()
        _connect(self)
        self.space.run(f"hostname {self.name}")
        for file, text in (("/etc/hosts", self.names), ("/etc/resolv.conf", "")):
            with tempfile.NamedTemporaryFile("w") as own:
                own.write(text)
                own.flush()
                self.space.run(f"mount --bind {own.name} {file}")  # keeps it once it is deleted
        for path in self.private:
            self.space.run(f"mount -t tmpfs none {path}")

    def counters(self) -> dict[str, int]:
        """Bytes that the interface to the other hosts has received and sent."""
        lines = Path(f"/proc/{self.space.number}/net/dev").read_text().splitlines()
        (line,) = (line for line in lines if line.lstrip().startswith("eth0:"))
        values = line.split()
        return {"received": int(values[1]), "sent": int(values[9])}


@contextmanager
def cluster(
    number: int, rate: str = "", private: Sequence[Path] = (), *, local_rate: str = ""
) -> Iterator[list[Host]]:
    """Hosts, up until the context ends.

    Args:
        rate: of every link, each way, as ``tc`` writes it (``400mbit``); empty: the machine's own.
        private: folders that are empty and each host's own; all others are shared.
        local_rate: of what two ranks of a host send one another, each way.
    """
    with ExitStack() as stack:
        switch = _Space.open()
        stack.callback(switch.close)
        for network in ("main", "second"):
            switch.network(f"ip link add {network} type bridge")
            switch.network(f"ip link set {network} up")
        lines = [f"10.77.0.{n + 1} node{n}\nfd77::{n + 1} node{n}-v6\n" for n in range(number)]
        names = "127.0.0.1 localhost\n::1 localhost\n" + "".join(lines)
        hosts = []
        for place in range(number):
            host = Host(place, switch, names, rate, local_rate, private)
            stack.callback(host.die)
            hosts.append(host)
        yield hosts


def _connect(host: Host) -> None:
    """Give a host its two interfaces."""
    number, space, switch = host.number, host.space, host.switch
    space.network("ip link set lo up")
    links = (("h", "eth0", "main", "10.77.0.", 16), ("s", "eth1", "second", "10.78.0.", 24))
    for letter, inside, network, prefix, length in links:
        if f"{letter}{number}:" in Path(f"/proc/{switch.number}/net/dev").read_text():
            switch.network(f"ip link del {letter}{number}")  # left by the host before it
        switch.network(
            f"ip link add {letter}{number} type veth peer name {inside} netns {space.number}"
        )
        switch.network(f"ip link set {letter}{number} master {network} up")
        space.network(f"ip addr add {host.address(prefix)}/{length} dev {inside}")
        space.network(f"ip link set {inside} up")
    space.network(f"ip -6 addr add {host.address('fd77::')}/64 dev eth0 nodad")
    if host.rate:
        switch.network(_limit(f"h{number}", host.rate))
        space.network(_limit("eth0", host.rate))
    if host.local_rate:
        _limit_within(host)


def _limit_within(host: Host) -> None:
    """Give two ranks addresses of their own, and what is sent to each a rate."""
    network = host.space.network
    network("tc qdisc add dev lo root handle 1: htb")
    addresses = [host.rank_address(local) for local in range(2)]
    for local, own in enumerate(addresses):
        network(f"ip link add rank{local} type bridge")  # any kind: packets to it go by lo
        network(f"ip link set rank{local} up")
        network(f"ip addr add {own}/32 dev rank{local}")
        network(
            f"tc class add dev lo parent 1: classid 1:{local + 1} htb rate {host.local_rate}"
            " burst 256kb cburst 256kb quantum 65536"
        )
        network(
            f"tc filter add dev lo parent 1: protocol ip u32 match ip dst {own}/32"
            f" flowid 1:{local + 1}"
        )
    for local, (own, other) in enumerate(zip(addresses, reversed(addresses), strict=True)):
        # Who connects to a rank is the other one, with its address.
        network(f"ip route change local {own} dev rank{local} table local src {other}")


def _limit(interface: str, rate: str) -> str:
    return f"tc qdisc add dev {interface} root tbf rate {rate} burst 256kb latency 50ms"
