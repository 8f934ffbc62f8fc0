"""The Python that makes the virtual environment: the first one that fits, or one line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "python.sh"
NAMES = ("python3", "python3.13", "python3.12", "python3.11", "python")


def choose(folder: Path, fitting: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script where ``NAMES`` are these versions: a test's stand-ins for interpreters."""
    for tool in ("bash", "env"):
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    for name in NAMES:
        code = 0 if name in fitting else 1
        text = f'#!{shutil.which("bash")}\n[ "$1" != -V ] || echo "Python 3.9.2"\nexit {code}\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize(
    ("fitting", "chosen"),
    [
        ([*NAMES], "python3"),
        (["python3.12", "python3.11"], "python3.12"),
        (["python"], "python"),
    ],
)
def test_the_first_that_fits(tmp_path: Path, fitting: list[str], chosen: str) -> None:
    assert choose(tmp_path, fitting).stdout == f"{chosen}\n"


def test_a_named_one_is_taken_or_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    done = choose(tmp_path / "one", ["python3", "python3.11"], PYTHON="python3.11")
    assert done.stdout == "python3.11\n"
    done = choose(tmp_path / "other", ["python3"], PYTHON="python3.11")
    assert done.returncode == 1 and done.stdout == ""


def test_without_one_it_says_what_is_there_in_one_line(tmp_path: Path) -> None:
    done = choose(tmp_path, [])
    assert done.returncode == 1
    assert done.stderr == (
        "no Python 3.11 to 3.13 with venv found (python3 is Python 3.9.2): install one, and name "
        "it as PYTHON=/path/to/python\n"
    )


def test_this_python_fits() -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
