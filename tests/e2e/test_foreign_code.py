"""Code that comes with a tokenizer is not run, nor is anyone asked whether it should be."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_tokenize import CHATML, save_bpe

ROOT = Path(__file__).parents[2]
# Every command in one process: what takes time is that it starts.
COMMANDS = """
import sys
from tests.command import main
folder = sys.argv[1]
for arguments in (
    ["train", "--validate", "--config", "dpo_tiny", f"tokenizer.path={folder}"],
    ["generate", "--model", folder, "--prompts", f"{folder}/prompts.jsonl", "--out", f"{folder}/o"],
    ["convert", folder, f"{folder}/checkpoint", "--to-checkpoint"],
):
    try:
        print("exit code", main(arguments))
    except SystemExit as error:
        print("exit code", error.code)
"""


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
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 9)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(path)],
        stdin=theirs if has_terminal else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    os.close(ours)
    os.close(theirs)
    assert not mark.exists()
    shown = done.stdout + done.stderr
    assert done.stdout.count("exit code 2") == 3, shown
    assert "Traceback" not in shown and "[y/N]" not in shown
    assert f"error: tokenizer.path={path}: no Hugging Face tokenizer there" in done.stderr
