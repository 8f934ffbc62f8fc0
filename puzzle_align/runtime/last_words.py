"""A failed rank's last words: whole lines on stderr, and a file that the launcher repeats."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


def write_line(text: str) -> None:
    """Write to stderr in one piece: other processes write there too."""
    with suppress(OSError):  # a log on a full disk must not keep the process from its end
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def error_file() -> str | None:
    """Where torchrun looks for this process's last words, to be part of its closing ones."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def tell_launcher(message: str, file: str | None) -> None:
    """Leave a failed rank's last words in its ``error_file``, whole: torchrun reads it any time."""
    if file is None:
        return
    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    report = {"message": {"message": message, "extraInfo": details}}
    draft = Path(f"{file}.{os.getpid()}")
    with suppress(OSError):  # the launcher that goes at once takes the folder with it
        draft.write_text(json.dumps(report), encoding="utf-8")
        draft.rename(file)
