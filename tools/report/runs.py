"""Parts of a GPU report that run the software as users do: tests, training."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import torch

from report.process import Results, Save
from report.setting import Setting

_ROOT = Path(__file__).parents[2]
_LAST = 0.25  # share of the steps whose mean loss is compared, beside the mean of all
# Tolerances of a mean loss. Where the loss goes to 0, a share of it is less than chance makes: fp32
# and bf16 differ by 0.003 over 164 steps of dpo_tiny, with a mean loss of 0.29.
_RELATIVE, _ABSOLUTE = 0.01, 0.005


def tests(setting: Setting, save: Save) -> None:
    """Run the tests that need a GPU; without one they are skipped.

    Raises:
        RuntimeError: without pytest, or if it ends before it has written results.
    """
    if find_spec("pytest") is None:
        raise RuntimeError(
            "pytest is not installed, so no test ran: "
            "pip install -e .[test] -c constraints.txt installs it"
        )
    names = gpu_tests(_ROOT / "tests", setting.test_files)
    with tempfile.TemporaryDirectory() as folder:
        outcome_file = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu and not slow"]
        command += ["-p", "no:cacheprovider", f"--junitxml={outcome_file}", *names]
        workers = min(8, os.cpu_count() or 1, len(names))
        if find_spec("xdist") and workers > 1:  # a test's time is mostly the host's: compilers
            command += ["-n", str(workers), "--dist", "worksteal"]
        # Names go to the log as tests run: if time ends first, the log's end names the test.
        done = subprocess.run(command, cwd=_ROOT, env=_environment())
        if not outcome_file.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and wrote no results")
        cases = list(ElementTree.parse(outcome_file).iter("testcase"))
    outcomes = [_outcome(case) for case in cases]
    failed = [f"{c.get('classname')}::{c.get('name')}" for c in cases if _outcome(c) == "failed"]
    counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
    save({"exit_code": done.returncode, **counts, "failures": failed})


def gpu_tests(folder: Path, names: str) -> list[str]:
    """Files of these names with tests of the GPU; first those that train, the longest."""
    files = [file for file in folder.rglob(names) if "mark.gpu" in file.read_text()]
    return [str(file) for file in sorted(files, key=lambda f: (f.parent.name != "e2e", f))]


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def losses(setting: Setting, save: Save) -> None:
    """Train in several precisions; compare the losses with the first one's."""
    results: Results = {}
    for name, keys in setting.tried.items():
        results[name] = _losses(setting, keys)
        save({"steps": setting.loss_steps, "attention": setting.loss_attention, "losses": results})
    first, *others = results
    differences = {name: _difference(results[first], results[name]) for name in others}
    save({"against": first, "differences": differences})


def _losses(setting: Setting, keys: tuple[str, ...]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(_ROOT / "launch" / "train.py"), "--config", "dpo_tiny"]
        command += [f"engine.device={setting.device}", f"max_steps={setting.loss_steps}"]
        command += [f"engine.attention={setting.loss_attention}"]
        command += [*setting.loss_job, *keys, f"output_dir={folder}", "telemetry.log_every=1"]
        command += ["checkpoint.save_every=0", "telemetry.eval_every=0"]
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", flush=True)
            raise RuntimeError(f"training with {keys} ended with {done.returncode}")
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    return [record["loss"] for record in records if "loss" in record]


def _difference(expected: list[float], got: list[float]) -> Results:
    """Differences of the mean losses, over all steps and over the last ones, with tolerances."""
    last = -max(1, int(_LAST * len(expected)))

    def of_means(a: list[float], b: list[float]) -> Results:
        mean = statistics.mean(a)
        tolerance = max(_RELATIVE * abs(mean), _ABSOLUTE)
        return {"mean": mean, "difference": statistics.mean(b) - mean, "tolerance": tolerance}

    return {"all": of_means(expected, got), "last": of_means(expected[last:], got[last:])}


def _environment() -> dict[str, str]:
    """Environment of a process beside this one, with this checkout first on its path.

    This process gives the device's cached memory back before.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
