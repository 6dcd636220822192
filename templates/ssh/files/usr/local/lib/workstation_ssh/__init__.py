"""The SSH server of the images."""
