"""Debian's archives and packages: apt, mmdebstrap, locks, and the places of locked packages."""
