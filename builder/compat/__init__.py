"""Finds frameworks, CUDAs, Pythons, GPUs and drivers that work together, and the reasons that others do not."""
