"""Cells: which ones a matrix has, their order, and how they are selected."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from builder.common.errors import MatrixError, UsageError
from builder.matrix import cells
from builder.matrix.project import Project
from tests.fakes.engine import place

Edit = Callable[[str, str], Project]

TINY_IDS = [
    "em-1.9-cu129-py39", "em-1.9-cu129-py39-jupyter", "em-1.9-cu129-py39-board",
    "em-1.10-cu129-py311", "em-1.10-cu129-py311-jupyter", "em-1.10-cu129-py311-board",
    "em-1.10-cu1210-py39", "em-1.10-cu1210-py39-jupyter", "em-1.10-cu1210-py39-board",
    "em-1.10-cu1210-py311", "em-1.10-cu1210-py311-jupyter", "em-1.10-cu1210-py311-board",
    "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-jupyter", "qz-0.5-cu129-py311-board",
    "qz-0.5-cu1210-py39-board",
]  # fmt: skip


def test_all_cells_in_order(tiny: Project) -> None:
    """Versions are compared as versions: 1.10 after 1.9, 12.10 after 12.9, 3.11 after 3.9."""
    assert [cell.id for cell in tiny.cells] == TINY_IDS


def test_parts_of_a_cell(tiny: Project) -> None:
    cell = tiny.select(["em-1.10-cu1210-py311-jupyter"])[0]
    assert (cell.framework, cell.short, cell.line, cell.release) == ("ember", "em", "1.10", "1.10.0")
    assert (cell.cuda, cell.python, cell.variant) == ("12.10", "3.11", "jupyter")
    assert cell.group == "em-1.10-cu1210-py311"
    assert [cell.id for cell in tiny.groups[cell.group]] == TINY_IDS[9:12]


def test_the_cpu_comes_last_and_has_no_cuda(on_cpu: Project) -> None:
    quartz = [cell.id for cell in on_cpu.cells if cell.short == "qz"]
    assert quartz == [*TINY_IDS[12:], *(f"qz-0.5-cpu-py311{suffix}" for suffix in ("", "-jupyter", "-board"))]
    cell = on_cpu.select(["qz-0.5-cpu-py311-board"])[0]
    assert (cell.cuda, cell.cuda_tag, cell.group, cell.is_cpu) == ("cpu", "cpu", "qz-0.5-cpu-py311", True)
    assert cells.cell_of_id(on_cpu.matrix, cell.id, "x") == cell
    assert cells.components(on_cpu.matrix, cell) == ("base", "python", "quartz", "board")
    assert not on_cpu.select(["qz-0.5-cu129-py311"])[0].is_cpu


ON_ARM64 = 'python: ["3.11"], arch: [amd64, arm64]}'


def test_arm64_follows_amd64_in_groups_of_its_own(edit: Edit) -> None:
    project = edit('python: ["3.11"]}', ON_ARM64)
    arm64 = [f"qz-0.5-cu129-py311{suffix}-arm64" for suffix in ("", "-jupyter", "-board")]
    assert [cell.id for cell in project.cells] == [*TINY_IDS[:15], *arm64, TINY_IDS[15]]
    cell = project.select([arm64[1]])[0]
    assert (cell.arch, cell.variant, cell.group) == ("arm64", "jupyter", "qz-0.5-cu129-py311-arm64")
    assert [member.id for member in project.groups[cell.group]] == arm64
    assert [member.id for member in project.groups["qz-0.5-cu129-py311"]] == TINY_IDS[12:15]
    for cell_id in (*arm64, TINY_IDS[12]):
        assert cells.cell_of_id(project.matrix, cell_id, "x").id == cell_id


def test_architectures_by_cuda(edit: Edit, on_cpu: Project) -> None:
    """As for a framework that has CUDA on amd64 only; a CUDA version without an entry is for amd64."""
    project = edit('cuda: ["12.9", cpu]', 'cuda: ["12.9", "12.10", cpu], arch: {"12.9": [amd64], cpu: [arm64]}')
    ids = [cell.id for cell in project.cells if cell.framework == "quartz" and cell.variant == "plain"]
    assert ids == ["qz-0.5-cu129-py311", "qz-0.5-cu1210-py311", "qz-0.5-cpu-py311-arm64"]
    project = edit('"12.9": [amd64], cpu: [arm64]', 'cpu: [amd64], "*": [arm64]')
    ids = [cell.id for cell in project.cells if cell.framework == "quartz" and cell.variant == "plain"]
    assert ids == ["qz-0.5-cu129-py311-arm64", "qz-0.5-cu1210-py311-arm64", "qz-0.5-cpu-py311"]


def test_only_the_set_arm64_has_cells_for_arm64(edit: Edit) -> None:
    project = edit('python: ["3.11"]}', ON_ARM64)
    arm64 = {cell.id for cell in project.cells if cell.arch == "arm64"}
    assert {cell.id for cell in project.select(["arm64"])} == arm64
    assert {cell.id for cell in project.select(["quartz", "newbird", "all"])} == set(TINY_IDS)
    assert {cell.id for cell in project.select(["*"])} == {*TINY_IDS, *arm64}


def test_uvs_builds_of_python_are_not_for_arm64(edit: Edit) -> None:
    edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, uv: 3.11.9}')
    project = edit('python: ["3.11"]}', ON_ARM64)
    with pytest.raises(MatrixError, match=r"qz-0\.5-cu129-py311-arm64: uv's builds of Python are for amd64 only"):
        _ = project.cells


def test_a_cell_for_arm64_can_be_included(edit: Edit) -> None:
    project = edit("cell: qz-0.5-cu1210-py39-board", "cell: qz-0.5-cu1210-py39-board-arm64")
    assert [cell.id for cell in project.cells if cell.arch == "arm64"] == ["qz-0.5-cu1210-py39-board-arm64"]


def test_the_pattern_of_a_group_matches_its_cells(edit: Edit) -> None:
    project = edit('python: ["3.11"]}', ON_ARM64)
    ids = [cell.id for cell in project.cells]
    pattern = cells.pattern_of_group("qz-0.5-cu129-py311-arm64")
    assert cells.match(pattern, ids) == [cell.id for cell in project.groups["qz-0.5-cu129-py311-arm64"]]
    assert set(cells.match(cells.pattern_of_group("qz-0.5-cu129-py311"), ids)) >= set(TINY_IDS[12:15])


@pytest.mark.parametrize("variant", ["", "-jupyter", "-board"])
def test_the_foundation_is_the_same_for_every_variant(edit: Edit, variant: str) -> None:
    """The framework, the components of its line, and what these need; none that only the variant adds."""
    edit("  board: {needs", "  legacy: {needs: [cuda, notes]}\n  notes: {needs: [base]}\n  board: {needs")
    project = edit("{release: 1.9.2", "{components: [legacy], release: 1.9.2")
    [old] = project.select([f"em-1.9-cu129-py39{variant}"])
    assert cells.foundation(project.matrix, old) == ("base", "python", "cuda", "ember", "notes", "legacy")
    [new] = project.select([f"em-1.10-cu129-py311{variant}"])
    assert cells.foundation(project.matrix, new) == ("base", "python", "cuda", "ember")


def test_the_foundation_leaves_out_components_of_another_cuda(edit: Edit, on_cpu: Project) -> None:
    """On the cpu, CUDA and what needs it; on a CUDA version, components that are only for others."""
    edit("  board: {needs", "  legacy: {needs: [cuda]}\n  notes: {needs: [base], only_on: [cpu]}\n  board: {needs")
    project = edit("{release: 0.5.3", "{components: [legacy, notes], release: 0.5.3")
    foundations = {
        cell.id: cells.foundation(project.matrix, cell)
        for cell in project.select(["qz-0.5-cu129-py311", "qz-0.5-cpu-py311", "qz-0.5-cpu-py311-board"])
    }
    on_the_cpu = ("base", "python", "quartz", "notes")
    assert foundations == {
        "qz-0.5-cu129-py311": ("base", "python", "cuda", "quartz", "legacy"),
        "qz-0.5-cpu-py311": on_the_cpu,
        "qz-0.5-cpu-py311-board": on_the_cpu,
    }


INCLUDED = "cell: qz-0.5-cu1210-py39-board"
USELESS = {
    "exclusion of nothing": ('"em-1.10-cu129-py39*"', '"em-2.*"', "'em-2.*' matches no cell"),
    "exclusion by too many braces": ('"em-1.10-cu129-py39*"', f'"{"{a,b}" * 13}"', "expands to more than 256 patterns"),
    "inclusion of a cell of the matrix": (INCLUDED, "cell: qz-0.5-cu129-py311-board", "is already in the matrix"),
    "inclusion of a pattern": (INCLUDED, 'cell: "qz-*"', "'qz-*' is not a cell id"),
    "inclusion, framework": (INCLUDED, "cell: qx-0.5-cu1210-py39", "no framework 'qx'"),
    "inclusion, version": (INCLUDED, "cell: qz-0.6-cu1210-py39", "no quartz version '0.6'"),
    "inclusion, CUDA": (INCLUDED, "cell: qz-0.5-cu1211-py39", "no CUDA version 'cu1211'; did you mean"),
    "inclusion, cpu": (INCLUDED, "cell: qz-0.5-cpu-py39", "no CUDA version 'cpu'"),
    "inclusion, Python": (INCLUDED, "cell: qz-0.5-cu1210-py38", "no Python version 'py38'"),
    "inclusion, variant": (INCLUDED, "cell: qz-0.5-cu1210-py39-bord", "did you mean 'board'"),
    # A typing error must not make a set smaller without an error.
    "set with an unknown cell": (
        "default: [em-1.10-cu1210-py311,",
        "default: [em-1.10-cu1210-py3111,",
        "'em-1.10-cu1210-py3111' matches no cell; did you mean",
    ),
    "set with an unknown alternative": (
        'boards: ["*-board"]',
        'boards: ["{em-1.10,em-1.11}-*-board"]',
        "'em-1.11' in '{em-1.10,em-1.11}-*-board' matches no cell",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), USELESS.values(), ids=USELESS.keys())
def test_exclusions_and_inclusions_without_effect(edit: Edit, old: str, new: str, message: str) -> None:
    project = edit(old, new)
    text = (project.root / "matrix.yaml").read_text()
    line = text[: text.index(new)].count("\n") + 1
    with pytest.raises(MatrixError) as caught:
        _ = project.cells
    assert place(caught.value).startswith(f"matrix.yaml:{line}:")
    assert message in str(caught.value)


def test_two_versions_with_one_tag(edit: Edit) -> None:
    """The second one replaced the images of the first."""
    edit("cuda:\n", 'cuda:\n  "1.29": {}\n')
    project = edit('cuda: ["12.10", "12.9"]', 'cuda: ["12.9", "1.29"]')
    with pytest.raises(MatrixError, match=r"two cells have the id em-1\.10-cu129-"):
        _ = project.cells


def test_every_cell_excluded(edit: Edit) -> None:
    project = edit('{cells: "em-1.10-cu129-py39*", reason', '{cells: "*", reason')
    with pytest.raises(MatrixError, match=r"^matrix.yaml:\d+:\d+: every cell is excluded"):
        _ = project.cells


def test_all_entries_that_match_no_cell_are_named_at_once(edit: Edit) -> None:
    """Whoever removed two frameworks had to run builder four times to learn the budgets to edit."""
    edit("exclude:", 'budgets: [{cells: "zz-*", image: 1GB, layer: 1GB}]\nexclude:')
    edit('"em-1.10-cu129-py39*"', '"em-2.*"')
    project = edit('boards: ["*-board"]', 'boards: ["*-board", "*-bord"]')
    with pytest.raises(MatrixError) as caught:
        assert project.cells
    first, *others = str(caught.value).splitlines()
    assert first == "3 entries match no cell"
    assert [line.split(": ")[1] for line in others] == [
        "'zz-*' matches no cell", "'em-2.*' matches no cell", "'*-bord' matches no cell",
    ]  # fmt: skip
    assert all(line.startswith("  matrix.yaml:") for line in others)


def test_too_many_cells_are_refused_before_they_are_created(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes of 300 versions each are a million cells."""
    assert cells.MAX_CELLS < 1_000_000
    monkeypatch.setattr(cells, "MAX_CELLS", 17)
    monkeypatch.setattr(cells, "Cell", lambda **_: pytest.fail("a cell was created"))
    with pytest.raises(MatrixError, match="the matrix has 18 cells; the limit is 17") as caught:
        _ = tiny.cells
    assert caught.value.hint
    assert place(caught.value).startswith("matrix.yaml:")


