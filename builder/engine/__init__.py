"""Docker Engine: a thin client, BuildKit's progress, loading images, installing an engine."""
