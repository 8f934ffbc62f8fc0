"""Hosts that meet for a job's starts: who gets which place, and when they meet anew."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[2] / "launch" / "meeting.py"
_SPEC = importlib.util.spec_from_file_location("meeting", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
meeting: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(meeting)


def _hosts(*names: str) -> list[Any]:
    return [meeting.Question("job", f"id of {name}", name, waits=True) for name in names]


def _met(num_hosts: int, *names: str) -> tuple[Any, list[Any]]:
    """A meeting whose head is the first host, and what all hosts ask of it, in order."""
    hosts = _hosts(*names)
    met = meeting.Meeting("job", hosts[0].host, num_hosts, max_restarts=1)
    for host in hosts:
        met.asked(host)
    return met, hosts


def test_places_are_by_name_after_the_head() -> None:
    met, hosts = _met(3, "node7", "node10", "node9")
    answer = met.asked(hosts[1])
    assert answer.hosts == ["id of node7", "id of node9", "id of node10"] and answer.port > 0


def test_a_host_too_many_waits_while_the_others_run() -> None:
    met, hosts = _met(2, "node0", "node1", "node2")
    answer = met.asked(hosts[2])
    assert answer.hosts == ["id of node0", "id of node1"]
    assert answer.came == ["node0", "node1", "node2"] and met.is_awaited()


def test_hosts_meet_anew_once_the_head_has_failed_too() -> None:
    met, (head, other) = _met(2, "node0", "node1")
    first = met.start
    failed = replace(other, failed=first)
    assert met.asked(failed).has_failed  # the head's observer sees it
    assert met.end_start() and met.asked(failed).hosts == []
    answer = met.asked(replace(head, failed=first))
    assert answer.hosts == [head.host, other.host] and answer.start != first
    assert not answer.has_failed and not met.end_start()  # max_restarts=1


def test_a_host_that_came_back_takes_part_in_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met, (head, _) = _met(2, "node0", "node1")
    back = replace(_hosts("node1")[0], host="another process there")
    assert back.host not in met.asked(back).hosts
    met.end_start()
    met.asked(head)
    assert met.asked(back).hosts == [head.host, back.host]
    met.end_start()
    # One that has not asked for a while is gone.
    _, other = _hosts("node0", "node1")
    met, _ = _met(3, "node0", "node1")
    now = meeting.time.monotonic()
    monkeypatch.setattr(meeting.time, "monotonic", lambda: now + 60)
    assert met.asked(other).came == ["node1"]


def test_a_mistake_in_the_job_ends_it_whoever_finds_it() -> None:
    met, (head, other) = _met(2, "node0", "node1")
    met.asked(replace(other, failed=met.start, is_mistake=True))
    assert not met.end_start()
    assert met.asked(head).over == "the job cannot run, as node1 says"


def test_questions_go_over_a_socket_and_another_job_s_head_is_told() -> None:
    met, (head, other) = _met(2, "node0", "node1")
    port = meeting._free_port()
    meeting.serve(met, port)
    assert meeting.ask("127.0.0.1", port, other) == met.asked(other)
    with pytest.raises(OSError, match="not the head of job other"):
        meeting.ask("127.0.0.1", port, replace(head, job="other"))
    with pytest.raises(OSError, match="in use"):
        meeting.serve(met, port)
