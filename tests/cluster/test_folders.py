"""Folders and files that hosts share, or do not: what must be shared is missed at the start."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, cluster
from tests.cluster.jobs import Part, start
from tests.metrics import records
from tests.specs import hf_llama
from tests.unit.chat_tokenizers import save_qwen

SHORT = ("max_steps=2", "engine.distributed_timeout=60")
END_S = 180  # of a job that is refused: imports take most of it, on a busy machine minutes
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


@pytest.mark.slow
@pytest.mark.parametrize("key", ["output_dir", "checkpoint.dir"])
def test_a_folder_of_each_host_s_own_is_refused(key: str, tmp_path: Path) -> None:
    own = _private(tmp_path / ("out" if key == "output_dir" else "saved"))
    checkpoints = own / "checkpoints" if key == "output_dir" else own
    named = [] if key == "output_dir" else [f"{key}={own}"]
    with cluster(2, private=[own]) as hosts:
        for host in hosts:
            saved = checkpoints / "step_00000001"
            _on(host, "mkdir", "-p", str(saved))
            _on(host, "touch", str(saved / "job.json"))
        first, second = _refused(start(hosts, tmp_path, *SHORT, *named))
        left = [_on(host, "find", str(checkpoints), "-mindepth", "1") for host in hosts]
    assert first == (
        f"error: {key}={own} is not shared: node1 does not see what node0 writes there: "
        f"mount the same folder on every host, or set {key} to one that is"
    )
    assert second == ""
    kept = {str(checkpoints / name) for name in ("step_00000001", "step_00000001/job.json")}
    assert {*left[1].split()} == kept
    assert {*left[0].split()} == {*kept, str(checkpoints / ".lock")}


@pytest.mark.slow
def test_checkpoints_may_be_shared_alone(tmp_path: Path) -> None:
    out, shared = _private(tmp_path / "out"), f"checkpoint.dir={tmp_path}/saved"
    with cluster(2, private=[out]) as hosts:
        for part in start(hosts, tmp_path, *SHORT, shared):
            assert part.ended(100) == 0, part.text
        saved = tmp_path / "saved"
        assert sorted(path.name for path in saved.iterdir()) == [".lock", "step_00000002"]
        _on(hosts[0], "cp", "-r", f"{saved}/step_00000002", str(out))
        named = f"checkpoint.resume={out}/step_00000002"
        first, _ = _refused(start(hosts, tmp_path / "next", *SHORT, named))
    assert first == (
        f"error: on node node1: checkpoint.resume: {out}/step_00000002: no such directory there: "
        "copy it from rank 0's node, or put it where all nodes see it"
    )


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


# Files and folders by the key that names them.
FILES = {
    "data.train": "it.jsonl",
    "actor.model.path": "it",
    "tokenizer.path": "it",
    "--config": "it.yaml",
}


def _keys(key: str, folder: Path, own: Path) -> list[str]:
    """Make what a key names in a folder; the overrides of a job that finds it in ``own``."""
    file = folder / "files" / FILES[key]
    file.parent.mkdir()
    if key == "--config":
        file.write_text(Path("configs/dpo_tiny.yaml").read_text())
        return [key, f"{own}/{file.name}"]
    if key == "data.train":
        _write_pairs(file)
        here = [f"data.cache_dir={own}/cache", "actor.model.random_weights=true"]
        return [*DATA, *here, f"{key}={own}/{file.name}"]
    if key == "tokenizer.path":
        save_qwen(file)
        return [f"{key}={own}/{file.name}"]
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(hf_llama(260)).save_pretrained(file)
    return [f"{key}={own}/{file.name}", "actor.model.config=null"]


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("key", FILES)
def test_a_file_on_one_host_only_is_named_with_the_other(
    key: str, side: int, tmp_path: Path
) -> None:
    """No host waits for the time-out."""
    own = _private(tmp_path / "own")
    keys = _keys(key, tmp_path, own)
    with cluster(2, private=[own]) as hosts:
        _on(hosts[side], "cp", "-r", f"{tmp_path}/files/{FILES[key]}", str(own))
        first, _ = _refused(start(hosts, tmp_path, *SHORT, *keys))
    assert f"{own}/{FILES[key]}: no " in first  # such file, directory or tokenizer
    if side:
        assert first.startswith("error: ")
    elif key == "--config":  # read before the ranks meet
        assert first.startswith("rank 0 stopped while it started, because rank 1 (node1) ended: ")
    else:
        assert first.startswith("error: on node node1: ")


@pytest.mark.slow
def test_data_that_one_host_has_prepared_are_enough_in_a_shared_cache(tmp_path: Path) -> None:
    own = _private(tmp_path / "own")
    keys = [key for key in _keys("data.train", tmp_path, own) if "cache_dir" not in key]
    with cluster(2, private=[own]) as hosts:
        _on(hosts[0], "cp", f"{tmp_path}/files/it.jsonl", str(own))
        for part in start(hosts, tmp_path, *SHORT, *keys):
            assert part.ended(100) == 0, part.text
