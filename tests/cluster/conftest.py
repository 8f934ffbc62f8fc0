"""Tests on several hosts are skipped where there can be none."""

import pytest

from tests.cluster.hosts import missing

WHY = missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, with the reason."""
    for item in items:
        if WHY and "tests/cluster/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=WHY))
