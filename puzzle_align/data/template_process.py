"""The process that renders chat templates: a program of its own, which imports no more than Jinja.

It answers requests on its standard input, one at a time, each within bounds that the system holds:
processor time (a signal ends the process) and memory. The environment is that of transformers'
``apply_chat_template``, but for a time that does not pass; the tests compare what both write.

It first writes a byte (``OK``): it is there. A request is its length and ``marshal``'s bytes of the
template and its variables; an answer is its length, a byte (``OK``, or why not) and UTF-8.
"""

import json
import marshal
import os
import resource
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LENGTH = struct.Struct("<q")
OK, REJECTED, TOO_LARGE = b"o", b"r", b"m"
MOST_SECONDS = 1.0  # of the processor, for a conversation
_MEMORY = 2**28  # bytes of address space, on top of what the process has at its start ...
_MEMORY_PER_BYTE = 32  # ... and for every byte of a request
_OUTPUT = 2**22  # characters that a template may write ...
_OUTPUT_PER_BYTE = 16  # ... and for every byte of a request
# The time for all templates: a prompt and its responses must begin with the same text.
_STARTED = datetime.now()
_MESSAGE = 1000  # characters of what it raises: whoever asked shows fewer (``files.messages``)


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, and writes what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Any) -> Any:
        """The block's body as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_written")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return caller()


class _Dict:
    """``dict`` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
        """As dict's."""
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's: a name may be ``self``
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _Namespace._check(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name such as {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return _STARTED.strftime(pattern)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


def answer(request: bytes) -> tuple[bytes, str]:
    """Whether a template could be rendered, and its text, or what it raised."""
    most = _OUTPUT + _OUTPUT_PER_BYTE * len(request)
    try:
        template, variables = marshal.loads(request)
        parts: list[str] = []
        for part in _compiled(template).generate(variables):
            parts.append(part)
            most -= len(part)
            if most < 0:
                return TOO_LARGE, ""
        return OK, "".join(parts)
    except MemoryError:
        return TOO_LARGE, ""
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        name = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        return REJECTED, f"{name}{str(error)[:_MESSAGE]}"


def _read(number: int) -> bytes:
    found = sys.stdin.buffer.read(number)
    if len(found) < number:
        os._exit(0)  # whoever asked is gone
    return found


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when to end
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.buffer.write(OK)
    sys.stdout.buffer.flush()
    while True:
        (length,) = LENGTH.unpack(_read(LENGTH.size))
        most = used + _MEMORY + _MEMORY_PER_BYTE * length
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        request = _read(length)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS + length / 2**24)
        kind, text = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            data = kind + text.encode(errors="surrogatepass")
        except MemoryError:
            data = TOO_LARGE
        sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
