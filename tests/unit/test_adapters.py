"""Adapters in configs, plans and memory, and new ones' numbers."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from puzzle_align.config.check_ppo import plan_problems
from puzzle_align.config.chosen_plan import ChosenPlan
from puzzle_align.config.load import load_job
from puzzle_align.config.resolution import Engine, Resolution
from puzzle_align.data.tokenize import ByteTokenizer
from puzzle_align.layout.hf_config import from_hf_config
from puzzle_align.layout.holdings import Holdings
from puzzle_align.layout.job_plan import OptimizerStates, Settings
from puzzle_align.layout.model import (
    LORA_TARGETS,
    Dtype,
    LoraSpec,
    ModelOptions,
    ModelSpec,
    with_scalar_head,
)
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.layout.weights import (
    adapter_shapes,
    hf_shapes,
    is_base,
    is_trained,
    num_parameters,
    num_trainable_parameters,
)
from puzzle_align.models.hf.adapters import PREFIX, NewAdapters, adapter_problems, open_adapters
from puzzle_align.models.hf.weights import check_adapters
from puzzle_align.planning.memory.job import state_bytes
from puzzle_align.planning.memory.model import (
    merged_parameters,
    rank_parameters,
    shared_parameters,
    trained_parameters,
)
from puzzle_align.stages.banner import job_memory
from puzzle_align.stages.inputs import check_weights
from puzzle_align.stages.outlook import open_outlook
from tests.jobs import resolved
from tests.refusals import refusal
from tests.specs import CONFIG, PAPER
from tests.unit.job_plans import context
from tests.unit.test_check import SOUND, assert_problem, problems_with

LORA = LoraSpec(r=2, lora_alpha=3.0, target_modules=LORA_TARGETS)
ADAPTED = replace(PAPER, lora=LORA)
PPO = f"""
stage: ppo
engine: {{device: cpu}}
actor: {{model: {{config: {json.dumps(CONFIG)}, random_weights: true}}}}
tokenizer: {{path: byte}}
reward: {{function: "puzzle_align.data.synthetic:vowel_share"}}
data: {{format: synthetic, num_synthetic: 64, max_length: 64}}
generation: {{max_new_tokens: 16}}
global_batch_size: 8
"""
# By hand, of a layer of H = 8, q = 8, k = v = 4, F = 16 with r = 2: q 16+16, k 16+8, v 16+8,
# o 16+16, gate and up 16+32 each, down 32+16.
OF_LAYER = 32 + 24 + 24 + 32 + 48 + 48 + 48


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ("reference.lora.r=4", "reference.lora: stage dpo does not train the reference; give ref"),
        ("critic.lora={}", "critic.lora: stage dpo does not train the critic; leave it out"),
        ("actor.base=actor", "actor.base: actor, which is the role itself"),
        ("reference.base=actor", "reference.base: actor, but all weights of the actor are trained"),
        (
            "actor.lora.r=4 reference.base=actor reference.model.config.model_type=llama",
            "reference.model: given, and reference.base=actor",
        ),
        ("reference.lora=off", "reference.base: actor, but all weights of the actor are trained"),
        ("actor.lora.target_modules=[q_proj,query]", ": ['q_proj', 'query']; give all-linear"),
        ("actor.lora.target_modules=[]", ": []; give all-linear"),
        ("actor.lora.r=0", ": 0 is out of range"),
        ("actor.lora.lora_dropout=1", ": 1.0 is out of range"),
        ("actor.lora.init_lora_weights=false", ": false would change the model"),
        ("actor.lora.r=4 dpo.sync_ref_model=true", ": true, but the reference has the base"),
        (
            "actor.lora.r=4 actor.model.config.model_type=phi3",
            "actor.lora: phi3 stores several of its layers as one",
        ),
    ],
)
def test_what_cannot_be_adapted_is_said(overrides: str, start: str) -> None:
    assert_problem(overrides, start)


@pytest.mark.parametrize(
    ("overrides", "shares"),
    [
        ((), True),
        (
            ("placement.reference=time_shared", "actor.parallel.pipeline_model_parallel_size=2"),
            True,
        ),
        (("reference.parallel.tensor_model_parallel_size=2",), False),
        (("actor.lora.path=adapters",), True),
        (("actor.lora.path=adapters", "reference.base=actor"), True),
        (("dpo.precompute_ref_log_probs=true",), False),
    ],
)
def test_the_reference_is_in_the_policys_memory_where_both_have_one_plan(
    overrides: tuple[str, ...], shares: bool
) -> None:
    config = load_job(SOUND, ["actor.lora.r=2", *overrides])
    plan = Resolution(config, 2).plan
    actor = plan.context("actor", "train")
    reference = plan.context("reference", "infer")
    assert plan.lender(actor) is None
    assert plan.lender(reference) == (actor if shares else None)
    assert actor.model.lora is not None
    assert (reference.model.lora is not None) == (overrides == ("actor.lora.path=adapters",))


@pytest.mark.parametrize(
    "plan", [ParallelPlan(), ParallelPlan(pipeline=2, tensor=2), ParallelPlan(tensor=2, data=2)]
)
@pytest.mark.parametrize("model", [ADAPTED, with_scalar_head(ADAPTED)])
def test_counts_are_those_of_the_parameters(model: ModelSpec, plan: ParallelPlan) -> None:
    holdings = Holdings(model, plan, tuple(range(plan.world_size)))
    for part in range(plan.pipeline):
        rank = part * plan.data * plan.tensor
        held = {
            name: prod(parameter.shape)
            for chunk in holdings.parameters(rank)
            for name, parameter in chunk.items()
        }
        assert rank_parameters(model, plan, part) == sum(held.values())
        moved = sum(size for name, size in held.items() if is_trained(model, name))
        assert trained_parameters(model, plan, part) == moved


def test_a_models_adapters_are_counted_by_hand() -> None:
    assert num_trainable_parameters(PAPER) == num_parameters(PAPER)
    assert num_trainable_parameters(ADAPTED) == 4 * OF_LAYER
    assert num_trainable_parameters(with_scalar_head(ADAPTED)) == 4 * OF_LAYER + 8
    assert hf_shapes(ADAPTED) == hf_shapes(PAPER)
    some = replace(PAPER, lora=replace(LORA, target_modules=("v_proj",)))
    assert adapter_shapes(some) == {
        f"model.layers.{layer}.self_attn.v_proj.lora_{letter}.weight": shape
        for layer in range(4)
        for letter, shape in (("A", (2, 8)), ("B", (4, 2)))
    }


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    plan = ParallelPlan()
    actor = context("actor", plan, "train", model=ADAPTED)
    whole = rank_parameters(ADAPTED, plan, 0)
    assert state_bytes(actor, 0, OptimizerStates()) == {
        "weights": 4 * whole,
        "gradients": 4 * 4 * OF_LAYER,
        "optimizer": 8 * 4 * OF_LAYER,
    }
    reference = context("reference", plan, "infer", model=PAPER)
    assert state_bytes(reference, 0, OptimizerStates(), actor) == {"weights": 0}
    started = context("reference", plan, "infer", model=ADAPTED)
    own = 4 * 4 * OF_LAYER
    assert state_bytes(started, 0, OptimizerStates(), actor) == {"weights": own}
    reward = context("reward", plan, "infer", model=with_scalar_head(ADAPTED))
    assert state_bytes(reward, 0, OptimizerStates(), actor) == {"weights": own + 4 * 8}


@pytest.mark.parametrize(
    "plan", [ParallelPlan(), ParallelPlan(pipeline=2, tensor=2), ParallelPlan(tensor=2, data=2)]
)
@pytest.mark.parametrize("lender", [PAPER, with_scalar_head(PAPER)])
@pytest.mark.parametrize("model", [ADAPTED, with_scalar_head(ADAPTED)])
def test_what_is_shared_is_what_both_have(
    model: ModelSpec, lender: ModelSpec, plan: ParallelPlan
) -> None:
    """Parameters with the same boxes of the same tensors, but for scalar heads."""
    ranks = tuple(range(plan.world_size))
    here, there = (Holdings(spec, plan, ranks) for spec in (model, lender))
    for part in range(plan.pipeline):
        rank = part * plan.data * plan.tensor
        own, theirs = (
            {(p.shape, p.pieces): n for chunk in of.parameters(rank) for n, p in chunk.items()}
            for of in (here, there)
        )
        same = sum(
            prod(shape)
            for (shape, pieces), name in own.items()
            if (shape, pieces) in theirs and is_base(model, name)
        )
        assert shared_parameters(model, lender, plan, part) == same


def test_a_plan_from_a_file_gets_the_jobs_bases() -> None:
    """Else a plan made for other models could put weights in memory that are not theirs."""
    config = load_job(SOUND, ["actor.lora.r=2"])
    plan = Resolution(config, 2).plan
    others = [
        replace(p, contexts=tuple(replace(c, base="another") for c in p.contexts))
        for p in plan.phases
    ]
    chosen = ChosenPlan(
        source="plan.json",
        plan=replace(plan, phases=tuple(others)),
        settings=Settings(row_tokens=64),
        device="cpu",
    )
    assert Resolution(config, 2, chosen=chosen).plan == plan


@pytest.mark.parametrize("sampling", ["", "generation.parallel.tensor_model_parallel_size=2"])
def test_merged_weights_count_where_the_actor_samples_in_its_own_plan(sampling: str) -> None:
    """By hand: four layers of H = 64, q = 64, k = v = 32, F = 128, in fp32."""
    columns = []
    for merge in (False, True):
        given = ["actor.lora.r=2", f"actor.lora.merge={merge}", *([sampling] if sampling else [])]
        config = load_job(PPO, given)
        job = resolved(config, 2)
        preview = open_outlook(config).preview(job.plan, ByteTokenizer(), [])
        columns.append(job_memory(job, preview)["0-1"])
    apart, merged = columns
    more = 0 if sampling else 4 * 4 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    assert merged["generate"] - apart["generate"] == more


def test_the_base_of_a_copy_under_another_plan_stays() -> None:
    """By hand as above: half of the 384 rows of embeddings and head, and of the layers' matrices.

    It counts beside the largest phase, in which nothing samples.
    """
    config = load_job(PPO, ["actor.lora.r=2", "generation.parallel.tensor_model_parallel_size=2"])
    job = resolved(config, 2)
    parts = job_memory(job, open_outlook(config).preview(job.plan, ByteTokenizer(), []))["0-1"]
    halves = 2 * 384 * 64 + 4 * 64 * (2 * 64 + 2 * 32 + 3 * 128)
    assert parts["actor weights to generate"] == 4 * halves // 2
    phases = [parts[phase.name] for phase in job.plan.phases]
    states = sum(parts.values()) - sum(phases) - parts["total"]
    assert parts["total"] == states + parts["learn"] and parts["learn"] == max(phases)


def test_merged_weights_are_a_rank_s_share_of_what_is_adapted() -> None:
    """By hand, of H = 8, q = 8, k = v = 4, F = 16: two of four layers, halves of their matrices."""
    plan = ParallelPlan(pipeline=2, tensor=2)
    for targets, of_layer in ((LORA_TARGETS, 8 * (2 * 8 + 2 * 4 + 3 * 16)), (("o_proj",), 8 * 8)):
        model = replace(PAPER, lora=replace(LORA, target_modules=targets))
        assert merged_parameters(model, plan, 0) == 2 * of_layer // 2


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        ((), True),
        (("ppo.recompute_log_probs=true",), False),
        (("generation.parallel.tensor_model_parallel_size=2",), False),  # nothing is merged
    ],
)
def test_merged_weights_in_bf16_need_log_probs_of_training(
    overrides: tuple[str, ...], is_refused: bool
) -> None:
    config = load_job(PPO, ["actor.lora.merge=true", *overrides])
    cases: list[tuple[Dtype, int]] = [("fp32", 0), ("bf16", int(is_refused))]
    for dtype, lines in cases:
        engine = Engine("cuda", ModelOptions(dtype=dtype))
        found = [*plan_problems(config, Resolution(config, 2, engine).plan)]
        assert len(found) == lines and all(line.startswith("actor.lora.merge") for line in found)


@pytest.mark.parametrize(
    ("dtype", "overrides", "merged"),
    [
        ("fp32", (), True),
        ("fp32", ("actor.lora.merge=false",), False),
        ("bf16", (), False),
        ("bf16", ("ppo.recompute_log_probs=true",), True),
    ],
)
def test_adapters_are_merged_where_their_rounding_is_corrected_for(
    dtype: Dtype, overrides: tuple[str, ...], merged: bool
) -> None:
    config = load_job(PPO, ["actor.lora.r=2", *overrides])
    engine = Engine("cuda", ModelOptions(dtype=dtype))
    resolution = Resolution(config, 2, engine)
    assert resolution.merged == (("actor",) if merged else ())
    assert not [*plan_problems(config, resolution.plan)]


def test_scaling_is_pefts() -> None:
    assert LORA.scaling == 1.5
    assert replace(LORA, r=4, use_rslora=True).scaling == 1.5


def test_new_adapters_have_pefts_distributions_and_add_nothing() -> None:
    shape = (64, 4096)
    box = tuple((0, extent) for extent in shape)
    name = "model.layers.0.mlp.down_proj.lora_{}.weight"
    uniform = NewAdapters(False, 3).read(name.format("A"), shape, box)
    assert uniform.abs().max() <= 1 / 64 and uniform.abs().max() > 0.999 / 64
    assert uniform.std().item() == pytest.approx(1 / 64 / 3**0.5, rel=0.01)
    normal = NewAdapters(True, 3).read(name.format("A"), shape, box)
    assert normal.std().item() == pytest.approx(1 / 64, rel=0.01)
    assert not NewAdapters(True, 3).read(name.format("B"), shape, box).any()
    part = NewAdapters(True, 3).read(name.format("A"), shape, ((8, 16), (0, 100)))
    assert torch.equal(part, normal[8:16, :100])
    for other in (
        NewAdapters(True, 4).read(name.format("A"), shape, box),
        NewAdapters(True, 3).read(name.replace("0", "1").format("A"), shape, box),
    ):
        assert (other == normal).float().mean() < 0.01
    sources = (NewAdapters(*kind) for kind in ((False, 3), (True, 3), (True, 4)))
    assert len({source.fingerprint() for source in sources}) == 3


def test_a_directory_of_other_adapters_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    ours = '"r": 2, "lora_alpha": 3, "target_modules": ["v_proj", "q_proj"]'
    lora = replace(LORA, target_modules=("q_proj", "v_proj"))
    file.write_text(f'{{"peft_type": "LORA", {ours}}}')
    assert adapter_problems(tmp_path, lora, "actor.lora") == []
    (line,) = adapter_problems(tmp_path, replace(lora, r=8), "actor.lora")
    assert line.startswith("actor.lora.r: ") and line.endswith("has 2; set it to this")
    file.write_text(f'{{"peft_type": "LORA", "use_dora": true, {ours}}}')
    (line,) = adapter_problems(tmp_path, lora, "actor.lora")
    assert "use_dora" in line
    for kind, is_plain in (("gaussian", True), ("pissa_niter_4", False), ("olora", False)):
        file.write_text(f'{{"peft_type": "LORA", "init_lora_weights": "{kind}", {ours}}}')
        lines = adapter_problems(tmp_path, lora, "actor.lora")
        assert (lines == []) == is_plain and all(f"init_lora_weights={kind}" in x for x in lines)
    dotted = '["layers.0.self_attn.q_proj", "self_attn.v_proj"]'
    for targets in (dotted, '".*(q|v)_proj"'):  # the tensors' names tell which layers have them
        file.write_text(f'{{"r": 2, "lora_alpha": 3, "target_modules": {targets}}}')
        assert adapter_problems(tmp_path, lora, "actor.lora") == []
    file.write_text('{"lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]}')
    (line,) = adapter_problems(tmp_path, lora, "actor.lora")
    assert line.startswith("actor.lora.r: ") and line.endswith("has 8; set it to this")  # PEFT's
    file.write_text('{"r": 2, "lora_alpha": 3, "target_modules": ["self_attn.k_proj"]}')
    (line,) = adapter_problems(tmp_path, lora, "actor.lora")
    assert line.endswith("has ['k_proj']; set it to this")
    file.unlink()
    (line,) = adapter_problems(tmp_path, lora, "actor.lora")
    assert line.startswith(f"actor.lora.path: {file}: no such file; give a directory that PEFT's")
    line = refusal(lambda: open_adapters(tmp_path))
    assert line.startswith(f"{tmp_path}: no adapter_model.safetensors is there; give a directory")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"v_proj": 6}),
        ("layers_to_transform", [0, 2]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("alora_invocation_tokens", [1]),
        ("use_rslora", True),
        ("lora_alpha", 6),
        ("peft_type", "ADALORA"),
    ],
)
def test_a_setting_that_would_change_what_adapters_compute_is_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    lora = replace(LORA, target_modules=("q_proj",))
    plain = {"rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "bias": "none"}
    ours = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], **plain}
    for config, number in ((ours, 0), ({**ours, name: value}, 1)):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        lines = adapter_problems(tmp_path, lora, "actor.lora")
        assert len(lines) == number and all(name in line for line in lines)


def test_weights_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    """A trained output head (modules_to_save), a reward model's for a policy, and no tensor."""
    spec = replace(PAPER, lora=replace(LORA, target_modules=("q_proj",)))
    own = {PREFIX + name: torch.zeros(shape) for name, shape in adapter_shapes(spec).items()}

    def problem(model: ModelSpec, more: dict[str, torch.Tensor], of: dict = own) -> str:
        save_file({**of, **more}, tmp_path / "adapter_model.safetensors")
        return refusal(lambda: check_adapters(model, open_adapters(tmp_path)))

    head = {f"{PREFIX}lm_head.weight": torch.zeros(spec.vocab_size, spec.hidden_size)}
    assert "lm_head.weight is not part of the adapters that adapter_config" in problem(spec, head)
    score = {f"{PREFIX}score.weight": torch.zeros(1, spec.hidden_size)}
    assert "with score.weight these are a reward model's adapters" in problem(spec, score)
    check_adapters(with_scalar_head(spec), open_adapters(tmp_path))
    assert "q_proj.lora_A.weight is missing from the weights" in problem(spec, {}, {})
    assert open_adapters(tmp_path).metadata() == {}


