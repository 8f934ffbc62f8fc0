"""What the user says: config keys, read, checked and resolved; imports no torch."""
