"""Builds GPU deep-learning images from one matrix; see README.md and docs/architecture.md."""
