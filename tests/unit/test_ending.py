"""How a process has ended, as every line says it that tells of one."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from puzzle_align.files.messages import ending
from puzzle_align.runtime.liveness.neighbours import Neighbour, own_card


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with code 0"), (-9, "was ended by SIGKILL"), (-40, "was ended by signal 40")],
)
def test_every_ending_has_words(code: int, words: str) -> None:
    assert ending(code) == words
    how = f"os.kill(os.getpid(), {-code})" if code else "0"
    dead = subprocess.Popen([sys.executable, "-c", f"import os; {how}"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # as before its parent asks
    card = replace(own_card(0), process=dead.pid)
    assert Neighbour(1, card, process=0, _activity=0).ending() == words
    dead.wait()
