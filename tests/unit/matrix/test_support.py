"""Ends of support: which counts for a cell, and from which day on it is near or over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta

import pytest

from builder.common.errors import MatrixError, RefusedError
from builder.matrix import facts, support
from builder.matrix.facts import DebianSupport, Support, VersionSupport
from builder.matrix.project import Project
from tests.fakes.engine import place

Edit = Callable[[str, str], Project]
SECURITY, LTS = date(2026, 6, 10), date(2028, 6, 30)
OLD, NEW = "em-1.9-cu129-py39", "qz-0.5-cu129-py311"


def days(last: str) -> VersionSupport:
    return VersionSupport(last=date.fromisoformat(last), source="a table")


KNOWN = Support(
    debian={
        "newbird": DebianSupport(security=SECURITY, lts=LTS, source="the list"),
        "oldbird": DebianSupport(security=date(2024, 1, 1), source="the list"),
    },
    python={"3.9": days("2025-10-31"), "3.11": days("2027-10-31")},
    cuda={"12.9": days("2029-01-01")},
    frameworks={"quartz": {"0.5": days("2028-06-29")}},
)


@pytest.fixture
def know(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the ends of support in facts.yaml with KNOWN and changes to it."""
    present = facts.load_facts()

    def know(**changes: object) -> None:
        changed = present.model_copy(update={"support": KNOWN.model_copy(update=changes)})
        monkeypatch.setattr(facts, "load_facts", lambda: changed)

    know()
    return know


def ends(project: Project, cell: str) -> dict[str, str]:
    [selected] = project.select([cell])
    return {end.entry: str(end.last) for end in support.ends_of_cell(project.matrix, selected)}


@pytest.mark.usefixtures("know")
def test_a_python_of_debian_has_the_support_of_debian(tiny: Project) -> None:
    """The earliest end is first. LTS counts, if there is any."""
    assert list(ends(tiny, NEW).items()) == [
        ("frameworks.quartz.versions.0.5", "2028-06-29"),
        ("debian.newbird", "2028-06-30"),
        ("cuda.12.9", "2029-01-01"),
    ]
    assert ends(tiny, OLD) == {"debian.oldbird": "2024-01-01", "cuda.12.9": "2029-01-01"}


@pytest.mark.usefixtures("know")
def test_a_python_of_uv_has_the_support_of_python(edit: Edit) -> None:
    project = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, uv: 3.11.9}')
    assert next(iter(ends(project, NEW).items())) == ("python.3.11", "2027-10-31")


def test_a_cell_outside_the_matrix(tiny: Project, know: Callable[..., None]) -> None:
    """As in `builder explain`: a Python that is not there could only be one of uv's builds."""
    [cell] = tiny.select([NEW])
    other = replace(cell, python="3.9", cuda="13.0", line="9.9")
    assert [end.entry for end in support.ends_of_cell(tiny.matrix, other)] == ["debian.oldbird"]
    newer = replace(other, python="3.14")
    know(python={"3.14": days("2030-10-31")})
    assert [end.entry for end in support.ends_of_cell(tiny.matrix, newer)] == ["python.3.14"]


@pytest.mark.parametrize(
    ("today", "is_near", "is_over"),
    [
        (LTS - timedelta(61), False, False),
        (LTS - timedelta(60), True, False),
        (LTS, True, False),
        (LTS + timedelta(1), True, True),
    ],
)
def test_days_around_an_end(
    tiny: Project, today: date, is_near: bool, is_over: bool, know: Callable[..., None]
) -> None:
    cells = tiny.select(["qz-0.5-cu129-*"])
    know(frameworks={})
    warnings = support.warnings(tiny.matrix, cells, today)
    assert len(warnings) == is_near
    assert all("(3 images of qz-0.5-cu129-py311)" in line for line in warnings)
    assert len(support.refusals(tiny.matrix, cells, today)) == is_over


@pytest.mark.usefixtures("know")
def test_each_entry_that_is_over_is_refused_by_itself(tiny: Project) -> None:
    cells = tiny.select([OLD, NEW])
    first, *others = support.refusals(tiny.matrix, cells, date(2029, 1, 2))
    assert isinstance(first, RefusedError)
    assert str(first).startswith("support of Debian oldbird ended on 2024-01-01")
    assert [str(error).partition(" ended")[0] for error in others] == [
        "support of quartz 0.5",
        "support of Debian newbird",
        "support of CUDA 12.9",
    ]
    assert str(others[-1]).endswith(f": 2 images of {OLD}, {NEW}"), "all cells of an entry together"


def test_what_is_published_for_the_matrix_is_known() -> None:
    """A Debian release or Python without an entry would never be refused."""
    known = facts.load_facts().support
    assert all(release.lts is None or release.security < release.lts for release in known.debian.values())
    assert {"bullseye", "bookworm", "trixie"} <= known.debian.keys()
    assert list(known.python) == [f"3.{minor}" for minor in range(9, 15)]


def test_a_reason_without_a_known_end_is_refused(edit: Edit) -> None:
    """As exclusions that match nothing."""
    project = edit('glibc: "2.31"', 'glibc: "2.31"\n    after_support: "one course needs it"')
    with pytest.raises(MatrixError, match="has no end of support for it: delete it") as caught:
        _ = project.matrix
    assert place(caught.value) == "matrix.yaml:9:20"
    assert "debian.oldbird.after_support" in str(caught.value)


def test_a_reason_for_a_python_of_debian_belongs_to_debian(edit: Edit) -> None:
    reason = 'after_support: "one course needs it"'
    project = edit('"3.9": {debian: oldbird}', f'"3.9": {{debian: oldbird, {reason}}}')
    with pytest.raises(MatrixError, match=r"those of Debian: add it to debian\.oldbird instead"):
        _ = project.matrix
    sound = edit(f"{{debian: oldbird, {reason}}}", f"{{debian: oldbird, uv: 3.9.25, {reason}}}")
    assert sound.matrix.python["3.9"].after_support == "one course needs it"
