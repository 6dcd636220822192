"""Builds GPU deep-learning images from one matrix; see README.md and docs/architecture.md."""

__version__ = "0.1.0"