words = st.sampled_from(
    [
        "", "*", "?", "-", "em-", "qz-", "[eq]m-", "[pq]z-*", "1.?", "1.9-", "1.1?", "cu12", "cu129-*", "py39", "py311",
        "board", "jupyter",
    ]
)  # fmt: skip


@given(st.lists(st.lists(words, min_size=1, max_size=3), max_size=5))
@example([["*"]])
@example([["em-"], ["1.1?"], ["-"], ["cu129-*"]])
@example([["[pq]z-*"]])
@example([["*"], ["-"], ["jupyter", "board"]])
@example([])
def test_a_pattern_matches_what_any_of_its_alternatives_matches(parts: list[list[str]]) -> None:
    """Also several braces in one pattern; the ids keep their order."""
    pattern = "".join(options[0] if len(options) == 1 else f"{{{','.join(options)}}}" for options in parts)
    expected = {id_ for choice in itertools.product(*parts) for id_ in fnmatch.filter(TINY_IDS, "".join(choice))}
    assert cells.match(pattern, TINY_IDS) == [id_ for id_ in TINY_IDS if id_ in expected]


@pytest.mark.parametrize(("pattern", "ids"), [("a{b,c}d", ["abd", "acd"]), ("{a}", ["a"]), ("{a", ["{a"])])
def test_braces(pattern: str, ids: list[str]) -> None:
    assert cells.match(pattern, ["abd", "acd", "ac", "ad", "bc", "a", "{a"]) == ids


