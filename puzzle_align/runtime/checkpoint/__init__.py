"""Checkpoints: written, published whole, verified and read without running code from them."""
