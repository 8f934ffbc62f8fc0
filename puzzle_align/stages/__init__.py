"""Stages of training, a page each, and the training loop that they share."""
