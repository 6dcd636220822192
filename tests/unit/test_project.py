"""Finding the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import UsageError
from builder.project import Project


def test_found_from_a_folder_below(tiny: Project) -> None:
    assert Project.find(tiny.root / "templates" / "base").root == tiny.root
    assert tiny.logs.relative_to(tiny.root) == Path(".builder/logs")


def test_not_found(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").mkdir()
    with pytest.raises(UsageError, match=r"^no matrix.yaml in ") as caught:
        Project.find(tmp_path)
    assert "--root" in caught.value.hint
