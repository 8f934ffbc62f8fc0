"""Units to measure of a config: models, shards, rows, batches."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.commands.profile_measure import pooled
from puzzle_align.commands.profile_units import (
    GenerationUnit,
    MergeUnit,
    OptimizerUnit,
    RowUnit,
    Sizes,
    decode_batches,
    link_units,
    model_units,
    prefill_batches,
    profiled_models,
    row_tokens_of,
    tensor_shard,
    tensor_sizes_of,
)
from puzzle_align.config.load import find_config, load_file
from puzzle_align.config.resolution import Resolution
from puzzle_align.layout.model import ModelOptions, padded_vocab_size, without_adapters
from puzzle_align.layout.rows import membership, visible_pairs
from puzzle_align.planning.costs.profile import Time
from puzzle_align.planning.memory.model import layer_shard_parameters
from puzzle_align.planning.profiled_rows import ExampleSize, causal_row, packed_row
from puzzle_align.runtime.profiler.generation import decode_context, last_length
from puzzle_align.stages.outlook import microbatch_of
from tests.jobs import job_plan
from tests.specs import LLAMA_2_7B, MANY_HEADS, MISTRAL_7B, QWEN3_0_6B

OPTIONS = ModelOptions()


def models_of(name, *overrides):
    job = load_file(find_config(name), list(overrides))
    return job, profiled_models(job_plan(job, OPTIONS, Resolution(job).smallest_world_size()))


def test_models_that_are_alike_are_one() -> None:
    _, (model,) = models_of("dpo_tiny")
    assert model.roles == ("actor", "reference") and model.trained == ("actor",)
    assert model.recompute == ("none", "full") and not model.generates
    _, (actor, critic) = models_of("ppo_7b", "actor.parallel.recompute=selective")
    assert set(actor.roles) == {"actor", "reference"} and actor.generates
    assert set(critic.roles) == {"critic", "reward"} and not critic.generates
    assert (actor.trained, critic.trained) == (("actor",), ("critic",))
    assert actor.recompute == ("none", "selective", "full")  # the config's own among them


def test_a_model_whose_adapters_are_merged_samples_without_them() -> None:
    job = load_file(find_config("ppo_tiny_lora"), ["ppo.kl_coef=0"])
    plan = job_plan(job, OPTIONS, Resolution(job).smallest_world_size())
    actor, critic, base = profiled_models(plan, merged=("actor",))
    assert actor.generates and actor.merges and not critic.merges
    assert base.spec == without_adapters(actor.spec) and base.generates and not base.recompute
    example = ExampleSize(prompt=10, responses=(5, 5), longest=20)
    sizes = Sizes(tensor=(1, 2), tokens=(64,), example=example, row_layout="shared")
    units = model_units(job, [actor, critic, base], sizes, OPTIONS, "cpu")
    assert len({unit.name for unit in units}) == len(units)
    assert {type(unit) for unit in units if unit.model == base} == {GenerationUnit}
    merged = [unit for unit in units if isinstance(unit, MergeUnit)]
    assert [unit.model for unit in merged] == [actor, actor]
    assert [unit.shard.spec.num_hidden_layers for unit in merged] == [1, 4]
    # A reference is that base, and is also measured as such.
    with_reference = load_file(find_config("ppo_tiny_lora"), [])
    plan = job_plan(with_reference, OPTIONS, Resolution(with_reference).smallest_world_size())
    (reference,) = (m for m in profiled_models(plan, merged=("actor",)) if m.spec == base.spec)
    assert reference.generates and reference.recompute and reference.roles == ("reference",)


def test_models_of_two_sizes_are_two() -> None:
    _, models = models_of("ppo_33b_7b")
    assert len({model.spec.hidden_size for model in models}) == 2


@pytest.mark.parametrize("spec", [LLAMA_2_7B, MISTRAL_7B, MANY_HEADS, QWEN3_0_6B])
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_a_shard_has_a_tensor_rank_s_parameters(spec, tensor) -> None:
    shard = tensor_shard(spec, tensor, 3, OPTIONS)
    alone = layer_shard_parameters(shard.spec, 1)
    assert alone == layer_shard_parameters(spec, tensor)
    assert shard.vocab_rows * tensor == padded_vocab_size(spec)
    assert shard.spec.vocab_size <= shard.vocab_rows
    assert shard.spec.head_dim == spec.head_dim and shard.spec.num_hidden_layers == 3


def test_tensor_sizes_divide_every_model() -> None:
    job, models = models_of("ppo_7b")
    assert tensor_sizes_of(Resolution(job).all_models(), models, (), "cuda") == (1, 2, 4, 8)
    assert tensor_sizes_of(Resolution(job).all_models(), models, (4, 1, 4), "cuda") == (1, 4)
    with pytest.raises(ValueError, match=r"--tensor 3: .* does not divide num_attention_heads"):
        tensor_sizes_of(Resolution(job).all_models(), models, (1, 3), "cuda")
    job, models = models_of("dpo_tiny", "actor.model.config.num_key_value_heads=1")
    assert tensor_sizes_of(Resolution(job).all_models(), models, (), "cpu") == (1,)


def test_rows_hold_the_longest_example() -> None:
    job, _ = models_of("dpo_tiny")
    assert row_tokens_of(job, 20, ()) == (128, 256, 512, 1024)
    assert row_tokens_of(job, 300, ()) == (512, 1024)
    assert row_tokens_of(job, 20, (64, 20)) == (20, 64)
    with pytest.raises(ValueError, match=r"--tokens 19: does not hold the longest .* 20 tokens"):
        row_tokens_of(job, 20, (64, 19))


@given(
    tokens=st.integers(12, 400),
    prompt=st.integers(1, 40),
    responses=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
    row_layout=st.sampled_from(["shared", "paired"]),
)
def test_rows_are_full(tokens, prompt, responses, row_layout) -> None:
    example = ExampleSize(prompt=prompt, responses=responses, longest=tokens)
    packed = microbatch_of(packed_row(tokens, example, row_layout), row_layout, 50)
    causal = microbatch_of(causal_row(tokens, len(responses), tokens // 2), "shared", 50)
    for microbatch in (packed, causal):
        layout = microbatch.layout
        assert layout.num_tokens == tokens and layout.segments[0].start == 0
        assert all(a.end == b.start for a, b in pairwise(layout.segments))
        assert layout.segments[-1].end == tokens
        segment, part = membership(layout)
        same = segment[:, None] == segment
        seen = same & ((part == 0) | (part[:, None] == part)) & np.tri(tokens, dtype=bool)
        assert visible_pairs(layout) == seen.sum()
    assert visible_pairs(causal.layout) >= tokens * (tokens + 1) // 2 - 3 * tokens


def test_a_packed_row_is_made_after_the_example() -> None:
    example = ExampleSize(prompt=60, responses=(20, 20), longest=100)
    assert packed_row(200, example, "shared") == [(60, (20, 20))] * 2
    assert packed_row(320, example, "paired") == [(60, (20, 20))] * 2


@pytest.mark.parametrize("name", ["dpo_7b", "ppo_7b"])
def test_units_are_complete(name) -> None:
    job, models = models_of(name)
    example = ExampleSize(prompt=100, responses=(50, 50), longest=200)
    sizes = Sizes(
        tensor=tensor_sizes_of(Resolution(job).all_models(), models, (), "cuda"),
        tokens=row_tokens_of(job, 200, ()),
        example=example,
        row_layout="shared",
    )
    units = model_units(job, models, sizes, OPTIONS, "cuda")
    assert len({unit.name for unit in units}) == len(units)
    for model in models:
        own = [unit for unit in units if unit.model == model]
        rows = [unit for unit in own if isinstance(unit, RowUnit)]
        found = [
            (
                unit.shard.tensor,
                unit.shard.options.recompute,
                sum(p + sum(r) for p, r in unit.rows[0][1]),
            )
            for unit in rows
        ]
        assert sorted(found) == sorted(
            (tensor, mode, tokens)
            for tensor in sizes.tensor
            for mode in model.recompute
            for tokens in sizes.tokens
        )
        with_ends = [unit for unit in rows if unit.with_ends]
        assert len(with_ends) == len(sizes.tensor) * len(sizes.tokens)
        assert sum(isinstance(unit, OptimizerUnit) for unit in own) == 2
        generated = [
            (unit.shard.tensor, (unit.sequences, unit.prompt_tokens, unit.steps))
            for unit in own
            if isinstance(unit, GenerationUnit)
        ]
        prefilled = [(*batch, 0) for batch in prefill_batches(job)]
        batches = [*prefilled, *decode_batches(job, model.spec, 64)] if model.generates else []
        assert sorted(generated) == sorted(product(sizes.tensor, batches))
        for unit in own:
            width = unit.shard.spec.num_attention_heads * unit.shard.tensor
            assert width == model.spec.num_attention_heads


def test_batches_are_those_that_the_job_may_have() -> None:
    job, (actor, _) = models_of("ppo_7b")
    prompt, total = 1024, 2048
    # A prompt, a quarter of a full prefill, and a full one; of whole prompts, and of short ones.
    prefilled = {(sequences * tokens, tokens) for sequences, tokens in prefill_batches(job)}
    assert prefilled == {*product((1024, 2048, 8192), (prompt, prompt // 4))}
    batches = decode_batches(job, actor.spec, 64)
    found = [(sequences, decode_context(tokens, steps)) for sequences, tokens, steps in batches]
    assert found == [*product((1, 4, 16), (total // 8, total // 2, total))]
    assert {steps for _, _, steps in batches} == {64}


def test_decode_batches_stay_in_the_model() -> None:
    job, (actor, _) = models_of("ppo_tiny", "actor.model.config.max_position_embeddings=32")
    batches = decode_batches(job, actor.spec, 16)
    assert min(tokens for _, tokens, _ in batches) >= 1
    assert max(last_length(tokens, steps) for _, tokens, steps in batches) == 32


def test_samples_become_a_median_and_half_the_quartiles_range() -> None:
    found = pooled(
        [
            {"time": [5.0, 1.0, 2.0], "difference": [-2.0, -1.0, 0.5]},
            {"time": [3.0, 4.0], "difference": []},
        ]
    )
    assert found["time"] == Time(median=3.0, spread=1.0)
    assert found["difference"].median == 0.0


def test_links_of_one_rank_and_of_two_nodes() -> None:
    (copy,) = link_units(1, 1, "cpu")
    assert (copy.name, copy.groups) == ("copy", ((0,),))
    names = [unit.name for unit in link_units(2, 4, "cuda")]
    assert len(set(names)) == len(names)
    assert "p2p in network among 2 ranks" in names
    assert "all_reduce in network among 8 ranks" in names
    assert "all_gather in node among 4 ranks" in names
