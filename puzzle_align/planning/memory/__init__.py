"""Device memory that models and jobs need, estimated in bytes."""
