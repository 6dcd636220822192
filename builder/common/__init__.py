"""Errors, files, digests, references, redaction, the strict YAML reader, validation, units and the console."""
