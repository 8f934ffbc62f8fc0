"""Chat templates, which are programs that models bring: rendered as transformers does, and bounded.

Invariants (the tests assert them):
- what a template writes is what transformers' ``apply_chat_template`` writes;
- whatever a template does, for whatever conversation, ends within ``MOST_SECONDS`` of the processor
  and bounded memory, and is a one-line ValueError if it is no text: it runs in a process of its own
  (``data.template_process``), which dies of what it may not;
- a death of that process condemns the conversation that it died of, and no other; what is the
  machine's fault condemns none, and ends the work (``CannotRender``).
"""

import atexit
import dataclasses
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from puzzle_align.data import template_process
from puzzle_align.data.records import STOPPED, TEMPLATE_ARGUMENTS, DataError
from puzzle_align.data.template_process import LENGTH, MOST_SECONDS, OK, TOO_LARGE
from puzzle_align.files.messages import ending, shown

_PATIENCE_S = 60.0  # for an answer, on a machine with other work
_END_S = 5.0  # for a process that has closed its output to be gone
_MOST_LEVELS = 200  # of a conversation's values
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateStopped(ValueError):
    """The process died of a conversation."""


class CannotRender(ValueError):
    """The process cannot do its work here, whatever the conversation."""


@contextmanager
def rendering(origin: str) -> Iterator[None]:
    """Render what a record has: DataError of that record where its template makes no text of it."""
    cure = "correct the messages, or set tokenizer.chat_template"
    try:
        yield
    except CannotRender:
        raise
    except TemplateStopped as error:
        raise DataError(origin, STOPPED, str(error), cure) from None
    except ValueError as error:
        raise DataError(origin, "chat template", str(error), cure) from None


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
        TemplateStopped: one line, where it takes too long, or crashes.
        CannotRender: one line, where the machine is to blame.
        ValueError: one line, where it makes none for another reason.
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
    return _process.render(request)


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


class _EndedError(Exception):
    """The process is no more."""

    def __init__(self, code: int | None) -> None:
        """``code`` is as ``subprocess`` has it; None: it has closed its output, and lived on."""
        super().__init__("closed its output" if code is None else ending(code))
        self.code = code


class _Process:
    """The process that renders, started when it is first needed, and again when it has died."""

    def __init__(self, program: str = template_process.__file__) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._running: subprocess.Popen | None = None

    def render(self, request: bytes) -> str:
        """What the process answers. Raises as ``render_chat``."""
        with self._lock:
            answer = self._answer(request)
        kind, text = answer[:1], answer[1:].decode(errors="surrogatepass")
        if kind == OK:
            return text
        if kind == TOO_LARGE:
            raise ValueError("the chat template writes too much text, or needs too much memory")
        raise ValueError(f"the chat template rejects it ({shown(text)})")

    def _answer(self, request: bytes) -> bytes:
        """The process's answer; where it dies, and not of the time it takes, at the second try."""
        try:
            return self._ask(request)
        except (TimeoutError, _EndedError):
            pass
        try:
            return self._ask(request)
        except TimeoutError:
            raise CannotRender(
                "the process that renders chat templates gave no answer in "
                f"{_PATIENCE_S:.0f} s, twice: the machine is too busy; run the same command again"
            ) from None
        except _EndedError as error:
            if error.code == -signal.SIGKILL:
                raise CannotRender(
                    f"the process that renders chat templates {error}, twice, as the system does "
                    "where memory runs out: free memory, or lower data.num_proc; the same command "
                    "goes on where this one has stopped"
                ) from None
            raise TemplateStopped(
                f"the chat template was stopped: its process {error}, twice"
            ) from None

    def _ask(self, request: bytes) -> bytes:
        """The process's answer.

        Raises:
            TemplateStopped: if it takes too much of the processor's time.
            _EndedError: if the process ends for another reason.
            TimeoutError: if there is no answer.
        """
        running = self._running
        if running is None or running.poll() is not None:
            running = self._running = self._started()
        assert running.stdin is not None and running.stdout is not None
        try:
            _send(running.stdin.fileno(), LENGTH.pack(len(request)) + request)
            (length,) = LENGTH.unpack(_receive(running.stdout.fileno(), LENGTH.size))
            return _receive(running.stdout.fileno(), length)
        except TimeoutError:
            self.stop()
            raise
        except (OSError, EOFError):
            ended = self._ended()
        if ended.code == -signal.SIGPROF:
            raise TemplateStopped(
                "the chat template was stopped: for one conversation it takes more than "
                f"{MOST_SECONDS:.0f} s"
            )
        raise ended

    def _started(self) -> subprocess.Popen:
        """A process that is ready; CannotRender if there is none to be had."""
        try:
            self._running = subprocess.Popen(
                [sys.executable, "-P", self._program],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a signal of the terminal is not for it
            )
            assert self._running.stdout is not None
            _receive(self._running.stdout.fileno(), len(OK))
            return self._running
        except TimeoutError:
            self.stop()
            why = f"it gives no sign of life in {_PATIENCE_S:.0f} s"
        except EOFError:
            why = f"it {self._ended()}"
        except OSError as error:
            why = shown(error.strerror or str(error))
        raise CannotRender(
            f"the process that renders chat templates does not start ({why}): see that the machine "
            f"has memory and processes left, and that {sys.executable} runs there"
        )

    def _ended(self) -> "_EndedError":
        """How the process, which has closed its output, has ended; nothing of it is left."""
        assert self._running is not None
        try:
            code = self._running.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        self.stop()
        return _EndedError(code)

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
