"""Reward functions that do to a process whatever can be done to one."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NUM_CALLS = 0
POOL = None


def counts(completions, **kwargs):
    """It keeps what it counts between calls."""
    global NUM_CALLS
    NUM_CALLS += 1
    return [NUM_CALLS] * len(completions)


def spoils(completions, trainer_state, log_metric, log_extra, **kwargs):
    """Everything that a rank would suffer from."""
    os.chdir("/")
    os.environ["RANK"] = "7"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.write("half a line")
    print(sys.stdin.read() == "", "torch" in sys.modules, trainer_state.global_step)
    log_metric("calls", 2.0)
    log_extra("object", [object, {"a": float("nan")}, 3])
    return [None, 1e-300, 0.1 + 0.2]


async def asks(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


def raises(completions, **kwargs):
    return {}["no such"]


def leaves(completions, **kwargs):
    sys.exit(3)


def exits(completions, **kwargs):
    os._exit(0)


def killed(completions, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(completions, **kwargs):
    ctypes.string_at(0)


def closes(completions, **kwargs):
    os.closerange(3, 2**16)  # a test process may have hundreds open
    time.sleep(3600)


def hangs(completions, **kwargs):
    time.sleep(3600)


def slow(completions, **kwargs):
    time.sleep(float(os.environ["SLOW"]))
    return [1.0] * len(completions)


def deaf(completions, **kwargs):
    """Hang without ever giving way to another thread or a signal's handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(3600)


async def awaits(completions, **kwargs):
    await asyncio.sleep(3600)


def pool(completions, **kwargs):
    """Workers that stay, as do programs, of which one's parent has ended."""
    global POOL
    if POOL is None:
        POOL = multiprocessing.get_context("fork").Pool(2)
        subprocess.Popen(["sleep", "3600"])
        subprocess.run(["sh", "-c", "sleep 3600 > /dev/null 2>&1 &"], check=True)
    return POOL.map(len, completions)


def exits_with_a_pool(completions, **kwargs):
    """Its workers have all that it has open."""
    pool(completions)
    os._exit(0)


def stuck_pool(completions, **kwargs):
    """Notes that all have started, and never comes back."""
    pool(completions)
    POOL.map_async(time.sleep, [3600] * 2)
    Path(os.environ["NOTES"]).touch()
    deaf(completions)
