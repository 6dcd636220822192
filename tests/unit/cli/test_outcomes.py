"""The summary of the images of a command."""

from __future__ import annotations

import pytest

from builder.build.outcomes import Outcome
from builder.cli.images import summary
from builder.common.errors import BuildError
from builder.engine.model import LoadedImage, Origin
from builder.matrix.project import Project
from builder.plan import plan
from tests.unit.cli.conftest import CELL

Done = tuple[Origin, bool, bool]  # origin, tested, tagged
BUILT: Done = ("built", True, True)
UNTESTED: Done = ("loaded", False, False)
FINISHED: Done = ("present", False, False)


@pytest.mark.parametrize(
    ("done", "failures", "text"),
    [
        ([], 0, "no images"),
        ([BUILT], 0, "1 image: 1 built, 1 tested, 1 tagged"),
        ([FINISHED], 1, "2 images: 1 up to date, 1 failed"),
        (
            [BUILT, UNTESTED, ("present", False, True), FINISHED],
            0,
            "4 images: 1 built, 1 loaded from the store, 1 tested, 2 tagged, 1 up to date",
        ),
    ],
)
def test_the_summary_of_outcomes(tiny: Project, done: list[Done], failures: int, text: str) -> None:
    [image, *_] = plan.make_locked_plan(tiny, tiny.select([CELL])).images
    outcomes = [
        Outcome(image=image, loaded=LoadedImage(id="i", digest="i", origin=origin), tested=tested, tagged=tagged)
        for origin, tested, tagged in done
    ]
    assert summary([*outcomes, *[Outcome(image=image, error=BuildError("failed"))] * failures]) == text
