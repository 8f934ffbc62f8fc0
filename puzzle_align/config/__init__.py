"""The user's config: keys, read, checked and resolved; imports no torch."""
