"""Server of one rank's commands, for ``bench_hosts``: a fork of it has imported everything.

It reads a line of JSON for each command: its arguments, its environment, and the file of its
output; it writes the command's exit code. ``python tools/host_rank.py FILE``: the processes are
put in the control group whose file of processes this is, the server is not.
"""

import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import torch

import puzzle_align
from puzzle_align.cli.main import main, process


def serve(group: Path) -> None:
    """Run commands until the input ends."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line), group)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(command: dict[str, Any], group: Path) -> None:
    group.write_text("0")  # this process
    os.environ.update(command["environment"])
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    with process():
        main(command["arguments"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    for found in pkgutil.walk_packages(puzzle_align.__path__, "puzzle_align."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    serve(Path(sys.argv[1]))
