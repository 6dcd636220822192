"""Debian's archives and packages: apt, mmdebstrap, what is locked and where it still is."""
