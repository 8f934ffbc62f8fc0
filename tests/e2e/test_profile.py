"""``profile`` of a tiny config: what is measured, and its errors."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.costs.links import TRANSPORTS
from puzzle_align.planning.costs.profile import Profile, Time, load_profile
from puzzle_align.planning.memory.model import layer_activation_bytes
from puzzle_align.planning.plan_file import open_plan
from tests.e2e.launch import ROOT, SMALL, run_job

PROFILE = ROOT / "launch" / "profile.py"
# With samples of few messages, none of them large: those take most of a profile's time.
FEW_MESSAGES = f"""
import runpy
from puzzle_align.commands import profile_units
from puzzle_align.runtime.profiler import links
profile_units._LINK_SIZES["cpu"] = (4096, 2**20, 8 * 2**20)
links._MESSAGES, links._BATCH_BYTES = 2, 2**20
runpy.run_path({str(PROFILE)!r}, run_name="__main__")
"""
TOKENS, TENSOR = (32, 64), (1, 2)
PPO = (
    "--config",
    "ppo_tiny",
    "actor.model.config.hidden_size=32",
    "actor.model.config.intermediate_size=64",
    "data.max_length=12",
    "generation.max_new_tokens=4",
    "generation.min_new_tokens=0",
    "generation.decode_batch_size=4",
    "optimizer.use_distributed_optimizer=true",
    "optimizer.state_dtype=bf16",
    "optimizer.cpu_offload=true",
    "actor.lora.r=2",
)


def seconds(value: object) -> list[float]:
    """The medians of all times in a point, or in what holds points."""
    if isinstance(value, Time):
        return [value.median]
    if dataclasses.is_dataclass(value):
        return seconds([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, list | tuple):
        return [found for item in value for found in seconds(item)]
    return []


def sizes(tokens: Sequence[int], tensor: Sequence[int]) -> tuple[str, ...]:
    """Flags that ask for each point once, in these sizes."""
    first, second = (",".join(map(str, given)) for given in (tokens, tensor))
    return "--tokens", first, "--tensor", second, "--repeats", "1"


def check_rows(profile: Profile, tokens: Sequence[int], tensor: Sequence[int]) -> None:
    for model in profile.models:
        points = {(p.tensor, p.recompute, p.row_tokens) for p in model.rows}
        assert points == set(product(tensor, ("none", "full"), tokens))
        assert len(model.rows) == 3 * len(points)  # packed, causal, and of halves
        ends = set(product(tensor, tokens))
        assert {(p.tensor, p.row_tokens) for p in model.ends} == ends
        predictions = {(p.tensor, p.row_tokens, p.predictions) for p in model.ends}
        assert len(predictions) == 2 * len(ends)
        assert min(p.forward.median for p in model.rows) > 0
        assert min(p.train_forward.median for p in model.rows) > 0
        assert min(p.backward.median for p in model.rows) > 0
    assert len({p.parameters for p in profile.models[0].optimizer}) == 2
    assert min(seconds(profile.models)) >= 0


def check_memory(profile: Profile) -> None:
    """Assert a layer's estimated memory, but for what torch's RMSNorm keeps on a CPU besides (not
    if its weight is frozen) and for the pieces of attention: together no more than a fifth.

    Further responses' keys are estimated for CUDA, of pairs that are half prompts.
    """
    for model in profile.models:
        for point in model.rows:
            options = dataclasses.replace(profile.options, recompute=point.recompute)
            if point.recompute == "full":
                assert point.kept_bytes == point.row_tokens * model.model.hidden_size * 4
                continue
            plan = ParallelPlan(tensor=point.tensor)
            estimate = layer_activation_bytes(model.model, plan, options, point.row_tokens)
            unfused = 2 * point.row_tokens * model.model.hidden_size * 4
            unfused = unfused if model.model.lora is None else 0
            queries = model.model.num_attention_heads * model.model.head_dim // point.tensor
            joined = point.row_tokens * 4 * (3 * queries // 2)
            assert point.kept_bytes <= 1.2 * (estimate + unfused)
            assert point.kept_bytes >= estimate + unfused - joined


@pytest.fixture
def few_messages(tmp_path: Path) -> Path:
    """A script that profiles as ``launch/profile.py``, in less time."""
    script = tmp_path / "few_messages.py"
    script.write_text(FEW_MESSAGES)
    return script


# Sizes are measured one after the other, each alone.
@pytest.mark.parametrize(
    ("tokens", "tensor"), [((64,), (2,)), pytest.param(TOKENS, TENSOR, marks=pytest.mark.slow)]
)
def test_two_ranks_profile_preference_training(
    tmp_path, command, few_messages, tokens, tensor
) -> None:
    """A Gemma, whose norm, embedding and activation are others than Llama's."""
    path = tmp_path / "profile.json"
    job = (*SMALL, "actor.model.config.model_type=gemma", f"output_dir={tmp_path}")
    asked = (*sizes(tokens, tensor), "--links", "h100", "--output", str(path))
    done = run_job(*job, *asked, script=few_messages)
    assert done.returncode == 0, done.stderr
    profile = load_profile(path)
    assert [p.name for p in tmp_path.glob("profile.json*")] == ["profile.json"]
    assert profile.hardware.device == "cpu" and profile.hardware.ranks_per_node == 2
    assert "torch" in profile.hardware.versions
    check_rows(profile, tokens, tensor)
    check_memory(profile)
    measured = {(x.transport, x.place, x.ranks) for x in profile.links if not x.declared}
    assert measured == {*((t, "node", 2) for t in TRANSPORTS), ("copy", "node", 1)}
    assert ("all_reduce", "network", 512) in {
        (x.transport, x.place, x.ranks) for x in profile.links if x.declared == "h100"
    }
    assert min(seconds(profile.links)) > 0
    files = ("--profile", str(path), "--output", str(tmp_path / "plan.json"))
    chosen = [key for key in job if not key.startswith("packing.row_tokens")]
    assert command("plan", *chosen, *files, "--gpus", "2")[0] == 0
    plan = open_plan(tmp_path / "plan.json").plan
    assert plan.context("actor", "train").model == profile.models[0].model


