"""Resolving, the lock files, their checks, and their changes."""
