"""Image tests of the tiny project, and their results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from builder.registry.suite import IMAGE_TESTS


def write_tests(root: Path, components: Iterable[str], folder: str = IMAGE_TESTS) -> tuple[str, ...]:
    """Writes one test for each component; returns their names."""
    paths = [root / f"{folder}/test_{component}.py" for component in components]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_it() -> None:\n    pass\n", encoding="utf-8")
    return tuple(f"{path.relative_to(root).as_posix()}::test_it" for path in paths)
