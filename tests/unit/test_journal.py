"""A profile in the making: what is in the journal is there, and is of just these circumstances."""

import json

from puzzle_align.planning.costs.journal import Journal, UnitPoints
from puzzle_align.planning.costs.profile import OptimizerPoint, Time

HERE = {"device": "cpu", "repeats": 5}


def part(parameters: int) -> UnitPoints:
    time = Time(median=0.5, spread=0.25)
    return UnitPoints(optimizer=(OptimizerPoint(parameters=parameters, step=time),))


def test_parts_are_read_again(tmp_path) -> None:
    path = tmp_path / "points"
    journal = Journal(path, HERE)
    assert journal.parts == {} and not path.exists()
    journal.add("a", part(1))
    journal.add("b", part(2))
    again = Journal(path, HERE)
    assert again.parts == {"a": part(1), "b": part(2)}
    again.close()
    assert not path.exists()
    Journal(path, HERE).close()  # nothing to take away


def test_parts_of_other_circumstances_are_not_taken(tmp_path) -> None:
    path = tmp_path / "points"
    Journal(path, HERE).add("a", part(1))
    other = Journal(path, {**HERE, "repeats": 6})
    assert other.parts == {}
    other.add("a", part(2))
    assert Journal(path, HERE).parts == {"a": part(1)}


def test_a_line_that_is_cut_off_spoils_no_other(tmp_path) -> None:
    path = tmp_path / "points"
    Journal(path, HERE).add("a", part(1))
    Journal(path, HERE).add("b", part(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    journal = Journal(path, HERE)
    assert journal.parts == {"a": part(1)}
    journal.add("c", part(3))
    assert Journal(path, HERE).parts == {"a": part(1), "c": part(3)}


def test_lines_of_another_version_are_passed_over(tmp_path) -> None:
    path = tmp_path / "points"
    Journal(path, HERE).add("a", part(1))
    line = json.loads(path.read_text())
    line["part"]["colour"] = "red"
    path.write_text(f"{json.dumps(line)}\n[]\nno JSON\n")
    assert Journal(path, HERE).parts == {}
