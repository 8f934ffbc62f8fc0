"""The user's config: declare, read, check and resolve its keys. Imports no torch."""
