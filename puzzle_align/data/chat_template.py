"""Chat templates, which are programs that models bring: rendered as transformers does, and bounded.

Invariants (the tests assert them):
- what a template writes is what transformers' ``apply_chat_template`` writes;
- whatever a template does, for whatever conversation, ends within ``MOST_SECONDS`` of the processor
  and bounded memory, and is a one-line ValueError if it is no text: it runs in a process of its own
  (``data.template_process``), which dies of what it may not.
"""

import atexit
import dataclasses
import marshal
import os
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from puzzle_align.data import template_process
from puzzle_align.data.records import TEMPLATE_ARGUMENTS
from puzzle_align.data.template_process import LENGTH, MOST_SECONDS, OK, TOO_LARGE
from puzzle_align.layout.shown import shown

_PATIENCE_S = 60.0  # for an answer, on a machine with other work
_MOST_DEATHS = 2  # of a template, which is then not tried again
_MOST_LEVELS = 200  # of a conversation's values
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    """The text that a template makes of a conversation.

    Args:
        variables: what else the template is told: special tokens by name, ``tools``, ``documents``.

    Raises:
        ValueError: one line, where it makes none.
    """
    if reserved := sorted(TEMPLATE_ARGUMENTS & variables.keys()):
        raise ValueError(f"chat_template_kwargs: {reserved[0]} is no variable of a template")
    if not messages:
        raise ValueError("the conversation has no message")
    given = {"tools": None, "documents": None, **variables}
    for name in ("tools", "documents"):
        if given[name] is not None and not _is_list_of_mappings(given[name]):
            raise ValueError(f"{name} must be a list of mappings, not {shown(given[name])}")
    given["messages"] = [_message(message) for message in messages]
    given["add_generation_prompt"] = add_generation_prompt
    try:
        request = marshal.dumps((template, {name: _plain(own) for name, own in given.items()}))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the conversation cannot be given to a template ({error})") from None
    return _process.render(template, request)


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it: without nulls, its reasoning under every name."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _plain(value: Any, level: int = 0) -> Any:
    """A value of JSON's types alone; of others, a text that names their type."""
    if level > _MOST_LEVELS:
        raise ValueError(f"nested more than {_MOST_LEVELS} levels deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key, level + 1): _plain(item, level + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, level + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, np.generic):
        return _plain(value.item(), level + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(vars(value), level + 1)
    return f"<{type(value).__name__}>"


class _Process:
    """The process that renders, started when it is first needed, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen | None = None
        self._deaths: Counter[int] = Counter()  # by the template's hash

    def render(self, template: str, request: bytes) -> str:
        """What the process answers. ValueError as ``render_chat``."""
        with self._lock:
            if self._deaths[hash(template)] >= _MOST_DEATHS:
                raise ValueError(f"the chat template was stopped {_MOST_DEATHS} times; correct it")
            answer = self._ask(request)
            if answer is None:
                self._deaths[hash(template)] += 1
                raise ValueError(
                    "the chat template was stopped: for one conversation it takes more than "
                    f"{MOST_SECONDS:.0f} s, or too much memory"
                )
        kind, text = answer[:1], answer[1:].decode(errors="surrogatepass")
        if kind == OK:
            return text
        if kind == TOO_LARGE:
            raise ValueError("the chat template writes too much text, or needs too much memory")
        raise ValueError(f"the chat template rejects it ({shown(text)})")

    def _ask(self, request: bytes) -> bytes | None:
        """The process's answer; None if it died of the request, or gives none in time."""
        if self._running is None or self._running.poll() is not None:
            self._running = subprocess.Popen(
                [sys.executable, "-P", template_process.__file__],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a signal of the terminal is not for it
            )
        running = self._running
        assert running.stdin is not None and running.stdout is not None
        try:
            _send(running.stdin.fileno(), LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(_receive(running.stdout.fileno(), LENGTH.size))
            return _receive(running.stdout.fileno(), length)
        except (OSError, EOFError):
            self.stop()
            return None

    def stop(self) -> None:
        """End the process."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()
            self._running = None


def _send(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _receive(descriptor: int, number: int) -> bytes:
    """So many bytes. EOFError if they do not come, TimeoutError if they take too long."""
    found = bytearray()
    ready = select.poll()
    ready.register(descriptor, select.POLLIN | select.POLLHUP)
    while len(found) < number:
        if not ready.poll(1000 * _PATIENCE_S):
            raise TimeoutError
        part = os.read(descriptor, min(number - len(found), 2**20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


_process = _Process()


def _begin_anew() -> None:
    """A forked process has a renderer of its own: answers have no address."""
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _process.stop())
