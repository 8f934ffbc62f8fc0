"""Folders and files that hosts share, or do not: what must be shared is missed at the start."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, cluster
from tests.cluster.jobs import Part, start
from tests.metrics import records

SHORT = ("max_steps=2", "engine.distributed_timeout=60")
END_S = 60  # of a job that is refused: imports take most of it
DATA = ("data.format=auto", "data.eval_fraction=0.1", "tokenizer.path=byte")


def _on(host: Host, *command: str) -> str:
    """Output of a command on a host."""
    words = host.space.command(*command)
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _refused(parts: list[Part]) -> list[str]:
    """Every rank's own last line, once all have ended; none has a traceback."""
    for part in parts:
        assert part.ended(END_S) != 0, part.text
    return [_own_lines(part)[-1] for part in parts]


def _own_lines(part: Part) -> list[str]:
    """Lines of a host before torchrun's own report, but for torch's warnings of host names."""
    own = part.text.split("torch/distributed/elastic/")[0]
    assert "Traceback" not in own, part.text
    lines = [line for line in own.splitlines()[:-1] if not line.startswith("[W")]
    return lines or [""]


def _private(folder: Path) -> Path:
    """Folder for each host's own files."""
    folder.mkdir()
    return folder


def test_an_output_dir_of_each_host_s_own_is_refused(tmp_path: Path) -> None:
    out = _private(tmp_path / "out")
    with cluster(2, private=[out]) as hosts:
        for host in hosts:
            saved = out / "checkpoints/step_00000001"
            _on(host, "mkdir", "-p", str(saved))
            _on(host, "touch", str(saved / "job.json"))
        first, second = _refused(start(hosts, tmp_path, *SHORT))
        left = [_on(host, "find", str(out / "checkpoints"), "-mindepth", "1") for host in hosts]
    assert first == (
        f"error: output_dir={out} is not shared: node1 does not see what node0 writes there: "
        "mount the same folder on every host, or set output_dir to one that is"
    )
    assert second == ""
    kept = {str(out / "checkpoints" / name) for name in ("step_00000001", "step_00000001/job.json")}
    assert {*left[1].split()} == kept
    assert {*left[0].split()} == {*kept, str(out / "checkpoints/.lock")}


@pytest.mark.slow
def test_checkpoints_may_be_shared_alone(tmp_path: Path) -> None:
    out, shared = _private(tmp_path / "out"), f"checkpoint.dir={tmp_path}/saved"
    with cluster(2, private=[out]) as hosts:
        for part in start(hosts, tmp_path, *SHORT, shared):
            assert part.ended(100) == 0, part.text
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [".lock", "step_00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
def test_a_folder_that_one_host_cannot_write_is_named_with_the_host(
    side: int, tmp_path: Path
) -> None:
    out = _private(tmp_path / "out")
    with cluster(2) as hosts:
        _on(hosts[side], "mount", "--bind", str(out), str(out))
        _on(hosts[side], "mount", "-o", "remount,bind,ro", str(out))
        first, _ = _refused(start(hosts, tmp_path, *SHORT))
    where = "on node node1: " if side else ""
    why = f"{out} cannot be written: {out} is read-only; name another folder"
    assert first == f"error: {where}output_dir: {why}"
    assert not [*out.iterdir()]


def _write_pairs(file: Path) -> None:
    pairs = [{"prompt": f"{n}:", "chosen": "b", "rejected": "c"} for n in range(99)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


@pytest.mark.slow
def test_each_host_may_have_a_cache_of_its_own(tmp_path: Path) -> None:
    """Tokens and the reference's table: each host makes them, and takes them at the next start."""
    cache = _private(tmp_path / "cache")
    _write_pairs(tmp_path / "data.jsonl")
    keys = (
        *DATA,
        "actor.model.random_weights=true",
        "dpo.precompute_ref_log_probs=true",
        f"data.train={tmp_path}/data.jsonl",
        f"data.cache_dir={cache}",
    )
    files = ("find", str(cache), "-name", "meta.json", "-printf", "%P %T@ %s\n")
    with cluster(2, private=[cache]) as hosts:
        seen = []
        for run in ("first", "second"):
            for part in start(hosts, tmp_path / run, *SHORT, *keys):
                assert part.ended(100) == 0, part.text
            seen.append([sorted(_on(host, *files).splitlines()) for host in hosts])
        made, again = seen
        assert made == again
    one, other = ([line.split()[0] for line in lines] for lines in made)
    assert one == other and any("ref_log_probs" in name for name in one) and len(one) > 1
    first, second = (
        [step["loss"] for step in records(tmp_path / run / "out") if "loss" in step]
        for run in ("first", "second")
    )
    assert first == second and len(first) == 2


FILES = {
    "data.train": ("data.jsonl", "no such file"),
    "--config": ("job.yaml", "no such file in the current folder"),
}


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("key", FILES)
def test_a_file_on_one_host_only_is_named_with_the_host(
    key: str, side: int, tmp_path: Path
) -> None:
    """Found on the other: no host waits for the time-out."""
    name, why = FILES[key]
    own = _private(tmp_path / "own")
    shared = tmp_path / name
    if key == "data.train":
        _write_pairs(shared)
        keys = [*DATA, "actor.model.random_weights=true", f"data.train={own}/{name}"]
    else:
        shared.write_text(Path("configs/dpo_tiny.yaml").read_text())
        keys = [key, f"{own}/{name}"]
    with cluster(2, private=[own]) as hosts:
        _on(hosts[side], "cp", str(shared), str(own))
        first, _ = _refused(start(hosts, tmp_path, *SHORT, *keys))
    assert f"{own}/{name}: {why}" in first
    if side:
        assert first.startswith("error: ")
    else:
        assert first.startswith(("error: on node node1: ", "rank 0 stopped while it started"))
        assert "node1" in first
