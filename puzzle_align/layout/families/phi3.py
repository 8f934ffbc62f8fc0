"""Phi-3: in its files query, key and value are one tensor, and gate and up another.

Rotary embeddings may rotate only a part of a head. Its sliding window is full attention up to the
window's length; its long-context scaling (longrope) is not supported.
"""

from dataclasses import replace

from puzzle_align.files.typed import real
from puzzle_align.layout import rules
from puzzle_align.layout.families import Family

FAMILY = Family(
    model_type="phi3",
    architecture="Phi3",
    layer_rules=(
        rules.INPUT_NORM,
        replace(rules.QKV_WEIGHT, file_tensor="self_attn.qkv_proj.weight"),
        rules.ATTENTION_OUTPUT,
        rules.MLP_NORM,
        replace(rules.GATE_UP, file_tensor="mlp.gate_up_proj.weight"),
        rules.DOWN,
    ),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
    kinds={"partial_rotary_factor": real(0.01, 1)},
    own_keys=("sliding_window", "partial_rotary_factor"),
)
