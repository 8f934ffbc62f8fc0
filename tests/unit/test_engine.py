"""Values of the engine section's ``auto`` keys, and abilities of a machine."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from torch.nn import attention
from torch.torch_version import TorchVersion

from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.roles import fp8_of
from puzzle_align.config.sections.engine import FUSIONS, EngineConfig
from puzzle_align.layout.model import Fusions, ModelOptions
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.models import megatron_config
from puzzle_align.models.attention import why_unavailable
from puzzle_align.models.attention.flash import use_flash_attention, why_no_flash
from puzzle_align.models.transformer_engine import import_error
from puzzle_align.stages.engine import check_torch, resolve_engine, why_no_fp8
from puzzle_align.stages.to_plan import job_to_plan, resolution_to_plan
from tests.declared import tiny_profile
from tests.jobs import job_plan
from tests.specs import PAPER

CUDA = EngineConfig(device="cuda")
WHOLE = importlib.util.find_spec("transformer_engine") is not None


HAS_CUTE = importlib.util.find_spec("flash_attn") is not None
HAS_FA3 = importlib.util.find_spec("flash_attn_interface") is not None
FA4_IS_MISSING = (
    "torch 2.11 has no causal backward through it; install torch 2.12"
    if TorchVersion(torch.__version__) < TorchVersion("2.12")
    else "flash_attn.cute.interface does not import (No module named"
)


@pytest.mark.parametrize("attention", ["segments", "dense", "varlen"])
def test_attention_that_trains_on_cpu(attention: str) -> None:
    engine = resolve_engine(EngineConfig(device="cpu", attention=attention))
    assert engine.options.attention == attention


@pytest.mark.parametrize("attention", ["flex", "flex_flash"])
def test_attention_that_does_not_train_on_cpu(attention: str) -> None:
    with pytest.raises(ValueError, match=f"^engine.attention={attention}: .*set it to segments$"):
        resolve_engine(EngineConfig(device="cpu", attention=attention))


def test_attention_of_bf16_alone() -> None:
    for backend in ("varlen", "flex_flash"):
        assert "bf16 only, not engine.dtype=fp32" in (
            why_unavailable(backend, "cuda", "fp32") or ""
        )
    assert why_unavailable("varlen", "cuda", "bf16") is None  # this torch has it
    for backend in ("flex", "segments", "dense"):
        assert why_unavailable(backend, "cuda", "fp32") is None


@pytest.mark.skipif(HAS_CUTE, reason="flash_attn is installed")
def test_flash_attention_that_is_not_installed() -> None:
    reason = why_unavailable("flex_flash", "cuda", "bf16") or ""
    assert reason.startswith(
        "flash_attn.cute.interface does not import (No module named 'flash_attn"
    )
    assert "\n" not in reason


@pytest.mark.skipif(HAS_CUTE, reason="flash_attn is installed")
@pytest.mark.parametrize(
    ("name", "capability", "start"),
    [
        ("fa3", (9, 0), "flash_attn_interface does not import (No module named"),
        ("fa3", (10, 0), "it has no kernels for compute capability 10.0; set it to fa2"),
        ("fa4", (10, 0), FA4_IS_MISSING),
        ("fa4", (8, 6), "it has no kernels for compute capability 8.6; set it to fa2"),
    ],
)
def test_newer_flash_attention(name: str, capability: tuple[int, int], start: str) -> None:
    assert (why_no_flash(name, capability) or "").startswith(start)


# A module that has none of the kernels; one that fails as where CUDA's libraries are missing.
@pytest.mark.skipif(HAS_CUTE or HAS_FA3, reason="a newer FlashAttention is installed")
@pytest.mark.parametrize("source", ["", "raise OSError('libcudart.so.13:\\nnot found')"])
def test_broken_flash_attention(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cute = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    for name in ("flash_attn_interface", *cute):  # to be forgotten after the test
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "flash_attn_interface.py").write_text(source)
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)
    assert use_flash_attention("auto", device) == "fa2"
    assert attention.current_flash_attention_impl() is None
    with pytest.raises(ValueError, match=r"^engine.flash_attention=fa3: .*, or set it to auto$"):
        use_flash_attention("fa3", device)
    if source:
        reason = why_unavailable("flex_flash", "cuda", "bf16") or ""
        assert reason.startswith(
            "flash_attn.cute.interface does not import (libcudart.so.13: not found)"
        )


def _chosen() -> str:
    return resolve_engine(CUDA, elsewhere=True).options.transformer_impl


@pytest.mark.skipif(WHOLE, reason="Transformer Engine is installed")
def test_without_transformer_engine_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert _chosen() == "local"
    assert not caplog.records


@pytest.fixture
def anew() -> Iterator[None]:
    """Import Transformer Engine anew."""
    import_error.cache_clear()
    yield
    import_error.cache_clear()


def test_transformer_engine_is_taken_and_fuses(anew, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_engine(EngineConfig(device="cpu")).options.fusions == Fusions()
    local = EngineConfig(device="cuda", transformer_impl="local")
    assert resolve_engine(local, elsewhere=True).options.fusions == Fusions()
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert _chosen() == "te"
    everything = Fusions(**dict.fromkeys(FUSIONS, True))
    assert resolve_engine(CUDA, elsewhere=True).options.fusions == everything
    one_off = EngineConfig(device="cuda", apply_rope_fusion=False)
    chosen = resolve_engine(one_off, elsewhere=True).options.fusions
    assert chosen == replace(everything, apply_rope_fusion=False)


@pytest.mark.parametrize("name", ["apply_rope_fusion", "bias_activation_fusion", None])
def test_fusions_are_those_of_megatron_s_config(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Megatron-core asks for it, and has it from Transformer Engine.
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", torch.mul)
    options = ModelOptions(fusions=Fusions(**({name: True} if name else {})))
    config = megatron_config.transformer_config(PAPER, options, ParallelPlan(), 0)
    fused = {each for each in FUSIONS if getattr(config, each)}
    assert fused == ({name} if name else set())


def test_one_fusion_needs_no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    local = replace(CUDA, transformer_impl="local", bias_activation_fusion=True)
    assert resolve_engine(local).options.fusions == Fusions(bias_activation_fusion=True)
    with pytest.raises(ValueError, match="engine.apply_rope_fusion=true: needs engine.transform"):
        resolve_engine(replace(local, apply_rope_fusion=True))


@pytest.mark.parametrize(
    ("name", "value", "shown"), [("fp8", "hybrid", "hybrid"), *((f, True, "true") for f in FUSIONS)]
)
def test_fusions_and_fp8_need_a_gpu(name: str, value: str | bool, shown: str) -> None:
    with pytest.raises(ValueError, match=f"engine.{name}={shown}: there is no CUDA device"):
        resolve_engine(replace(EngineConfig(device="cpu"), **{name: value}))


def test_a_broken_transformer_engine_is_named(anew, monkeypatch, caplog) -> None:
    broken = ModuleType("transformer_engine")
    broken.__path__ = []
    monkeypatch.setitem(sys.modules, "transformer_engine", broken)
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)
    assert _chosen() == "local"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No module named 'transformer_engine.pytorch'" in caplog.text
    assert "\n" not in caplog.messages[0]


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "lacks"),
    [
        ("tensorwise", (8, 9), "12.6", None),
        ("tensorwise", (8, 6), "12.8", "compute capability 8.9 or later, and here is 8.6"),
        ("blockwise", (9, 0), "13.0", None),
        ("blockwise", (10, 0), "12.9", None),
        ("blockwise", (8, 9), "13.0", "compute capability 9.0 or later, and here is 8.9"),
        ("blockwise", (9, 0), "12.8", "a torch for CUDA 12.9 or later, and here is 12.8"),
    ],
)
def test_fp8_needs_a_device_and_a_cuda_of_its_recipe(
    recipe: str, capability: tuple[int, int], cuda: str, lacks: str | None
) -> None:
    expected = None if lacks is None else f"fp8_recipe={recipe} needs {lacks}"
    assert why_no_fp8(recipe, capability, cuda) == expected


def test_cuda_needs_a_torch_that_has_its_attention() -> None:
    for version in ("2.11.0+cu130", "2.11.0a0+nv26.3", "2.13.0"):
        check_torch(version)
    with pytest.raises(ValueError, match=r"^engine.device=cuda: torch 2.10.0\+cu128; install"):
        check_torch("2.10.0+cu128")


def test_what_another_machine_is_to_have_is_not_asked_of_this_one() -> None:
    """Though its device is left to it, and this one may have none."""
    asked = EngineConfig(
        apply_rope_fusion=True, attention="flex", fp8="hybrid", fp8_recipe="blockwise"
    )
    options = resolve_engine(asked, elsewhere=True).options
    assert options.fusions.apply_rope_fusion and options.attention == "flex"
    assert (options.fp8, options.fp8_recipe) == ("hybrid", "blockwise")


def test_fp8_is_the_named_roles_alone() -> None:
    job = load_file(find_config("dpo_tiny"), ["engine.fp8=e4m3"])
    both = replace(job, engine=replace(job.engine, fp8_roles=["actor", "reference"]))
    assert [fp8_of(job, role) for role in ("actor", "reference")] == ["e4m3", None]
    assert [fp8_of(both, role) for role in ("actor", "reference")] == ["e4m3", "e4m3"]
    assert fp8_of(load_file(find_config("dpo_tiny"), []), "actor") is None
    reward = load_file(find_config("reward_tiny"), ["engine.fp8=e4m3"])
    assert [fp8_of(reward, role) for role in ("actor", "reward")] == [None, "e4m3"]
    plan = job_plan(job, ModelOptions(fp8="e4m3"), 1)
    assert {own.role: own.options.fp8 for own in plan.contexts} == {
        "actor": "e4m3",
        "reference": None,
    }


def test_the_planner_refuses_what_was_not_measured() -> None:
    profile = tiny_profile(load_file(find_config("dpo_tiny"), []))
    for override, message in (
        ("engine.fp8=hybrid", "engine.fp8: hybrid, but the planner has no times"),
        ("engine.apply_rope_fusion=true", "engine.apply_rope_fusion: True, but the profile was"),
        ("optimizer.cpu_offload=true", "optimizer.cpu_offload: True, but .* measured with False:"),
    ):
        job = load_file(find_config("dpo_tiny"), [override])
        with pytest.raises(ValueError, match=f"^{message}"):
            job_to_plan(resolution_to_plan(job, profile), profile)
