"""Wheels to tar+gzip, the operating system, plain files, OCI documents and the store."""
