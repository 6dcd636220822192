"""The summary of the images of a command."""

from __future__ import annotations

import pytest

from builder.build.context import LoadedImage, Origin
from builder.build.outcomes import Outcome
from builder.cli.images import summary
from builder.common.errors import BuildError
from builder.matrix.project import Project
from builder.plan import plan
from tests.unit.cli.conftest import CELL

Done = tuple[Origin, bool, bool]  # origin, tested, tagged
BUILT: Done = ("built", True, True)
LOADED: Done = ("loaded", True, True)
SUMMARIES: list[tuple[list[Done], str]] = [
    ([], "3 images up to date"),
    ([BUILT], "1 image built, tested and tagged. 2 images up to date"),
    ([LOADED] * 3, "3 images loaded from the store, tested and tagged"),
    ([("loaded", False, True)] * 3, "3 images loaded from the store and tagged"),
    ([("present", False, True)] * 3, "3 images tagged"),
    (
        [("loaded", False, False), ("built", False, False)],
        "2 images: 1 built, 1 loaded from the store. 1 image up to date",
    ),
    ([BUILT, LOADED], "2 images: 1 built, 1 loaded from the store, 2 tested, 2 tagged. 1 image up to date"),
    ([BUILT, BUILT, ("present", False, True)], "3 images: 2 built, 1 already built, 2 tested, 3 tagged"),
    ([("built", False, False), BUILT], "2 images: 2 built, 1 tested, 1 tagged. 1 image up to date"),
]


@pytest.mark.parametrize(("done", "text"), SUMMARIES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_summary_of_several_outcomes(tiny: Project, done: list[Done], text: str) -> None:
    [image, *_] = plan.make_locked_plan(tiny, tiny.select([CELL])).images
    outcomes = [
        Outcome(image=image, loaded=LoadedImage(id="i", digest="i", origin=origin), tested=tested, tagged=tagged)
        for origin, tested, tagged in done
    ]
    assert summary([*outcomes, *[Outcome(image=image)] * (3 - len(done))]) == text


def test_the_summary_of_failures(tiny: Project) -> None:
    [image, *_] = plan.make_locked_plan(tiny, tiny.select([CELL])).images
    outcomes = [Outcome(image=image), Outcome(image=image, error=BuildError("failed"))]
    assert summary(outcomes) == "1 image up to date. 1 image failed"
    assert summary([]) == "no images"
