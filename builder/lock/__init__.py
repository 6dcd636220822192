"""Resolving, the lock files, their checks, and what changed in them."""
