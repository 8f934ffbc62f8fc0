"""A report on one GPU, made by ``tools/gpu_report.py``."""
