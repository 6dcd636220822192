"""Every edit and command of docs/matrix.md works in a fresh clone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import clones
from tests.integration.test_readme import AT_NIGHT, Section, follow


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clones.make(tmp_path_factory.mktemp("guide") / "clone")


@pytest.mark.parametrize("section", AT_NIGHT, ids=lambda section: section.title)
def test_what_the_guide_says_works(section: Section, clone: Path) -> None:
    follow(section, clone)
