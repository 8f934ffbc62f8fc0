"""Memory of stage ppo's models and phases, against sums made by hand."""

from dataclasses import replace

from puzzle_align.layout.model import ModelOptions, ModelSpec, with_scalar_head
from puzzle_align.layout.plan import ParallelPlan
from puzzle_align.planning.memory import (
    activation_bytes,
    columns_table,
    hidden_bytes,
    layer_workspace_bytes,
    rank_parameters,
    workspace_bytes,
)
from puzzle_align.planning.phase_memory import (
    SAMPLING_BYTES,
    PhaseRole,
    PhaseSizes,
    cache_token_bytes,
    estimate_phases,
)

POLICY = ModelSpec(
    model_type="llama",
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    max_position_embeddings=256,
)
VALUE = with_scalar_head(POLICY)
BF16 = ModelOptions(dtype="bf16")
SIZES = PhaseSizes(
    row_tokens=512,
    prefill_tokens=256,
    decode_batch_size=8,
    num_sequences=32,
    prompt_tokens=24,
    response_tokens=40,
)


def role(name: str, plan: ParallelPlan, first: int = 0, **other) -> PhaseRole:
    return PhaseRole(
        role=name,
        plan=plan,
        ranks=range(first, first + plan.world_size),
        num_microbatches=4,
        spec=POLICY if name in ("actor", "reference") else VALUE,
        options=BF16,
        is_trained=name in ("actor", "critic"),
        is_scoring=name != "actor",
        **other,
    )


def test_states_add_up_and_the_largest_phase_comes_on_top() -> None:
    plan = ParallelPlan(pipeline=2, data=2)
    actor = role("actor", plan, distributed_optimizer=True)
    roles = [actor, role("critic", plan), role("reference", plan)]
    columns = estimate_phases(roles, SIZES)
    assert list(columns) == ["0-1", "2-3"]
    for rank, parts in enumerate(columns.values()):
        policy, value = (rank_parameters(spec, plan, rank) for spec in (POLICY, VALUE))
        assert parts["actor"] == (2 + 4 + 12 // 2) * policy
        assert parts["critic"] == (2 + 4 + 12) * value
        assert parts["reference"] == 2 * policy
        states = parts["actor"] + parts["critic"] + parts["reference"]
        phases = (parts[name] for name in ("generate", "score", "learn"))
        assert parts["total"] == states + max(phases)


def test_a_phase_is_counted_where_its_models_are() -> None:
    actor, critic = role("actor", ParallelPlan(data=2)), role("critic", ParallelPlan(), first=2)
    reward = role("reward", ParallelPlan(), first=2)
    columns = estimate_phases([actor, critic, reward], SIZES)
    assert list(columns) == ["0-1", "2"]
    first, second = columns.values()
    assert first["critic"] == first["score"] == second["actor"] == second["generate"] == 0
    rows = 2 * 2 * hidden_bytes(VALUE, critic.plan, BF16, 512)
    assert second["score"] == rows + workspace_bytes(VALUE, critic.plan, BF16, 0, 512)
    assert min(first["learn"], first["generate"], second["learn"]) > 0


def test_the_cache_holds_the_longest_sequences_of_all_slots() -> None:
    plan = ParallelPlan(pipeline=2, tensor=2)
    # Two layers a rank, one key head of 16 channels a rank, keys and values, two bytes a number.
    assert cache_token_bytes(POLICY, plan, BF16) == 2 * 1 * 16 * 2 * 2
    actor = role("actor", plan)

    def generation(sizes: PhaseSizes, rank: int = 0) -> int:
        return [parts["generate"] for parts in estimate_phases([actor], sizes).values()][rank]

    def visit(tokens: int) -> int:
        workspace = layer_workspace_bytes(POLICY, plan, BF16, tokens)
        return 2 * hidden_bytes(POLICY, plan, BF16, tokens) + workspace

    # Two groups of eight sequences of 24 + 40 tokens; eight prompts are one visit.
    assert generation(SIZES) == 16 * 64 * 128 + visit(8 * 24)
    assert generation(replace(SIZES, num_sequences=10)) == 10 * 64 * 128 + visit(8 * 24)
    assert generation(replace(SIZES, prefill_tokens=100)) == 16 * 64 * 128 + visit(100)
    assert generation(replace(SIZES, prefill_tokens=8)) == 16 * 64 * 128 + visit(24)
    # On the last rank, eight sequences' distributions are larger than a visit of few prompts.
    short = replace(SIZES, prompt_tokens=1, response_tokens=1)
    assert generation(short, rank=1) == 16 * 2 * 128 + 8 * 256 * SAMPLING_BYTES


def test_learning_keeps_the_larger_models_activations() -> None:
    plan = ParallelPlan()
    (parts,) = estimate_phases([role("actor", plan), role("critic", plan)], SIZES).values()

    def kept(spec: ModelSpec, *, values_tokens: bool = False) -> int:
        return activation_bytes(spec, plan, BF16, 0, 512, 4, values_tokens=values_tokens)

    # A value a token: hidden states as they are, and in float32.
    assert kept(VALUE, values_tokens=True) - kept(VALUE) == (2 + 4) * 512 * 64
    largest = max(kept(POLICY), kept(VALUE, values_tokens=True))
    workspace = max(workspace_bytes(spec, plan, BF16, 0, 512) for spec in (POLICY, VALUE))
    assert parts["learn"] == largest + workspace


def test_the_table_has_a_column_a_set_of_ranks() -> None:
    lines = columns_table({"0-3": {"actor": 2**30}, "4": {"actor": 2**20}}).splitlines()
    assert lines[0].split()[-2:] == ["0-3", "4"]
    assert lines[1].split() == ["actor", "1.00", "GiB", "1.00", "MiB"]
