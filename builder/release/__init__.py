"""Staged and released images: what the registry lists, tags, verification, status, pruning."""
