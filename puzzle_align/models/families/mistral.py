"""Mistral: Llama's weights. (Its sliding window is full attention up to the window's length.)"""

from puzzle_align.models.families import llama

LAYER_RULES = llama.LAYER_RULES
