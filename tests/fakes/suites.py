"""Image tests of the tiny project, and their results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from builder.evidence.results import Evidence
from builder.evidence.suite import IMAGE_TESTS, Suite
from builder.plan.plan import PlannedImage


def write_tests(root: Path, components: Iterable[str], folder: str = IMAGE_TESTS) -> tuple[str, ...]:
    """Writes one test for each component; returns their names."""
    paths = [root / f"{folder}/test_{component}.py" for component in components]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_it() -> None:\n    pass\n", encoding="utf-8")
    return tuple(f"{path.relative_to(root).as_posix()}::test_it" for path in paths)


def passing_evidence(root: Path, image: PlannedImage, digest: str, /, **changes: Any) -> Evidence:
    """A pass of all image tests in the checkout at `root`, with changes."""
    suite = Suite.of(root)
    values = {
        "image": digest,
        "cell": image.id,
        "plan": image.plan,
        "suite": dict(suite.files),
        "kind": "image",
        "passed": tuple(sorted(suite.of_image(image.components, IMAGE_TESTS))),
        "failed": (),
    }
    return Evidence(**{**values, **changes})
