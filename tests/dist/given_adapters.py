"""Inputs of a DPO run with adapters that TRL's trainer and ours both get: base, adapters, pairs.

``tests/golden/make_dpo_trl_lora.py`` reads this without the package installed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.dist.given_steps import draw_weights

BATCH, STEPS = 4, 8
BOS, EOS = 257, 258
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# (family, further sizes, options of the adapters)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ALL}),
    "qwen3": (
        "Qwen3",
        {"head_dim": 16},
        {"r": 3, "lora_alpha": 3, "target_modules": ("q_proj", "v_proj", "down_proj")},
    ),
}
PREFIX = "base_model.model."


def pairs() -> list[dict[str, str]]:
    """As many pairs as the run has steps for, of different lengths."""
    draws = np.random.default_rng(5)

    def text(least: int, most: int) -> str:
        return "".join(map(chr, draws.integers(97, 123, draws.integers(least, most))))

    return [
        {"prompt": text(2, 12), "chosen": text(1, 9), "rejected": text(1, 9)}
        for _ in range(BATCH * STEPS)
    ]


def save_base(folder: Path, case: str) -> None:
    """Save a model with drawn weights."""
    import transformers

    family, more, _ = CASES[case]
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    draw_weights(model, spread=0.1)
    model.save_pretrained(folder)


def adapters(case: str) -> dict[str, np.ndarray]:
    """Adapters by PEFT's names, without its prefix; neither A nor B is 0."""
    _, more, options = CASES[case]
    hidden, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    each = more.get("head_dim", hidden // SIZES["num_attention_heads"])
    queries, keys = each * SIZES["num_attention_heads"], each * SIZES["num_key_value_heads"]
    sizes = {  # outputs, inputs
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    draws, made = np.random.default_rng(9), {}
    for layer in range(SIZES["num_hidden_layers"]):
        for name, (outputs, inputs) in sizes.items():
            if name.partition(".")[2] in options["target_modules"]:
                stem = f"model.layers.{layer}.{name}"
                for letter, shape in (
                    ("A", (options["r"], inputs)),
                    ("B", (outputs, options["r"])),
                ):
                    made[f"{stem}.lora_{letter}.weight"] = 0.1 * draws.standard_normal(shape)
    return {name: tensor.astype(np.float32) for name, tensor in made.items()}


def save_adapters(folder: Path, case: str) -> None:
    """Save them as a PEFT directory."""
    from safetensors.numpy import save_file

    folder.mkdir()
    tensors = {PREFIX + name: tensor for name, tensor in adapters(case).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", **CASES[case][2]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
