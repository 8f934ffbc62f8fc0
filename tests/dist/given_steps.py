"""Inputs of a GRPO run that TRL's trainer and ours both get: a checkpoint, prompts and rewards.

``tests/golden/make_grpo_trl_steps.py`` reads this without the package installed.
"""

from pathlib import Path
from typing import Any

import numpy as np

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
LONGEST = 10  # tokens of a response
BATCH, GENERATIONS = 4, 4  # prompts of an iteration, responses to each
PROMPTS = [f"{word} {number}" for number in range(3) for word in ("sum", "colours", "of", "a")]


def save_model(folder: Path) -> None:
    """Save the Llama model that training begins with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    draw_weights(model, spread=0.2)
    model.save_pretrained(folder)


def draw_weights(model: Any, spread: float) -> None:
    """Set a model's fp32 weights to NumPy's draws: the same on every machine; norms' are near 1."""
    import torch

    draws = np.random.default_rng(7)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            noise = spread * draws.standard_normal(tuple(weight.shape))
            weight.copy_(torch.from_numpy(noise + (weight.dim() == 1)))


def padding_tokenizer() -> Any:
    """A tokenizer for TRL's padding, stop token and decoding: token ids are given."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [f"t{number}" for number in range(SIZES["vocab_size"])]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="t259"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    kinds = ("pad_token", "bos_token", "eos_token")
    special = {kind: names[SIZES[f"{kind}_id"]] for kind in kinds}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def eighths(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward in eighths, so that means and differences are exact in float32."""
    return [sum(ids) % 8 / 8 for ids in completion_ids]


def sums_of(tensor: np.ndarray) -> list[float]:
    """A tensor's norm, and its products with two waves: a wrong entry anywhere changes them."""
    flat = tensor.astype(np.float64).ravel()
    places = np.arange(len(flat))
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(places)), float(flat @ np.sin(places))]
