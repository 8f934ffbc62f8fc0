"""Rewards from a server that fails at times, refuses, answers nonsense, or stops."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from puzzle_align.data.records import Content
from puzzle_align.runtime.liveness.failure import CannotGoOn
from puzzle_align.stages.rewards import http
from puzzle_align.stages.rewards.functions import Completions, TrainerState
from puzzle_align.stages.rewards.worker import RewardWorker
from tests.dist.split_rewards import mean_code

STATE = TrainerState(0, 1, 0.0)


class _Server(ThreadingHTTPServer):
    """Scores with ``mean_code``; ``failures`` of the requests get a ``fault``, or no answer.

    The first answer takes ``first_s`` seconds.
    """

    daemon_threads = True

    def __init__(
        self,
        failures: float = 0.0,
        fault: int = 503,
        answer: Any = None,
        status: int = 200,
        first_s: float = 0.0,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.failures, self.fault, self.answer, self.status = failures, fault, answer, status
        self.draw, self.lock = random.Random(0), threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.now, self.most, self.failed = 0, 0, 0
        self.first_s = first_s
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        own = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with own.lock:
            own.now += 1
            own.most = max(own.most, own.now)
            fails = own.draw.random() < own.failures
            own.failed += fails
            drops = fails and own.draw.random() < 0.5
            wait_s, own.first_s = own.first_s, 0.0
        time.sleep(wait_s)
        scores = mean_code(asked["completions"])
        body = json.dumps({"scores": scores} if own.answer is None else own.answer).encode()
        with own.lock:
            own.now -= 1
            if not fails:
                own.asked.append(asked)
        if drops:
            self.close_connection = True
            return
        self.send_response(own.fault if fails else own.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.002)
    servers: list[_Server] = []

    def start(**settings: Any) -> _Server:
        server = _Server(**settings)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def batch(num_prompts: int, each: int) -> Completions:
    prompts: list[Content] = [f"prompt {p}" for p in range(num_prompts) for _ in range(each)]
    texts: list[Content] = [f"response {n}" for n in range(len(prompts))]
    return Completions(prompts, texts, [[n] for n in range(len(prompts))], {"answer": [*texts]})


def scores_of(url: str, given: Completions, timeout: float | None = None) -> list[float | None]:
    function = http.HttpReward(url, timeout)
    return asyncio.run(
        function(given.prompts, given.completions, **given.columns, completion_ids=[], state=STATE)
    )


@pytest.mark.parametrize(("in_flight", "fault"), [(1, 429), (http.IN_FLIGHT, 503)])
def test_scores_are_the_server_s_though_a_fifth_of_its_requests_fail(
    in_flight: int, fault: int, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's responses are in one request; no more are under way than allowed.

    While the first is answered, others come if they may.
    """
    monkeypatch.setattr(http, "COMPLETIONS", 11)
    monkeypatch.setattr(http, "IN_FLIGHT", in_flight)
    server, given = serve(failures=0.2, fault=fault, first_s=0.3), batch(90, 5)
    assert scores_of(server.url, given) == mean_code(given.completions)
    assert server.failed >= 3
    assert server.most == 1 if in_flight == 1 else 1 < server.most <= in_flight
    sizes = [len(asked["completions"]) for asked in server.asked]
    assert sum(sizes) == 450 and max(sizes) <= http.COMPLETIONS
    places = [set(asked["prompts"]) for asked in server.asked]
    assert sum(map(len, places)) == 90
    assert all(asked["columns"] == {"answer": asked["completions"]} for asked in server.asked)


def test_columns_are_sent_as_any_server_reads_them(serve: Any) -> None:
    nested = [{"x": float("nan"), "y": [float("-inf"), 1]}, None, "a"]
    weights = {"weight": [float("nan"), 0.5, float("inf")], "nested": nested}
    server, given = serve(), replace(batch(1, 3), columns=weights)
    assert scores_of(server.url, given) == mean_code(given.completions)
    assert server.asked[0]["columns"] == {
        "weight": [None, 0.5, None],
        "nested": [{"x": None, "y": [None, 1]}, None, "a"],
    }


def test_a_group_larger_than_a_request_stays_whole(serve: Any) -> None:
    server = serve()
    scores_of(server.url, batch(2, http.COMPLETIONS + 1))
    sizes = [len(asked["completions"]) for asked in server.asked]
    assert sizes == [http.COMPLETIONS + 1] * 2


@pytest.mark.parametrize(("timeout", "num_asked"), [(1.2, 2), (60.0, 1), (None, 1)])
def test_an_attempt_has_its_share_of_the_call_s_time(
    timeout: float | None, num_asked: int, serve: Any
) -> None:
    """A slow judge is waited for; a request that hangs is sent again."""
    server, given = serve(first_s=0.6), batch(1, 3)
    assert scores_of(server.url, given, timeout) == mean_code(given.completions)
    time.sleep(max(0.0, 0.6 - (timeout or 60) / 6))  # for the answer that nobody reads
    assert len(server.asked) == num_asked


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"status": 404}, "refuses the request: status 404"),
        ({"answer": [1.0]}, "answers 1 scores for 6 completions"),
        ({"answer": {"score": 1}}, "answers None for 6 completions"),
        ({"answer": [float("nan")] * 6}, "answers no JSON, but b'[NaN, NaN"),
        ({"failures": 1.0}, "no answer in 6 attempts, the last: "),
    ],
)
def test_a_fault_is_one_line_that_names_the_server(serve: Any, settings: Any, what: str) -> None:
    server = serve(**settings)
    with pytest.raises(CannotGoOn) as caught:
        scores_of(server.url, batch(2, 3))
    assert str(caught.value).startswith(f"reward.url={server.url}: {what}")
    assert "\n" not in str(caught.value)


def test_a_server_that_has_stopped_is_asked_as_often(serve: Any) -> None:
    server = serve()
    server.shutdown()
    server.server_close()
    with pytest.raises(CannotGoOn, match=rf"^reward.url={server.url}: no answer in 6 attempts, "):
        scores_of(server.url, batch(2, 3))


def test_a_job_s_worker_asks_a_server_until_it_refuses(serve: Any) -> None:
    server, given = serve(), batch(2, 3)
    worker = RewardWorker([server.url], timeout=60.0)
    (signature,) = worker.signatures
    assert signature.is_async and signature.short_name == server.url.removeprefix("http://")
    (result,) = worker(given, STATE)
    assert result.rewards.tolist() == mean_code(given.completions)
    server.status = 404
    with pytest.raises(CannotGoOn, match=rf"^reward.url={server.url}: refuses the request: "):
        worker(given, STATE)
