"""Set-up for all tests."""

import pytest
from hypothesis import settings

from tests import fork_server

# No test is timed: on a machine with other work a case may take any time.
settings.register_profile("puzzle_align", deadline=None)
settings.load_profile("puzzle_align")


def pytest_configure(config: pytest.Config) -> None:
    """Start what a session's workers fork from; one without workers starts it when it must."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        fork_server.start_servers()
