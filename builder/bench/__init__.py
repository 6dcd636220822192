"""Benchmarks inside the images: what the frameworks take of time and memory, side by side.

`choice` says which images, `run` takes the measures in containers, `report` holds and compares them, `plot` draws them.
The programs in `inside/` run in the images.
"""
