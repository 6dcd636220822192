"""Inputs and expected results of checks, computed by NumPy in float64 on the CPU. For frameworks that need NumPy."""

from __future__ import annotations

import importlib
from typing import Any


def _numpy() -> Any:
    """Imported late, because run.py can list the checks without NumPy."""
    return importlib.import_module("numpy")


def normal(seed: int, *shape: int) -> Any:
    """Random float32 numbers; the same for the same seed."""
    return _numpy().random.default_rng(seed).standard_normal(shape).astype("float32")


def indices(count: int) -> Any:
    return _numpy().arange(count)


def double(values: Any) -> Any:
    """An array of any framework as float64 on the CPU."""
    return _numpy().asarray(values).astype("float64")


def convolution(image: Any, kernel: Any) -> Any:
    """A convolution without padding, channels last. Slow, but simple."""
    image, kernel = double(image), double(kernel)
    height, width = image.shape[1] - kernel.shape[0] + 1, image.shape[2] - kernel.shape[1] + 1
    return sum(
        image[:, row : row + height, column : column + width] @ kernel[row, column]
        for row in range(kernel.shape[0])
        for column in range(kernel.shape[1])
    )


def smooth(left: Any, right: Any) -> Any:
    """The expected result of the compiled functions."""
    numpy = _numpy()
    left, right = double(left), double(right)
    return numpy.tanh(left * 2 + right).sum(keepdims=True) + numpy.sin(right)


def regression_gradient(inputs: Any, targets: Any) -> Any:
    """Gradient of the mean squared error of a linear regression whose weights are zero."""
    inputs, targets = double(inputs), double(targets)
    return -2 / len(inputs) * (inputs.T @ targets)
