"""Staged and released images: contents of the registry, tags, verification, status, pruning."""
