"""Compares PyTorch, TensorFlow and JAX inside their images; docs/benchmarks.md.

`selection` chooses the images, `run` measures in containers, `report` collects and compares, `plot` draws.
"""
