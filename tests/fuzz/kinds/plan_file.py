"""``plan.json`` and ``profile.json``: what is accepted is what is written there, and in bounds."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.placement import job_plan
from puzzle_align.files.json_file import to_plain
from puzzle_align.planning.given_plan import open_plan
from puzzle_align.planning.measured import Measured
from puzzle_align.planning.plan_file import save_plan
from puzzle_align.planning.profile import load_profile, save_profile
from tests.fuzz.harness import Case
from tests.fuzz.mutate import damaged_bytes
from tests.fuzz.values import changed_json
from tests.unit.job_plans import OPTIONS
from tests.unit.plan_files import planned
from tests.unit.planner_spaces import SMALL, measured_of

_KEYS = {"actor.parallel": None, "actor.parallel.data_parallel_size": 2, "packing.row_tokens": 512}


class Kind:
    """See ``harness.Kind``."""

    limit_s = 8.0
    imports = ()

    def __init__(self, folder: Path) -> None:
        self.file = folder / "file.json"
        save_plan(planned("ppo_tiny", 2, _KEYS), self.file)
        self.plan = self.file.read_bytes()
        save_profile(measured_of(SMALL).profile, self.file)
        self.profile = self.file.read_bytes()

    def case(self, draw: random.Random) -> Case:
        """One of the two, damaged."""
        is_plan = draw.random() < 0.5
        good = self.plan if is_plan else self.profile
        if draw.random() < 0.3:
            what, data = damaged_bytes(draw, good)
        else:
            what, text = changed_json(draw, json.loads(good))
            data = text.encode()
        self.file.write_bytes(data)
        use = self._use_plan if is_plan else self._use_profile
        return Case(what, use, lambda found: _wrong(found, json.loads(data)))

    def _use_plan(self) -> Any:
        plan = open_plan(self.file)
        plan.check_world_size(2)
        job = load_file(find_config("ppo_tiny"), (), plan.decided)
        plan.check_job_plan(job, job_plan(job, OPTIONS, 2))
        return plan.file

    def _use_profile(self) -> Any:
        profile = load_profile(self.file)
        Measured(profile)
        return profile


def _wrong(found: Any, written: Any) -> str | None:
    plain = json.loads(json.dumps(to_plain(found)))
    if plain != written:
        return "something else than is written"
    if any(not math.isfinite(number) for number in _numbers(plain)):
        return "a number that is not finite"
    return None


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value
