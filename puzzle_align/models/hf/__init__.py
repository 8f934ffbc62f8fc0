"""Weights of Hugging Face directories, or from a seed: loaded into chunks, and written again."""
