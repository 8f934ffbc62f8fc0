"""A disk that fails amid a run: one line with the path and the cure, and no exit code 0."""

import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.launch import SMALL, run_job

CURE = "free space or mend the disk there, and run the same command again"


def test_metrics_that_cannot_be_written_end_the_job_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").symlink_to("/dev/full")
    job = run_job(*SMALL, f"output_dir={tmp_path}/out", "max_steps=2", timeout=100.0)
    path = tmp_path / "out" / "metrics.jsonl"
    assert job.returncode == 2
    assert job.stderr.splitlines()[1:] == [
        f"error: {path} cannot be written (Invalid argument): {CURE}"
    ]


@pytest.mark.parametrize("deleted", ["out", "out/checkpoints"])
def test_a_folder_that_is_deleted_ends_the_job(tmp_path: Path, train, deleted: str) -> None:
    out = tmp_path / "out"

    def delete() -> None:
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            time.sleep(0.01)
        while (tmp_path / deleted).exists():
            shutil.rmtree(tmp_path / deleted, ignore_errors=True)

    threading.Thread(target=delete, daemon=True).start()
    keys = ("max_steps=5000", "checkpoint.save_every=50", "telemetry.log_every=1")
    code, _, told = train(*SMALL, f"output_dir={out}", *keys)
    assert code == 2
    assert told[-1].startswith(f"error: {tmp_path / deleted}")
    assert "could not be written" in told[-1] or told[-1].endswith(CURE)
    assert "No such file or directory" in told[-1]
