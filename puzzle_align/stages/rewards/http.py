"""Rewards from a server: a function for each ``reward.url``.

A request is a POST of a JSON object with ``prompts`` and ``completions`` (lists, as functions get
them) and the prompts' other columns under ``columns``, with null for NaN at any depth. The answer
is a list of as many scores, or an object with it as ``scores``; null where no score applies. All
responses to a prompt are in one request.
"""

import asyncio
import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from puzzle_align.files.messages import shown
from puzzle_align.runtime.liveness.failure import CannotGoOn

IN_FLIGHT = 8  # requests at once, of a rank
COMPLETIONS = 32  # in a request, unless a prompt has more
ATTEMPTS, FIRST_WAIT_S = 6, 0.25  # each wait is twice the one before
_RETRIED = (408, 425, 429)  # statuses that a server may leave behind, beside all from 500 on


class HttpReward:
    """An asynchronous reward function that asks a server."""

    def __init__(self, url: str, timeout: float | None = None) -> None:
        """``timeout``: of a call, in seconds; each attempt of a request has its share of it."""
        self._url = url
        self._attempt_s = None if timeout is None else timeout / ATTEMPTS
        self.__name__ = url.partition("://")[2].rstrip("/")  # in metrics

    async def __call__(
        self, prompts: list[Any], completions: list[Any], **given: Any
    ) -> list[float | None]:
        """Return the server's scores; CannotGoOn, one line, if it does not give them."""
        columns = {
            name: _plain(values)
            for name, values in given.items()
            if isinstance(values, list) and name != "completion_ids"
        }
        turns = asyncio.Semaphore(IN_FLIGHT)

        async def scores_of(part: slice) -> list[float | None]:
            asked = {
                "prompts": prompts[part],
                "completions": completions[part],
                "columns": {name: values[part] for name, values in columns.items()},
            }
            async with turns:
                body = json.dumps(asked, allow_nan=False).encode()
                return await self._ask(body, len(completions[part]))

        parts = await asyncio.gather(*map(scores_of, _parts(prompts)))
        return [score for part in parts for score in part]

    async def _ask(self, body: bytes, number: int) -> list[float | None]:
        """Ask until there is an answer, or no more attempts."""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                return self._scores(await asyncio.to_thread(self._post, body), number)
            except urllib.error.HTTPError as error:
                fault = f"status {error.code} {shown(error.reason)}"
                if error.code < 500 and error.code not in _RETRIED:
                    raise self._fault(f"refuses the request: {fault}") from error
            except (OSError, http.client.HTTPException) as error:
                fault = shown(f"{type(error).__name__}: {error}")
        raise self._fault(f"no answer in {ATTEMPTS} attempts, the last: {fault}")

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, body, headers)
        with urllib.request.urlopen(request, timeout=self._attempt_s) as answer:
            return answer.read()

    def _scores(self, body: bytes, number: int) -> list[float | None]:
        try:
            scores = json.loads(body, parse_constant=_refuse)
        except ValueError as error:
            raise self._fault(f"answers no JSON, but {shown(repr(body[:80]))}") from error
        if isinstance(scores, dict):
            scores = scores.get("scores")
        if not isinstance(scores, list) or len(scores) != number:
            what = f"{len(scores)} scores" if isinstance(scores, list) else shown(repr(scores))
            raise self._fault(f"answers {what} for {number} completions")
        return scores

    def _fault(self, what: str) -> CannotGoOn:
        cure = "mend the server, and run the same command again"
        return CannotGoOn(f"reward.url={shown(self._url)}: {what}; {cure}")


def _refuse(constant: str) -> None:
    """Refuse NaN and infinities, which Python reads and JSON does not have."""
    raise ValueError(constant)


def _plain(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parts(prompts: Sequence[Any]) -> Iterator[slice]:
    """Places of each request's completions: those of a prompt stay together."""
    start = end = 0
    for _, group in groupby(prompts):
        size = len([*group])
        if start < end and end + size - start > COMPLETIONS:
            yield slice(start, end)
            start = end
        end += size
    if start < end:
        yield slice(start, end)
