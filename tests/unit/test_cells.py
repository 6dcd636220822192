"""Cells: what the matrix gives, in which order, and how people name them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import cells
from builder.cells import MAX_CELLS
from builder.errors import MatrixError, UsageError
from builder.project import Project
from tests.unit.fakes import place

Edit = Callable[[str, str], Project]

TINY_IDS = [
    "em-1.9-cu129-py39",
    "em-1.9-cu129-py39-jupyter",
    "em-1.9-cu129-py39-board",
    "em-1.10-cu129-py311",
    "em-1.10-cu129-py311-jupyter",
    "em-1.10-cu129-py311-board",
    "em-1.10-cu1210-py39",
    "em-1.10-cu1210-py39-jupyter",
    "em-1.10-cu1210-py39-board",
    "em-1.10-cu1210-py311",
    "em-1.10-cu1210-py311-jupyter",
    "em-1.10-cu1210-py311-board",
    "qz-0.5-cu129-py311",
    "qz-0.5-cu129-py311-jupyter",
    "qz-0.5-cu129-py311-board",
    "qz-0.5-cu1210-py39-board",
]


def test_all_cells_in_order(tiny: Project) -> None:
    """Versions are compared as versions: 1.10 after 1.9, 12.10 after 12.9, 3.11 after 3.9."""
    assert [cell.id for cell in tiny.cells] == TINY_IDS


def test_a_cell_knows_its_parts(tiny: Project) -> None:
    cell = tiny.select(["em-1.10-cu1210-py311-jupyter"])[0]
    assert (cell.framework, cell.short, cell.line, cell.release) == ("ember", "em", "1.10", "1.10.0")
    assert (cell.cuda, cell.python, cell.variant) == ("12.10", "3.11", "jupyter")
    assert cell.group == "em-1.10-cu1210-py311"
    assert [cell.id for cell in tiny.groups[cell.group]] == TINY_IDS[9:12]


def test_every_id_parses_to_its_cell(tiny: Project) -> None:
    assert tuple(cells.parse(tiny.matrix, cell.id, "x") for cell in tiny.cells) == tiny.cells


@pytest.mark.parametrize(
    ("id_", "components"),
    [
        ("em-1.9-cu129-py39", "base python cuda ember"),
        ("em-1.9-cu129-py39-jupyter", "base python cuda ember board jupyter"),
        ("qz-0.5-cu129-py311-board", "base python cuda quartz board"),
    ],
)
def test_components_come_after_what_they_need(tiny: Project, id_: str, components: str) -> None:
    assert cells.components(tiny.matrix, tiny.select([id_])[0]) == tuple(components.split())


def test_the_cpu_comes_last_and_has_no_cuda(on_cpu: Project) -> None:
    quartz = [cell.id for cell in on_cpu.cells if cell.short == "qz"]
    assert quartz == [*TINY_IDS[12:], *(f"qz-0.5-cpu-py311{suffix}" for suffix in ("", "-jupyter", "-board"))]
    cell = on_cpu.select(["qz-0.5-cpu-py311-board"])[0]
    assert (cell.cuda, cell.cuda_tag, cell.group, cell.is_cpu) == ("cpu", "cpu", "qz-0.5-cpu-py311", True)
    assert cells.parse(on_cpu.matrix, cell.id, "x") == cell
    assert cells.components(on_cpu.matrix, cell) == ("base", "python", "quartz", "board")
    assert not on_cpu.select(["qz-0.5-cu129-py311"])[0].is_cpu


def test_a_cpu_that_the_matrix_has_not(tiny: Project) -> None:
    with pytest.raises(MatrixError, match="the matrix has no CUDA 'cpu'"):
        cells.parse(tiny.matrix, "qz-0.5-cpu-py311", "x")


def test_components_of_a_line(edit: Edit) -> None:
    """After the framework, before the variant, and with what they need."""
    edit("  board: {needs", "  legacy: {needs: [cuda, notes]}\n  notes: {needs: [base]}\n  board: {needs")
    project = edit("{release: 1.9.2", "{components: [legacy], release: 1.9.2")
    old, new = project.select(["em-1.9-cu129-py39-board", "em-1.10-cu129-py311-board"])
    assert cells.components(project.matrix, old) == ("base", "python", "cuda", "ember", "notes", "legacy", "board")
    assert cells.components(project.matrix, new) == ("base", "python", "cuda", "ember", "board")


def test_resolved_together(tiny: Project) -> None:
    """By CUDA and Python; of another framework the line that the matrix names first, if it is there."""
    assert {group: list(dict.fromkeys(cell.group for cell in found)) for group, found in tiny.together.items()} == {
        "em-1.9-cu129-py39": ["em-1.9-cu129-py39"],
        "em-1.10-cu129-py311": ["em-1.10-cu129-py311", "qz-0.5-cu129-py311"],
        "em-1.10-cu1210-py39": ["em-1.10-cu1210-py39", "qz-0.5-cu1210-py39"],
        "em-1.10-cu1210-py311": ["em-1.10-cu1210-py311"],
        "qz-0.5-cu129-py311": ["em-1.10-cu129-py311", "qz-0.5-cu129-py311"],
        "qz-0.5-cu1210-py39": ["em-1.10-cu1210-py39", "qz-0.5-cu1210-py39"],
    }


def test_two_lines_of_a_framework_are_never_resolved_together(edit: Edit) -> None:
    """Though both are of the same CUDA and Python: quartz goes with the one that stands first, 1.9."""
    project = edit(
        '{release: 1.9.2, cuda: ["12.9"], python: ["3.9"]}', '{release: 1.9.2, cuda: ["12.9"], python: ["3.11"]}'
    )
    groups = {group: {cell.line for cell in found} for group, found in project.together.items() if "cu129" in group}
    assert groups == {
        "em-1.9-cu129-py311": {"1.9", "0.5"},
        "em-1.10-cu129-py311": {"1.10", "0.5"},
        "qz-0.5-cu129-py311": {"1.9", "0.5"},
    }


USELESS = {
    "exclusion of nothing": ('"em-1.10-cu129-py39*"', '"em-2.*"', "'em-2.*' matches no cell"),
    "exclusion by too many braces": ('"em-1.10-cu129-py39*"', f'"{"{a,b}" * 13}"', "stands for"),
    "inclusion of what is there": (
        "qz-0.5-cu1210-py39-board,",
        "qz-0.5-cu129-py311-board,",
        "is in the matrix already",
    ),
    "inclusion of a pattern": ("qz-0.5-cu1210-py39-board,", '"qz-*",', "'qz-*' is not a cell id"),
    "inclusion, framework": ("cell: qz-0.5-cu1210-py39", "cell: qx-0.5-cu1210-py39", "no framework is called 'qx'"),
    "inclusion, version": ("cell: qz-0.5-cu1210-py39", "cell: qz-0.6-cu1210-py39", "quartz has no version '0.6'"),
    "inclusion, CUDA": ("cell: qz-0.5-cu1210-py39", "cell: qz-0.5-cu1211-py39", "no CUDA 'cu1211'; did you mean"),
    "inclusion, Python": ("cell: qz-0.5-cu1210-py39", "cell: qz-0.5-cu1210-py38", "no Python 'py38'"),
    "inclusion, variant": ("cell: qz-0.5-cu1210-py39-board", "cell: qz-0.5-cu1210-py39-bord", "did you mean 'board'"),
}


@pytest.mark.parametrize(("old", "new", "says"), USELESS.values(), ids=USELESS.keys())
def test_exclusions_and_inclusions_that_do_nothing(edit: Edit, old: str, new: str, says: str) -> None:
    project = edit(old, new)
    text = (project.root / "matrix.yaml").read_text()
    line = text[: text.index(new)].count("\n") + 1
    with pytest.raises(MatrixError) as caught:
        _ = project.cells
    assert place(caught.value).startswith(f"matrix.yaml:{line}:")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('{cells: "em-1.10-cu129-py39*", reason', '{cells: "*", reason', "every cell is excluded"),
        ('"12.9": {}', '"1.29": {}\n  "12.9": {}', "differ only by their dots"),
    ],
    ids=["nothing left", "ids collide"],
)
def test_faults_of_the_whole_have_a_place(edit: Edit, old: str, new: str, says: str) -> None:
    project = edit(old, new)
    path = project.root / "matrix.yaml"
    path.write_text(
        path.read_text().replace('{release: 0.5.3, cuda: ["12.9"]', '{release: 0.5.3, cuda: ["12.9", "1.29"]')
    )
    if "1.29" not in new:
        path.write_text(path.read_text().replace('"12.9", "1.29"', '"12.9"'))
    with pytest.raises(MatrixError) as caught:
        _ = project.cells
    assert says in str(caught.value)
    assert place(caught.value).startswith("matrix.yaml:")


def big(text: str, *, lines: int, cudas: int, pythons: int) -> str:
    """The tiny matrix with long axes, every framework line with all of both."""
    names = {
        axis: [f"{n // 100 + 1}.{n % 100}" for n in range(count)] for axis, count in (("c", cudas), ("p", pythons))
    }
    axes = {axis: "[" + ", ".join(f'"{name}"' for name in names[axis]) + "]" for axis in names}
    rows = {
        "python:\n": "".join(f'  "{name}": {{debian: newbird}}\n' for name in names["p"]),
        "cuda:\n": "".join(f'  "{name}": {{}}\n' for name in names["c"]),
    }
    for head, more in rows.items():
        text = re.sub(rf"(?m)^{head}(  .*\n)+", head + more, text)
    more = "".join(
        f'      "7.{n}": {{release: 7.{n}.0, cuda: {axes["c"]}, python: {axes["p"]}}}\n' for n in range(lines)
    )
    text = re.sub(r"(?ms)(package: ember\n    versions:\n).*?(?=  quartz:)", lambda found: found[1] + more, text)
    text = re.sub(r'(?m)^      "0.5": .*$', more.splitlines()[0], text)
    return re.sub(r"(?ms)^exclude:.*\Z", "", text)


def test_a_million_cells_are_refused_before_they_are_made(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.root / "matrix.yaml"
    path.write_text(big(path.read_text(), lines=4, cudas=300, pythons=300))
    assert len(tiny.matrix.cuda) * len(tiny.matrix.python) * 5 * 3 > 1_000_000
    made: list[object] = []
    monkeypatch.setattr(cells, "Cell", lambda **values: made.append(values))
    with pytest.raises(MatrixError) as caught:
        _ = tiny.cells
    assert not made
    assert f"the matrix has 1350000 cells; at most {MAX_CELLS}" in str(caught.value)
    assert caught.value.hint
    assert place(caught.value).startswith("matrix.yaml:")


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*", 16),
        ("em-*", 12),
        ("em-1.9-*", 3),
        ("*-{jupyter,board}", 11),
        ("em-1.1?-cu129-*", 3),
        ("[pq]z-*", 4),
        ("", 0),
    ],
)
def test_patterns(tiny: Project, pattern: str, count: int) -> None:
    assert len(cells.match(pattern, TINY_IDS)) == count


@pytest.mark.parametrize(
    ("pattern", "alternatives"),
    [
        ("a", ["a"]),
        ("a{b,c}d", ["abd", "acd"]),
        ("{a,b}{c,d}", ["ac", "ad", "bc", "bd"]),
        ("{a}", ["a"]),
        ("{a", ["{a"]),
    ],
)
def test_braces(pattern: str, alternatives: list[str]) -> None:
    assert [id_ for id_ in ["abd", "acd", "ac", "ad", "bc", "bd", "a", "{a"] if cells.match(pattern, [id_])] == sorted(
        alternatives, key=["abd", "acd", "ac", "ad", "bc", "bd", "a", "{a"].index
    )


def test_braces_do_not_multiply_without_end(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of 200 characters could stand for 2^66 others; here only 2^13, so that this ends."""
    compared, original = 0, fnmatch.fnmatchcase

    def count(name: str, pattern: str) -> bool:
        nonlocal compared
        compared += 1
        return original(name, pattern)

    monkeypatch.setattr("fnmatch.fnmatchcase", count)
    with pytest.raises((MatrixError, UsageError)):
        tiny.select(["{a,b}" * 13])
    assert compared <= 1000 * len(TINY_IDS)


