"""Files as they lie on disk: JSON, typed values, checksums; imports no torch."""
