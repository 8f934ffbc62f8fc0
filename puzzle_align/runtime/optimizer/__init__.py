"""Optimizer of a trainable context: AdamW, steps whole or in parts, state, main weights."""
