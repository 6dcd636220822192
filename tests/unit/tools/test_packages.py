"""The list of packages that people add, and its results. tests/integration/nightly/test_packages.py tries some."""

from __future__ import annotations

import pytest

from builder.matrix.project import Project
from tests.paths import ROOT
from tools import packages
from tools.packages import Fault, Package, PackageList, Result

CELL = "pt-2.9-cu128-py313"


@pytest.fixture(scope="module")
def project() -> Project:
    return Project(ROOT)


def test_every_package_has_a_check_and_images(project: Project) -> None:
    listed = packages.read_list(ROOT)
    assert len(listed.packages) >= 30
    for name, package in listed.packages.items():
        cells = packages.cells_of(project, package)
        assert {cell.framework for cell in cells} <= listed.frameworks.keys(), name
        # What the resolver refuses is never loaded.
        assert package.check or package.resolve_only or package.fails, name
        compile(package.check, name, "exec")


def test_the_page_has_the_recorded_results(project: Project) -> None:
    """After an edit of the list: python -m tools.packages --render."""
    listed = packages.read_list(ROOT)
    results = packages.read_results(ROOT)
    assert results == packages.updated(results, [], listed, project)
    assert (ROOT / packages.PAGE).read_text(encoding="utf-8") == packages.page(results, listed)


# ---- the verdict


KNOWN = {"cells": [CELL], "fails": "libcublasLt.so.13"}


@pytest.mark.parametrize(
    ("package", "fault", "difference"),
    [
        ({"cells": [CELL]}, None, ""),
        ({"cells": [CELL]}, Fault("no match"), "no match"),
        (KNOWN, Fault("OSError", "libcublasLt.so.13: cannot open"), ""),
        (KNOWN, Fault("no match"), "fails in another way: no match"),
        (KNOWN, None, "works now: delete the key `fails`"),
    ],
)
def test_a_known_failure_must_stay_the_same(package: dict[str, object], fault: Fault | None, difference: str) -> None:
    assert packages.surprise(Package.model_validate(package), fault) == difference


# ---- results


def result(package: str, cell: str = CELL, *, tested: str = "2026-11-27") -> Result:
    values = {"fault": "", "installed": {package: "1"}, "replaced": {}, "image": "2026-11-20", "tested": tested}
    return Result.model_validate({"package": package, "cell": cell, **values})


def test_results_of_other_images_stay(project: Project) -> None:
    """A machine has only some of the images."""
    both = Package.model_validate({"cells": [CELL, f"{CELL}-jupyter"]})
    listed = PackageList(frameworks={}, packages={"b": both, "a": both})
    known = [result("a"), result("a", f"{CELL}-jupyter"), result("gone"), result("b", "jax-0.10-cu128-py311")]
    new = [result("b"), result("a", tested="2026-11-28")]
    kept = packages.updated(known, new, listed, project)
    assert kept == [new[0], new[1], known[1]]


def test_a_row_names_the_version_and_why() -> None:
    note = {"cells": [CELL], "fails": "x", "note": "It needs a|b."}
    listed = PackageList(frameworks={}, packages={"x[y]<2": Package.model_validate(note)})
    broken = result("x[y]<2").model_copy(update={"fault": "OSError", "replaced": {"numpy": "2 -> 1"}})
    page = packages.page([broken, broken.model_copy(update={"tested": "2026-11-26"})], listed)
    text = "**does not work**. It needs a|b. Replaces numpy 2 -> 1."
    assert page.splitlines()[-1] == f"- `'x[y]<2'` 1: {text}"
    assert "\nTested on 2026-11-26 (image of 2026-11-20), 2026-11-27 (image of 2026-11-20).\n" in page
