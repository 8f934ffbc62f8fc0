"""The kernel of AdamW: its numbers in Triton's interpreter, its code for Hopper, its traffic."""

import os
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from puzzle_align.runtime.optimizer.adamw import PieceAdamW, joined

pytest.importorskip("triton")

SIZE = 3000  # not a multiple of a program's numbers
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALE = 0.5
DTYPES = (torch.float32, torch.bfloat16)
zeros = partial(torch.zeros, device="meta")


def _compare(weights: torch.dtype, moments: torch.dtype) -> None:
    """Hold steps of the kernel against torch's AdamW on scaled gradients; none goes by the op."""
    from puzzle_align.runtime.optimizer import adamw_kernel
    from puzzle_align.runtime.optimizer.adamw_kernel import update

    adamw_kernel._op = None  # type: ignore[assignment]
    seed = torch.Generator().manual_seed(3)
    shard: Any = torch.randn(SIZE, generator=seed).to(weights)
    weight = shard.clone()
    optimizer = PieceAdamW([{"params": [shard], **GROUP}], dtype=moments, offload=False)
    optimizer.allocate()
    known = optimizer.state[shard]
    mine = {name: value.clone() for name, value in known.items()}
    main = weight if weights is torch.float32 else mine["master_param"]
    for step in range(1, 4):
        gradient = torch.randn(SIZE, generator=seed) * 10 ** torch.randn(SIZE, generator=seed)
        gradient[::7] = 0
        shard.decoupled_grad = SCALE * gradient
        optimizer.step()
        first, second = mine["exp_avg"], mine["exp_avg_sq"]
        update(weight, main, gradient, first, second, {**GROUP, "step": step}, SCALE)
        for name in ("exp_avg", "exp_avg_sq"):
            assert mine[name].dtype is moments
            same = (mine[name] == known[name]).double().mean()
            assert moments is torch.float32 or same > 0.999, (name, step, same)
            torch.testing.assert_close(mine[name], known[name], rtol=2**-7, atol=1e-6)
        if moments is torch.float32:
            torch.testing.assert_close(mine["exp_avg"], known["exp_avg"], rtol=1e-5, atol=1e-5)
        whole = joined(weight, main) if main.dtype is torch.int16 else main
        wanted = optimizer.get_unscaled_state(shard, "master_param")
        far = (whole - wanted).abs() > 1e-6 * wanted.abs() + 1e-7
        assert far.double().mean() < 0.002 and (whole - wanted).abs().max() < 1e-4, step
        assert (weight == shard).double().mean() > (0.9 if weights is torch.float32 else 0.998)


def test_the_numbers_are_torch_s_but_for_the_last_bits() -> None:
    """Triton decides when the kernel is defined whether to interpret it: in another process."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_adamw_kernel"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        },
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["compared"] * 4


@pytest.mark.parametrize(("form", "small"), [*product((0, 1, 2), (False, True))])
def test_it_compiles_for_hopper_without_a_device(form: int, small: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from puzzle_align.runtime.optimizer.adamw_kernel import BLOCK, adamw_program

    weight, main = (("*fp32", "*fp32"), ("*i16", "*fp32"), ("*i16", "*i16"))[form]
    moment = "*i16" if small else "*fp32"
    names = ("scale", "decay", "weight1", "beta2", "weight2", "step_size", "root2", "eps")
    constants = {"form": form, "small": small, "block": BLOCK}
    kinds = {"weight": weight, "main": main, "gradient": "*fp32", "first": moment, "second": moment}
    kinds |= {
        "size": "i64",
        **dict.fromkeys(names, "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source: Any = ASTSource(adamw_program, kinds, constants)
    made: Any = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(made.asm["cubin"]) > 0


@pytest.mark.parametrize(
    ("weights", "moments", "bytes_each"),
    [
        (torch.bfloat16, torch.bfloat16, 20),  # weight, remainder and two moments twice, gradient
        (torch.bfloat16, torch.float32, 32),
        (torch.float32, torch.float32, 28),
    ],
)
def test_each_number_crosses_memory_once_each_way(
    weights: torch.dtype, moments: torch.dtype, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from puzzle_align.runtime.optimizer import adamw_kernel

    given: list[torch.Tensor] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert grid[0] * adamw_kernel.BLOCK >= SIZE > (grid[0] - 1) * adamw_kernel.BLOCK
            return lambda *arguments, **_: given.extend(arguments[:5])

    monkeypatch.setattr(adamw_kernel, "adamw_program", Launched())
    weight, first, second = (torch.zeros(SIZE, dtype=kind) for kind in (weights, moments, moments))
    main = weight
    if weights is torch.bfloat16:
        main = torch.zeros(SIZE, dtype=torch.int16 if moments is weights else torch.float32)
    gradient = torch.zeros(SIZE)
    group = {**GROUP, "step": 1}
    adamw_kernel.update(weight, main, gradient, first, second, group, 1.0)
    held = {tensor.data_ptr(): tensor for tensor in given}
    read = sum(tensor.nbytes for tensor in held.values())
    assert (2 * read - gradient.nbytes) / SIZE == bytes_each


def test_a_kernel_that_fails_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from puzzle_align.runtime.optimizer import adamw, adamw_kernel

    monkeypatch.setattr(adamw_kernel, "try_update", Mock(side_effect=OSError("no\ncompiler")))
    find = adamw._kernel.__wrapped__  # its results are kept
    assert find(torch.device("cpu")) is None and not caplog.messages
    assert find(torch.device("cuda")) is None
    line = "AdamW runs as separate kernels, since Triton's fails: no compiler"
    assert caplog.messages == [line]


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, zeros(SIZE, dtype=torch.float16)),  # a weight
        (1, zeros(SIZE, dtype=torch.int32)),  # its remainder
        (2, zeros(SIZE, dtype=torch.bfloat16)),  # the gradient
        (2, zeros(2 * SIZE)[::2]),
        (2, zeros(SIZE - 1)),
        (4, zeros(SIZE)),  # a moment
    ],
)
def test_tensors_without_memory_are_checked(place: int, wrong: torch.Tensor) -> None:
    from puzzle_align.runtime.optimizer.adamw_kernel import update

    kinds = (torch.bfloat16, torch.int16, torch.float32, torch.bfloat16, torch.bfloat16)
    given = [zeros(SIZE, dtype=kind) for kind in kinds]
    update(*given, {**GROUP, "step": 1}, 1.0)  # type: ignore[call-arg]
    given[place] = wrong
    with pytest.raises((AssertionError, KeyError)):
        update(*given, {**GROUP, "step": 1}, 1.0)  # type: ignore[call-arg]


if __name__ == "__main__":
    for dtypes in product(DTYPES, DTYPES):
        _compare(*dtypes)
        print("compared")
