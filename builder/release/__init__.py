"""Staged and released images: contents of the registry, tags, parents and additions, verification, status, pruning."""
