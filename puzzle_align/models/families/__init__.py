"""Model families: for each ``model_type``, how a layer's weights map to Hugging Face's."""

from puzzle_align.models.families import llama, mistral, qwen2, qwen3

LAYER_RULES = {
    "llama": llama.LAYER_RULES,
    "mistral": mistral.LAYER_RULES,
    "qwen2": qwen2.LAYER_RULES,
    "qwen3": qwen3.LAYER_RULES,
}
