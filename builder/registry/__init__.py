"""The registry: HTTP client, upload, push, tags, verification."""
