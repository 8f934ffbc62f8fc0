"""Ranks notice and report that one of them failed, died, stopped or hangs."""