@pytest.mark.slow  # the planner's runs on two hosts need it, too
def test_links_between_nodes_are_measured(monkeypatch, tmp_path, few_messages) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # two nodes of one rank each
    path = tmp_path / "profile.json"
    arguments = (*SMALL, f"output_dir={tmp_path}", *sizes((64,), (1,)), "--output", str(path))
    done = run_job(*arguments, script=few_messages)
    assert done.returncode == 0, done.stderr
    profile = load_profile(path)
    found = [(x.transport, x.place, x.ranks, x.declared) for x in profile.links]
    assert found == [("copy", "node", 1, ""), *((t, "network", 2, "") for t in TRANSPORTS)]
    assert profile.hardware.ranks_per_node == 1


@pytest.mark.slow
def test_one_rank_profiles_ppo_with_adapters(tmp_path, few_messages) -> None:
    path = tmp_path / "profile.json"
    arguments = (*PPO, f"output_dir={tmp_path}", *sizes((64,), TENSOR), "--output", str(path))
    done = run_job(*arguments, script=few_messages, ranks=1)
    assert done.returncode == 0, done.stderr
    profile = load_profile(path)
    actor, critic, base = profile.models
    assert (actor.model.head, critic.model.head, base.model.head) == ("lm", "scalar", "lm")
    assert (actor.model.lora is None, base.model.lora) == (False, None)
    check_rows(profile, (64,), TENSOR)
    check_memory(profile)
    assert len({p.parameters for p in critic.optimizer}) == 2
    assert [(link.transport, link.ranks) for link in profile.links] == [("copy", 1)]
    for model in (actor, base):  # as which it samples while its adapters are merged
        assert {p.tensor for p in model.prefill} == {p.tensor for p in model.decode} == set(TENSOR)
        assert {p.sequences for p in model.decode} == {1, 4}
        assert len({p.context for p in model.decode}) == 3
        assert min(p.layer.median for p in (*model.prefill, *model.decode)) > 0
    assert critic.prefill == critic.decode == critic.merge == base.merge == base.optimizer == ()
    # By hand: q 32 x 32, k and v 32 x 16, o 32 x 32, an MLP of 3 x 32 x 64; a layer, and four.
    weights = 32 * (32 + 16 + 16 + 32 + 3 * 64)
    assert [p.parameters for p in actor.merge] == [weights, 4 * weights]
    assert min(p.time.median for p in actor.merge) > 0
    kinds = {(p.state_dtype, p.cpu_offload) for p in (*actor.optimizer, *critic.optimizer)}
    assert kinds == {("bf16", True)}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--tensor", "1,3"), "--tensor 3: tensor size 3 does not divide num_attention_heads=4"),
        (("--output", "nowhere/profile.json"), "nowhere is not a writable folder"),
        (("--output", "."), "--output .: is a folder"),
        (("--declare", "b200"), "--declare b200: unknown device; give one of a100-sxm, a100-pcie,"),
        (("--declare", "h100", "--repeats", "3"), "--repeats: --declare measures nothing; leave"),
        (("--declare", "h100", "engine.dtype=fp32"), "engine.dtype: fp32, but the figures of"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    command, monkeypatch, tmp_path, flags, problem
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, errors = command("profile", *SMALL, "output_dir=run", *flags)
    assert (code, out, len(errors)) == (2, [], 1)
    assert errors[0].startswith("error: ") and problem in errors[0]
    assert not list(tmp_path.glob("profile.json*"))


def test_a_profile_can_be_declared_without_the_device(command, tmp_path: Path) -> None:
    """No model is built: a 7B model is profiled and planned on this machine."""
    job = ("--config", "dpo_7b", f"output_dir={tmp_path}/out", "data.num_synthetic=256")
    states = ("optimizer.state_dtype=bf16", "optimizer.cpu_offload=true")
    path, fast = tmp_path / "h100.json", tmp_path / "fast.json"
    code, _, errors = command("profile", "--declare", "h100", *job, "--output", str(path))
    assert code == 0, errors
    asked = ("--declare", "h200", "--links", "a100-sxm", "--tokens", "8192", *states)
    assert command("profile", *asked, *job, "--output", str(fast))[0] == 0
    profile, other = load_profile(path), load_profile(fast)
    assert profile.hardware.name == "h100, declared" and profile.hardware.device == "cuda"
    assert {link.declared for link in profile.links} == {"h100"}
    links = {(link.transport == "copy", link.declared) for link in other.links}
    assert links == {(False, "a100-sxm"), (True, "h200")}
    (model,), (h200,) = profile.models, other.models
    assert {point.row_tokens for point in model.rows} == {8192, 16384}
    assert {point.row_tokens for point in h200.rows} == {8192}
    assert {(point.state_dtype, point.cpu_offload) for point in h200.optimizer} == {("bf16", True)}
    # Of a layer's forward on one rank: its FLOPs at 55% of 989 TFLOP/s.
    layer = next(p for p in model.rows if (p.tensor, p.row_tokens, p.pairs) == (1, 8192, 2**20))
    flops = 2 * 8192 * (218_103_808 + 2 * 4096 * 128)
    assert layer.forward.median == pytest.approx(flops / (0.55 * 989e12) + 60e-6, rel=1e-6)
    # AdamW of 10^9 parameters: 28 bytes each at 80% of 3.35 TB/s.
    step = next(point for point in model.optimizer if point.parameters == 10**9)
    assert step.step.median == pytest.approx(28e9 / (0.8 * 3.35e12) + 1e-3)

    out = tmp_path / "plan.json"
    code, shown, errors = command(
        "plan", *job, "--profile", str(path), "--gpus", "8", "--output", str(out)
    )
    assert code == 0, errors
    assert shown[0].startswith("profile: h100, declared") and "not measured: h100" in shown[1]
    plan = json.loads(out.read_text())
    assert plan["device"] == "cuda" and plan["notes"][0] == "profile: h100, declared"
    # Time-sharing beats precomputing, whose pass is over all data.
    assert open_plan(out).plan.phase("train").order == "time_shared"


def test_each_declared_model_has_its_own_optimizer(command, tmp_path: Path) -> None:
    """The actor's state is in bf16, the critic's in fp32; the reference is not trained."""
    states = ("optimizer.state_dtype=bf16", "critic.optimizer={state_dtype: fp32}")
    job = ("--config", "ppo_7b", f"output_dir={tmp_path}/out", "data.num_synthetic=256", *states)
    path = tmp_path / "h100.json"
    code, _, errors = command("profile", "--declare", "h100", *job, "--output", str(path))
    assert code == 0, errors
    kinds = {
        model.model.head: {(point.state_dtype, point.cpu_offload) for point in model.optimizer}
        for model in load_profile(path).models
    }
    assert kinds == {"lm": {("bf16", False)}, "scalar": {("fp32", False)}}


def test_the_launcher_s_folder_hides_no_module() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PROFILE.parent)!r})\n"
        "import cProfile, profile\n"
        "cProfile.Profile(); print(profile.run.__module__, profile.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "profile" and str(ROOT) not in done.stdout
