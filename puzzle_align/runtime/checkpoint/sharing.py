"""Check, at a job's start, that its nodes share the folder of its checkpoints.

Every rank writes its part of a checkpoint there, and rank 0 publishes it. With a folder of each
node's own, the first save would fail, hours later, and a resume would find files missing. So rank 0
makes a folder of a new name, the first rank of every other node writes a file in it, and rank 0
looks for these files. Invariants (the tests assert them):
- the folder holds afterwards what it held before, whatever comes out;
- a node that sees late (caches of network file systems) has ``PATIENCE_S`` seconds;
- all nodes at fault are named in one error, which every rank raises.
"""

import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from puzzle_align.files.messages import shown, writing
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.runtime.liveness.failure import rank

PROBE = ".shared_"  # and a new name
PATIENCE_S = 5.0
_RETRY_S = 0.1


@dataclass(frozen=True)
class _Answer:
    """A node's answer to a probe."""

    node: str
    file: str  # name of the file that it was to write
    sees: bool = True  # whether it sees the probe
    fault: str = ""  # why it could not write


def check_shared(folder: Path, key: str, value: Path) -> None:
    """Check that all nodes see and write one folder; does nothing on one node. Collective.

    Args:
        folder: the folder of checkpoints, which exists on rank 0's node.
        key: the config's key that chooses the folder, with its ``value``, for errors.

    Raises:
        ValueError: one line that names the nodes at fault.
    """
    if not on_other_nodes(platform.node):
        return
    probe = folder / from_rank_zero(lambda: f"{PROBE}{uuid.uuid4().hex[:16]}")

    def make() -> None:
        with writing(probe, key=key):
            probe.mkdir()

    from_rank_zero(make)
    answers = on_other_nodes(lambda: _answer(probe))

    def judge() -> None:
        try:
            faults = _faults(answers, _missing(probe, answers))
        finally:
            shutil.rmtree(probe, ignore_errors=True)
        if faults:
            cure = f"mount the same folder on every host, or set {key} to one that is"
            raise ValueError(f"{key}={value.absolute()} is not shared: {'; '.join(faults)}: {cure}")

    from_rank_zero(judge)


def _answer(probe: Path) -> _Answer:
    """Write this node's file into the probe, as soon as the probe is seen here."""
    node, file = platform.node(), str(rank())
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            (probe / file).touch()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return _Answer(node, file, sees=False)
        except OSError as error:
            return _Answer(node, file, fault=shown(error.strerror or str(error)))
        else:
            return _Answer(node, file)
        time.sleep(_RETRY_S)
        _look_anew(probe)


def _look_anew(probe: Path) -> None:
    """Open the folders above: NFS then asks the server what they hold, instead of its cache."""
    for folder in reversed(probe.absolute().parents):
        with suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY))


def _missing(probe: Path, answers: Sequence[_Answer]) -> set[str]:
    """Names of files that were written on other nodes and are not seen here."""
    written = {answer.file for answer in answers if answer.sees and not answer.fault}
    deadline = time.monotonic() + PATIENCE_S
    while (missing := written.difference(os.listdir(probe))) and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return missing


def _faults(answers: Sequence[_Answer], missing: set[str]) -> list[str]:
    """Nodes at fault, a text for each kind of fault."""
    here = platform.node()
    faults = []
    if blind := _names(answer for answer in answers if not answer.sees):
        verb = "does" if len(blind) == 1 else "do"
        faults.append(f"{', '.join(blind)} {verb} not see what {here} writes there")
    if unseen := _names(answer for answer in answers if answer.file in missing):
        faults.append(f"{here} does not see what {', '.join(unseen)} wrote there")
    for why in dict.fromkeys(answer.fault for answer in answers if answer.fault):
        unable = _names(answer for answer in answers if answer.fault == why)
        faults.append(f"{', '.join(unable)} cannot write there ({why})")
    return faults


def _names(answers: Iterable[_Answer]) -> list[str]:
    """Names of nodes, each once."""
    return list(dict.fromkeys(answer.node for answer in answers))
