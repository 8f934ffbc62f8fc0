"""Cases of every kind of foreign file end in one line, or in what the file says."""

import json

import pytest

from tests.fuzz.conftest import CASES
from tests.fuzz.harness import GOOD, kind_names


@pytest.mark.parametrize("name", kind_names())
def test_cases_end_in_one_line_or_in_what_the_file_says(running, name):
    out, errors = running[name].communicate(timeout=500)
    assert out, errors.decode()
    report = json.loads(out)[name]
    assert not report["findings"], "\n".join(report["findings"][:20])
    assert sum(report["counts"].get(outcome, 0) for outcome in GOOD) == CASES
    assert report["counts"].get("refused", 0) > CASES // 20  # the damage is damage
