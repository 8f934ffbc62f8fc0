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
from threading import Thread

_SIOCGIFADDR = 0x8915  # linux/sockios.h
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


def join_timeout(value: str) -> int:
    """``JOIN_TIMEOUT`` in seconds."""
    if not value.isdigit() or not int(value):
        raise CannotStart(f"JOIN_TIMEOUT={value}: write whole seconds")
    return int(value)


def resolved(host: str, port: int) -> tuple[int, str, int]:
    """Address family, address and port of a host."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        why = f"its name is not known here ({error.strerror})"
        raise CannotStart(f"HEAD: {socket.gethostname()} cannot find {host}: {why}") from None
    family, *_, address = found[0]
    return family, str(address[0]), port


def is_own(family: int, address: str) -> bool:
    """Whether an interface of this host has the address."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def own_address(family: int, address: str, port: int) -> str:
    """This host's address on the route to another, or to itself."""
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


def wait_for(address: str, port: int, seconds: int) -> None:
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
        f"{socket.gethostname()} cannot reach the head, {address} port {port}, for {seconds} s "
        f"({why}): start the same line there, or open the way to it"
    )


def main(arguments: list[str]) -> int:
    """Run this host's part of the job; the exit code is torchrun's."""
    environ, seconds = os.environ, join_timeout(os.environ.get("JOIN_TIMEOUT", "600"))
    family, address, port = resolved(*parsed(os.environ["HEAD"]))
    is_head = is_own(family, address)
    own = own_address(family, address, port)
    # Where the head's name means its loopback (Debian's /etc/hosts), that is no way to the others.
    is_known = not ip_address(own.partition("%")[0]).is_loopback
    if is_known and (interface := interface_of(family, own)) is not None:
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
    options = [
        f"--nnodes={environ['NNODES']}",
        f"--nproc-per-node={environ.get('NPROC', 'gpu')}",
        f"--max-restarts={environ.get('MAX_RESTARTS', '3')}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={f'[{address}]' if ':' in address else address}:{port}",
        f"--rdzv-id={job}",
        f"--rdzv-conf=is_host={is_head},join_timeout={seconds},read_timeout=60",
        *([f"--local-addr={own}"] if is_known else []),
    ]

    def why() -> str:
        with suppress(RuntimeError):  # the head is gone
            came = ", ".join(sorted({*store.get(names).decode().split()}))
            return f"{came} came for NNODES={environ['NNODES']}"
        return f"the head, {address} port {port}, has ended"

    said = f"{socket.gethostname()} waited {seconds} s for its place in the job"

    def end_in_time() -> None:
        """End this process, which would wait until the job ends if it is a host too many."""
        end = time.monotonic() + seconds + _LATER_S
        while time.monotonic() < end:
            if any(tasks.read_text() for tasks in Path("/proc/self/task").glob("*/children")):
                return  # torchrun has started ranks
            time.sleep(_RETRY_S)
        print(f"error: {said}: {why()}", file=sys.stderr, flush=True)
        os._exit(1)

    Thread(target=end_in_time, daemon=True).start()
    try:
        run.main([*options, str(Path(__file__).with_name("train.py")), *arguments])
    except RendezvousError as error:
        line = f"{said}: {why()}"
        time.sleep(_LATER_S * is_head)  # the others ask the head's store
        raise CannotStart(line) from error
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CannotStart as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