def test_a_fault_of_the_base_is_not_said_to_be_the_adapters(tmp_path: Path) -> None:
    """It is said once, though the reference has the same base, and adapters, too."""
    model = f"actor.model={{path: {tmp_path}/base, config: null, random_weights: false}}"
    config = load_job(SOUND, [model, f"actor.lora={{r: 2, path: {tmp_path}/peft}}"])
    for folder in ("base", "peft"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(CONFIG))
    peft = {"r": 4, "lora_alpha": 8, "target_modules": [*LORA_TARGETS]}
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(peft))

    def fault() -> str:
        job = resolved(config)
        assert [*job.models] == ["actor", "reference"]
        (line,) = check_weights(job.models.values(), config)
        return line

    assert fault().startswith(f"actor.model.path: {tmp_path}/base: neither model.safetensors nor")
    shapes = hf_shapes(from_hf_config(CONFIG, ""))
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "base/model.safetensors")
    assert fault().startswith(f"actor.model.path: {tmp_path}/base: tensor model.norm.weight is mis")
    save_file({**tensors, "model.norm.weight": norm}, tmp_path / "base/model.safetensors")
    assert fault().startswith(f"actor.lora.r: {tmp_path}/peft/adapter_config.json has 4; set it to")
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps({**peft, "r": 2}))
    assert fault().startswith(f"actor.lora.path: {tmp_path}/peft: no adapter_model.safetensors is")


def test_the_sound_job_with_adapters_is_sound() -> None:
    assert problems_with("actor.lora.r=4") == []
