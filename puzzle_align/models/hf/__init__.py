"""Weights from Hugging Face directories or a seed: loading into chunks, and export."""