@given(st.text(alphabet="em-19.*?[]!{},", max_size=12))
def test_any_pattern_matches_some_or_none(pattern: str) -> None:
    hits = cells.match(pattern, TINY_IDS)
    assert set(hits) <= set(TINY_IDS)
    assert len(set(hits)) == len(hits)


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ([], [TINY_IDS[9], *TINY_IDS[12:]]),
        (["boards"], [id_ for id_ in TINY_IDS if id_.endswith("-board")]),
        (["qz-*", "em-1.9-cu129-py39"], [TINY_IDS[0], *TINY_IDS[12:]]),
        (["em-1.9-cu129-py39", "em-1.9-cu129-py39"], [TINY_IDS[0]]),
    ],
    ids=["default set", "set", "order of the matrix", "once"],
)
def test_select(tiny: Project, wanted: list[str], ids: list[str]) -> None:
    assert [cell.id for cell in tiny.select(wanted)] == ids


def test_without_a_default_set_all_are_selected(edit: Edit) -> None:
    project = edit("  default: [", "  few: [")
    assert project.select([]) == project.cells


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (
            "em-1.9-cu129-py39-jupiter",
            "no cell matches 'em-1.9-cu129-py39-jupiter'; did you mean 'em-1.9-cu129-py39-jupyter'?",
        ),
        ("bords", "did you mean 'boards'?"),
        ("em-1.10-cu129-py39", "em-1.10-cu129-py39 is excluded: made up: no wheels for this pair"),
    ],
)
def test_select_nothing(tiny: Project, wanted: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        tiny.select([wanted])
    assert says in str(caught.value)


def test_an_exclusion_with_braces_tells_its_reason_too(edit: Edit) -> None:
    project = edit('"em-1.10-cu129-py39*"', '"em-1.10-cu129-py39{,-board,-jupyter}"')
    with pytest.raises(UsageError, match="is excluded: made up: no wheels"):
        project.select(["em-1.10-cu129-py39-board"])


def test_a_set_that_names_a_cell_that_is_not_there(edit: Edit) -> None:
    """One typing error in a set must not silently make it smaller."""
    project = edit('default: [em-1.10-cu1210-py311, "qz-*"]', 'default: [em-1.10-cu1210-py3111, "qz-*"]')
    with pytest.raises((MatrixError, UsageError), match=r"em-1.10-cu1210-py3111"):
        project.select([])
