"""Job plans that hypothesis draws, whether or not a model would fit them."""

from typing import get_args

from hypothesis import strategies as st

from puzzle_align.layout.job_plan import ContextPlan, JobPlan, Order, Phase, Workload
from puzzle_align.layout.model import (
    LORA_TARGETS,
    Activation,
    AttentionBackend,
    Dtype,
    Fp8Format,
    Fp8Recipe,
    Fusions,
    Head,
    LoraSpec,
    ModelOptions,
    ModelSpec,
    Recompute,
    RopeScaling,
)
from tests.unit.job_plans import any_plan, with_all

sizes = st.integers(1, 200_000)
floats = st.floats(1e-12, 1e9, allow_nan=False) | st.sampled_from([10_000.0, 1.0])
names = st.text(max_size=12)
token_ids = st.none() | sizes
loras = with_all(
    LoraSpec,
    r=sizes,
    lora_alpha=floats,
    target_modules=st.lists(st.sampled_from(LORA_TARGETS), max_size=3).map(tuple),
    lora_dropout=floats,
    use_rslora=st.booleans(),
)
specs = with_all(
    ModelSpec,
    model_type=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    hidden_size=sizes,
    intermediate_size=sizes,
    num_hidden_layers=sizes,
    num_attention_heads=sizes,
    num_key_value_heads=sizes,
    head_dim=sizes,
    vocab_size=sizes,
    max_position_embeddings=sizes,
    rms_norm_eps=floats,
    rope_theta=floats,
    rope_scaling=st.none()
    | with_all(
        RopeScaling,
        factor=floats,
        low_freq_factor=floats,
        high_freq_factor=floats,
        original_max_position_embeddings=sizes,
    ),
    tie_word_embeddings=st.booleans(),
    attention_bias=st.booleans(),
    qk_norm=st.booleans(),
    activation=st.sampled_from(get_args(Activation)),
    norm_offset=st.sampled_from([0, 1]),
    partial_rotary_factor=floats,
    embedding_multiplier=floats,
    attention_multiplier=st.none() | floats,
    residual_multiplier=floats,
    logits_scaling=floats,
    sliding_window=token_ids,
    initializer_range=floats,
    head=st.sampled_from(get_args(Head)),
    lora=st.none() | loras,
    bos_token_id=token_ids,
    eos_token_id=token_ids | st.lists(sizes, max_size=3).map(tuple),
    pad_token_id=token_ids,
)
options = with_all(
    ModelOptions,
    dtype=st.sampled_from(get_args(Dtype)),
    attention=st.sampled_from(get_args(AttentionBackend)),
    transformer_impl=st.sampled_from(["te", "local"]),
    fusions=with_all(
        Fusions,
        apply_rope_fusion=st.booleans(),
        bias_activation_fusion=st.booleans(),
        gradient_accumulation_fusion=st.booleans(),
    ),
    fp8=st.none() | st.sampled_from(get_args(Fp8Format)),
    fp8_recipe=st.sampled_from(get_args(Fp8Recipe)),
    recompute=st.sampled_from(get_args(Recompute)),
    logprob_chunk_size=sizes,
)


roles = st.lists(names, min_size=1, max_size=3, unique=True)


@st.composite
def job_plans(draw: st.DrawFn) -> JobPlan:
    world_size = draw(st.integers(18, 24))

    def any_context(role: str) -> ContextPlan:
        plan = draw(any_plan)
        return ContextPlan(
            role=role,
            workload=draw(st.sampled_from(get_args(Workload))),
            model=draw(specs),
            options=draw(options),
            plan=plan,
            ranks=tuple(draw(st.permutations(range(world_size)))[: plan.world_size]),
            base=draw(st.none() | names),
        )

    def any_phase() -> Phase:
        return Phase(
            name=draw(names),
            order=draw(st.sampled_from(get_args(Order))),
            contexts=tuple(map(any_context, draw(roles))),
            once=draw(st.booleans()),
        )

    phases = tuple(any_phase() for _ in range(draw(st.integers(0, 3))))
    return JobPlan(stage=draw(names), world_size=world_size, phases=phases)
