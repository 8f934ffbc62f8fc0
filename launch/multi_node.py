"""Start one host of a job, for ``multi_node.sh``: torchrun, with head and network found out."""

import fcntl
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from threading import Timer

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_JOIN_S = 600  # that hosts wait for each other, unless JOIN_TIMEOUT says otherwise
_RETRY_S = 1.0
_LATER_S = 3.0


class CannotStart(Exception):
    """One line says why."""


def parsed(head: str) -> tuple[str, int]:
    """Host and port of ``HEAD``: ``name:port``, ``10.0.0.1:port`` or ``[fd00::1]:port``."""
    host, _, port = head.rpartition(":")
    if not host or not port.isdigit():
        raise CannotStart(f"HEAD={head}: write host:port, with an IPv6 address in brackets")
    return host.removeprefix("[").removesuffix("]"), int(port)


def resolved(host: str, port: int) -> tuple[int, str]:
    """Address family and address of a host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f"its name is not known here ({error.strerror})"
        raise CannotStart(f"HEAD: {socket.gethostname()} cannot find {host}: {why}") from None
    family, *_, address = found[0]
    return family, str(address[0])


def own_address(family: int, address: str, port: int) -> str:
    """This host's address on the route to another; the same one if it is on this host."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # of a datagram socket: sends nothing
        except OSError as error:
            why = f"there is no route to it ({error.strerror})"
            raise CannotStart(f"HEAD: {socket.gethostname()}: {address}: {why}") from None
        return str(probe.getsockname()[0])


def interface_of(family: int, address: str) -> str | None:
    """Name of the interface that has an address of this host; None if it cannot be told."""
    if family == socket.AF_INET6:
        digits = ip_address(address.partition("%")[0]).packed.hex()
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def wait_for(address: str, port: int, seconds: float) -> None:
    """Wait until the head answers; CannotStart if it does not in time."""
    end, why = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), min(5.0, seconds)).close()
        except OSError as error:
            why = error.strerror or "no answer"
        else:
            return
        time.sleep(_RETRY_S)
    raise CannotStart(
        f"{socket.gethostname()} cannot reach the head, {address} port {port}, for {seconds:g} s "
        f"({why}): start the same line there, or open the way to it"
    )


def main(arguments: list[str]) -> int:
    """Run this host's part of the job; the exit code is torchrun's."""
    environ, seconds = os.environ, float(os.environ.get("JOIN_TIMEOUT", _JOIN_S))
    host, port = parsed(environ["HEAD"])
    family, address = resolved(host, port)
    own = own_address(family, address, port)
    is_head = own == address
    if (interface := interface_of(family, own)) is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environ[name] = environ.get(name) or interface
    if not is_head:
        wait_for(address, port, seconds)

    from torch.distributed import TCPStore, run
    from torch.distributed.elastic.rendezvous import RendezvousError

    # The head serves the store that torchrun meets in, from here on: it is one for a process.
    limit = timedelta(seconds=max(60.0, seconds))
    store = TCPStore(address, port, None, is_head, limit, wait_for_workers=False, multi_tenant=True)
    job = environ.get("JOB", "puzzle-align")
    names = f"hosts of {job}"
    store.append(names, f"{socket.gethostname()}\n")
    options = {
        "--nnodes": environ["NNODES"],
        "--nproc-per-node": environ.get("NPROC", "gpu"),
        "--max-restarts": environ.get("MAX_RESTARTS", "3"),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        "--rdzv-id": job,
        "--rdzv-conf": f"is_host={is_head},join_timeout={seconds:g},read_timeout=60",
        "--local-addr": own,
    }
    script = Path(__file__).with_name("train.py")

    def why() -> str:
        with suppress(RuntimeError):  # the head is gone
            came = ", ".join(sorted({*store.get(names).decode().split()}))
            return f"{came} came for NNODES={environ['NNODES']}"
        return f"the head, {address} port {port}, has ended"

    said = f"{socket.gethostname()} waited {seconds:g} s for its place in the job"
    # A host too many would wait until the job ends.
    timer = Timer(seconds + _LATER_S, lambda: _end_unless_started(f"{said}: {why()}"))
    timer.daemon = True
    timer.start()
    try:
        run.main([*(part for pair in options.items() for part in pair), str(script), *arguments])
    except RendezvousError as error:
        line = f"{said}: {why()}"
        time.sleep(_LATER_S * is_head)  # the others ask the head's store
        raise CannotStart(line) from error
    return 0


def _end_unless_started(line: str) -> None:
    """End with a line unless torchrun has started a process."""
    if not any(tasks.read_text() for tasks in Path("/proc/self/task").glob("*/children")):
        print(f"error: {line}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CannotStart as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
