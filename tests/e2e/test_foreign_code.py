"""Code that comes with a tokenizer is not run, nor is anyone asked whether it should be."""

import json
import os
import pty
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.command import main
from tests.unit.test_tokenize import CHATML, save_bpe


def _use(folder: str, has_terminal: bool) -> None:
    """Run every command on the folder, at a terminal or none."""
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 9)
    os.dup2(theirs if has_terminal else os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    assert sys.stdin.isatty() == has_terminal
    for arguments in (
        ["train", "--validate", "--config", "dpo_tiny", f"tokenizer.path={folder}"],
        ["generate", "--model", folder, "--prompts", f"{folder}/prompts.jsonl"],
        ["convert", folder, f"{folder}/checkpoint", "--to-checkpoint"],
    ):
        try:
            print("exit code", main(arguments))
        except SystemExit as error:
            print("exit code", error.code)


@pytest.mark.parametrize("has_terminal", [False, True])
def test_code_beside_a_tokenizer_is_not_run_and_nobody_is_asked(tmp_path, has_terminal) -> None:
    path = Path(save_bpe(tmp_path / "model", template=CHATML))
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w')\nclass Own:\n    pass\n"
    for name in ("own.py", "tokenization_own.py"):
        (path / name).write_text(code)
    (path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    crafted = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own"}}
    for name in ("tokenizer_config.json", "config.json"):
        file = path / name
        found = json.loads(file.read_text()) if file.exists() else {"model_type": "own"}
        file.write_text(json.dumps({**found, **crafted, "tokenizer_class": "OwnTokenizer"}))
    (path / "tokenizer.json").unlink()
    call, log = tmp_path / "call", tmp_path / "log"
    fork_server.write_call(call, _use, str(path), has_terminal, environment={})
    with log.open("w") as out:
        assert fork_server.fork(0, call, (out.fileno(), out.fileno())).wait() == 0
    assert not mark.exists()
    shown = log.read_text()
    assert shown.count("exit code 2") == 3, shown
    assert "Traceback" not in shown and "[y/N]" not in shown
    assert f"error: tokenizer.path={path}: no Hugging Face tokenizer there" in shown
