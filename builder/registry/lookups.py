"""Several requests to registries at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from builder.common import threads

PARALLEL = 8
_Input = TypeVar("_Input")
_Output = TypeVar("_Output")


def look_up(function: Callable[[_Input], _Output], inputs: Iterable[_Input]) -> list[tuple[_Input, _Output]]:
    """Each input with what the function returns for it, in order. Raises the first error of the function."""
    listed = list(inputs)
    with threads.pool(PARALLEL, "lookup") as pool:
        return list(zip(listed, pool.map(function, listed), strict=True))
