"""Benchmarks: of builder itself (`build`, `start`) and of the frameworks inside their images (`frameworks`).

The programs in `inside/` run in the images.
"""
