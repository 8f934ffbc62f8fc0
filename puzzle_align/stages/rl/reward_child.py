"""The process that calls a rank's reward functions; ``reward_process`` starts it and speaks to it.

It is new (no fork of the rank), below a guard (``reward_guard``), and imports no torch by itself. A
message to it is pickled, one from it JSON: ``{"running": number}`` and ``{"done": number}`` while
functions are imported and called, then an answer. Nothing of this module's own imports is heavy,
since it is forked off the guard before there are threads.
"""

import faulthandler
import json
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from puzzle_align.stages.rl.reward_guard import guarded

_SHOWN = 10_000  # characters of a traceback's start and of its end: an error's text may be long


def main() -> None:
    """Serve until the rank closes the channel.

    ``sys.argv`` ends with the rank's process, and the descriptors of the channel and of the file
    that takes the stack of a crash.
    """
    rank, channel, crash = map(int, sys.argv[-3:])
    del sys.argv[-3:]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a rank may have been started to ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    guarded(rank, channel, crash)
    faulthandler.enable(crash, all_threads=False)
    faulthandler.register(signal.SIGQUIT, crash, all_threads=False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _serve(Connection(channel))


def _serve(channel: Connection) -> None:
    # Not above: the guard comes before them.
    from puzzle_align.stages.rl.reward_calls import CalledFunctions
    from puzzle_align.stages.rl.reward_function import RewardFunction, load_reward_function

    process = os.getpid()

    def send(message: Any) -> None:
        with suppress(Exception):  # a function may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getpid() != process:  # a function has forked, and returned twice
            os._exit(0)
        channel.send_bytes(json.dumps(message).encode())

    def note(number: int, running: bool) -> None:
        send({"running" if running else "done": number})

    functions: list[RewardFunction] = []
    told: list[dict[str, Any]] = []
    for number, name in enumerate(pickle.loads(channel.recv_bytes())):
        note(number, True)
        try:
            functions.append(load_reward_function(name))
            told.append(asdict(functions[-1].signature))
        except ValueError as error:
            told.append(_fault(error))
        note(number, False)
    send({"answer": told})
    called = CalledFunctions(functions)
    while True:
        try:
            request = pickle.loads(channel.recv_bytes())
        except EOFError:  # the rank has no more to ask
            return
        try:
            completions, state = request
            judged = called(completions, state, note)
        except ValueError as error:
            send({"answer": _fault(error)})
        else:
            told_of = {"extra": judged.extra, "metrics": judged.metrics}
            send({"answer": {"rewards": judged.rewards.tolist(), **told_of}})


def _fault(error: ValueError) -> dict[str, str]:
    """A function's fault: the line, and how its code came to it."""
    cause = error.__cause__
    trace = "" if cause is None else "".join(traceback.format_exception(cause))
    if len(trace) > 2 * _SHOWN:  # where it came from, and how its text ends
        left_out = f"\n[... {len(trace) - 2 * _SHOWN} characters left out ...]\n"
        trace = trace[:_SHOWN] + left_out + trace[-_SHOWN:]
    return {"fault": str(error), "details": trace}
