"""The command line called inside the test's process, and what it leaves behind put right."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch.distributed as dist

from puzzle_align.runtime.groups.world import shutdown_distributed
from tests.command import main

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


Command = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without launcher, whose groups are closed."""
    for name in LAUNCHER:
        monkeypatch.setenv(name, "")  # so that what the job sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    close_groups()


def close_groups() -> None:
    """Close the groups of a command that failed: its process would have ended with them open."""
    if dist.is_initialized():
        shutdown_distributed()


@pytest.fixture
def command(alone: None, capsys: pytest.CaptureFixture[str]) -> Command:
    """``command(*arguments)`` on one process: exit code, and the lines of stdout and stderr."""

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        try:
            code = main(arguments)
        finally:
            close_groups()
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err.splitlines()

    return call


@pytest.fixture
def train(command: Command) -> Command:
    """``train(*arguments)``, likewise."""
    return partial(command, "train")
