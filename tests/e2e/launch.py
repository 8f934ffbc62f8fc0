"""The software as a user starts it: under torchrun on this machine."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "launch" / "train.py"
# dpo_tiny, made smaller still.
SMALL = (
    "--config",
    "dpo_tiny",
    "actor.model.config.hidden_size=32",
    "actor.model.config.intermediate_size=64",
    "data.num_synthetic=64",
    "packing.row_tokens=64",
    "data.max_length=64",
    "global_batch_size=16",
)


def python_path() -> str:
    """This checkout, before what was inherited: a GPU's host may bring Megatron by PYTHONPATH."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def torchrun(
    *arguments: str, script: Path = TRAIN, ranks: int = 2, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a script with ``arguments`` on ``ranks`` CPU processes; output and errors as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), str(script)]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path()}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return subprocess.run(
        [*command, *arguments], env={**kept, **own}, capture_output=True, text=True, timeout=timeout
    )
