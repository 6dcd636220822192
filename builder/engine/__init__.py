"""Docker Engine: a thin client, loading images, installing an engine."""
