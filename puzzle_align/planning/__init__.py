"""Pure costs of a job under a plan: no torch, no process group."""
