"""Training on preference pairs: a policy against a frozen reference (DPO), or a reward model."""