def test_braces_expand_to_a_limited_number(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of 200 characters could expand to 2^66 others; here only 2^13, so that the test ends."""
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
    ("patterns", "ids"),
    [
        ([], [TINY_IDS[9], *TINY_IDS[12:]]),
        (["boards"], [id_ for id_ in TINY_IDS if id_.endswith("-board")]),
        (["qz-*", "em-1.9-cu129-py39"], [TINY_IDS[0], *TINY_IDS[12:]]),
        (["em-1.9-cu129-py39", "em-1.9-cu129-py39"], [TINY_IDS[0]]),
    ],
    ids=["default set", "set", "order of the matrix", "once"],
)
def test_select(tiny: Project, patterns: list[str], ids: list[str]) -> None:
    assert [cell.id for cell in tiny.select(patterns)] == ids


def test_without_a_default_set_all_are_selected(edit: Edit) -> None:
    project = edit("  default: [", "  few: [")
    assert project.select([]) == project.cells


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "em-1.9-cu129-py39-jupiter",
            "no cell matches 'em-1.9-cu129-py39-jupiter'; did you mean 'em-1.9-cu129-py39-jupyter'?",
        ),
        ("bords", "did you mean 'boards'?"),
        ("em-1.9", "no cell matches 'em-1.9'; did you mean 'em-1.9-*'?"),
        ("jupyter", "no cell matches 'jupyter'; did you mean '*-jupyter'?"),
        ("{em-1.10,em-1.11}-cu129-*", "'em-1.11' in '{em-1.10,em-1.11}-cu129-*' matches no cell"),
        ("em-1.10-cu129-py39", "em-1.10-cu129-py39 is excluded by matrix.yaml:60:5: made up: no wheels for this pair"),
    ],
)
def test_select_nothing(tiny: Project, pattern: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        tiny.select([pattern])
    assert message in str(caught.value)


def test_the_reason_of_an_exclusion_with_braces(edit: Edit) -> None:
    project = edit('"em-1.10-cu129-py39*"', '"em-1.10-cu129-py39{,-board,-jupyter}"')
    with pytest.raises(UsageError, match=r"is excluded by matrix.yaml:60:5: made up: no wheels"):
        project.select(["em-1.10-cu129-py39-board"])


ONLY = "board: {only: {cells: %s, reason: 'made up: it requires ember 1.9'}, needs: [python], packages: [board]}"


def test_a_variant_exists_only_where_its_component_does(edit: Edit) -> None:
    """The variant jupyter has the component too. The included cell is no exception."""
    project = edit("board: {needs: [python], packages: [board]}", ONLY % "em-1.9-*")
    assert [cell.id for cell in project.cells if cell.variant != "plain"] == TINY_IDS[1:3]
    with pytest.raises(UsageError, match=r"is excluded by matrix.yaml:46:17: made up: it requires ember 1.9"):
        project.select(["em-1.10-cu129-py311-jupyter"])


def test_only_matches_no_cell_with_the_component(edit: Edit) -> None:
    project = edit("board: {needs: [python], packages: [board]}", ONLY % "em-1.9-cu129-py39")
    with pytest.raises(MatrixError, match=r"matrix.yaml:46:25: 'em-1.9-cu129-py39' matches no cell"):
        _ = project.cells


# ---- built-in sets


def test_a_debian_release_and_a_framework_are_sets(tiny: Project) -> None:
    assert [cell.id for cell in tiny.select(["oldbird"])] == [name for name in TINY_IDS if "-py39" in name]
    assert [cell.id for cell in tiny.select(["quartz"])] == TINY_IDS[12:]
    assert tiny.select(["oldbird", "quartz"]) == tiny.select(["quartz", "oldbird"])


def test_all_has_no_cell_that_relies_on_a_reason_after_its_support(bookworm: Project) -> None:
    """They are in the set `unsupported`. `*` is every cell."""
    assert [cell.id for cell in bookworm.select(["all"])] == TINY_IDS
    assert bookworm.select(["unsupported"]) == (), "a workflow that builds the set need not know whether it is empty"
    path = bookworm.root / "matrix.yaml"
    text = path.read_text("utf-8").replace(
        "  bookworm:\n", '  bookworm:\n    after_support: "one course needs it"\n', 1
    )
    path.write_text(text, encoding="utf-8")
    project = Project(bookworm.root)
    assert [cell.id for cell in project.select(["unsupported"])] == [name for name in TINY_IDS if "-py311" in name]
    assert [cell.id for cell in project.select(["all"])] == [name for name in TINY_IDS if "-py39" in name]
    assert [cell.id for cell in project.select(["*"])] == TINY_IDS


def test_cells_that_were_not_built_yet_are_in_one_built_in_set(tiny: Project, edit: Edit) -> None:
    """Also if their support has ended: a workflow that builds `unsupported` must not fail for them."""
    assert tiny.select(["not-built"]) == ()
    reasons = 'after_support: "one course needs it", not_built: "nobody can fetch it"'
    project = edit('"3.9": {debian: oldbird}', f'"3.9": {{debian: oldbird, uv: 3.9.25, {reasons}}}')
    others = [name for name in TINY_IDS if "-py311" in name]
    assert [cell.id for cell in project.select(["not-built"])] == [name for name in TINY_IDS if "-py39" in name]
    assert [cell.id for cell in project.select(["all", "unsupported", "oldbird", "newbird", "ember"])] == others
    assert [cell.id for cell in project.select(["*"])] == TINY_IDS


@pytest.mark.parametrize("name", ["all", "unsupported", "newbird", "quartz"])
def test_a_set_may_not_have_the_name_of_a_built_in_one(edit: Edit, name: str) -> None:
    project = edit('boards: ["*-board"]', f'{name}: ["*-board"]')
    with pytest.raises(MatrixError, match=f"sets.{name}: this set is built in"):
        _ = project.matrix
