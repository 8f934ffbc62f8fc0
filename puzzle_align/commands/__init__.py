"""Commands other than training: validate, inspect, plan, profile, generate, convert."""
