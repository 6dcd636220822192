"""Builds GPU deep-learning images from one matrix; see README.md and docs/architecture.md."""

__version__ = "1.0.0.dev0"
