"""Cases of every kind of foreign file end in one line, or in what the file says."""

import pytest

from tests.dist.spawn import run_alone
from tests.fuzz.harness import GOOD, Report, kind_names, run_kind

CASES = 40


def _run(first: int) -> dict[str, Report]:
    cases = range(first, first + CASES)
    return {name: run_kind(name, cases, seed=0, tick=lambda: None) for name in kind_names()}


@pytest.fixture(scope="module", params=[0, pytest.param(CASES, marks=pytest.mark.slow)])
def reports(request: pytest.FixtureRequest) -> dict[str, Report]:
    """Reports by kind; the fuzzers run in a process that has computed nothing, for it forks."""
    return run_alone(_run, request.param, timeout=500.0)


@pytest.mark.parametrize("name", kind_names())
def test_cases_end_in_one_line_or_in_what_the_file_says(
    reports: dict[str, Report], name: str
) -> None:
    report = reports[name]
    assert not report.findings, "\n".join(report.findings[:20])
    assert sum(report.counts[outcome] for outcome in GOOD) == CASES
    assert report.counts["refused"] >= CASES // 3  # the damage is damage
