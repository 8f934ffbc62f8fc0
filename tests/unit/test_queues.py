"""Variables that CUDA reads when it starts: set before torch's import, enough for the job."""

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from puzzle_align.config.load import find_config, load_file
from puzzle_align.layout.groups import num_communicators, num_streams
from puzzle_align.layout.model import ModelOptions
from puzzle_align.runtime.groups.limits import check_queues, check_started, set_cuda_defaults
from puzzle_align.runtime.groups.world import link_options
from tests.jobs import job_plan

QUEUES, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"
OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CUDNN_LAST, REGISTER = "TORCH_CUDNN_SDPA_DEPRIORITIZED", "NCCL_GRAPH_REGISTER"


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (QUEUES, ALLOCATOR, OLD_ALLOCATOR, CUDNN_LAST, REGISTER, "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_command_sets_them_before_torch_is_imported(unset, tmp_path: Path) -> None:
    """Run like every launch script: the import of torch prints the values it finds."""
    (tmp_path / "torch.py").write_text(
        "import os, sys\n"
        f"names = {QUEUES, ALLOCATOR, CUDNN_LAST, REGISTER}\n"
        "print([os.environ.get(name) for name in names])\n"
        "sys.stdout.flush(); os._exit(7)\n"
    )
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    code += "from puzzle_align.cli.main import main, process\n"
    code += "with process(): main(['train', '--config', 'dpo_tiny'])"
    own = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == "['32', 'expandable_segments:True', '1', '0']"


def test_what_is_set_stays(unset) -> None:
    unset.setenv(QUEUES, "8")
    unset.setenv(OLD_ALLOCATOR, "max_split_size_mb:64")
    set_cuda_defaults()
    check_started()
    assert os.environ[QUEUES] == "8" and ALLOCATOR not in os.environ
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"


def test_what_comes_too_late_is_one_line(unset) -> None:
    check_started()
    unset.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(ValueError, match=rf"^CUDA has started without {QUEUES}=32, so .* set it"):
        check_started()


@pytest.mark.parametrize(
    ("name", "overrides", "streams"),
    [
        ("dpo_tiny", [], [1]),
        # Computation, the ranks of a replica or of all, and for each of two models: an edge of a
        # forward link, of the trained one a backward link's too.
        (
            "dpo_tiny",
            ["actor.parallel.pipeline_model_parallel_size=4"],
            [1 + 2 + 1 + 2, 1 + 1 + 2 + 4, 1 + 1 + 2 + 4, 1 + 2 + 1 + 2],
        ),
    ],
)
def test_streams_are_those_of_computation_groups_and_edges(
    name: str, overrides: list[str], streams: list[int]
) -> None:
    job = load_file(find_config(name), overrides)
    plan = job_plan(job, ModelOptions(), len(streams))
    assert [1 + sum(number) for number in num_communicators(plan)] == streams
    assert num_streams(plan) == max(streams)


def test_more_streams_than_queues_are_reported_once(
    unset, caplog: pytest.LogCaptureFixture
) -> None:
    unset.setenv("RANK", "1")
    unset.setenv(QUEUES, "32")
    check_queues(33)
    assert not caplog.records
    unset.setenv("RANK", "0")
    for value, streams, lines in (("7", 7, 0), ("32", 32, 0), ("32", 33, 1)):
        unset.setenv(QUEUES, value)
        caplog.clear()
        check_queues(streams)
        assert len(caplog.records) == lines
    assert "33 streams at work, and a GPU 32 hardware queues" in caplog.text


def test_too_few_queues_are_one_line(unset) -> None:
    for value in ("1", "6", "", "many"):
        unset.setenv(QUEUES, value)
        with pytest.raises(ValueError, match=rf"^{QUEUES}={value or 'unset'}: a rank .* 7 streams"):
            check_queues(7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs NCCL")
def test_links_take_few_blocks_of_the_device() -> None:
    options = link_options(datetime.timedelta(seconds=90))
    assert (options.config.min_ctas, options.config.max_ctas) == (1, 4)
    assert options.is_high_priority_stream
    assert options._timeout == datetime.timedelta(seconds=90)
