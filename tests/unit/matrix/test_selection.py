"""Properties of cells, of groups and of tags, over generated matrices.

The matrices have CUDA versions that do not sort as text, the cpu, and several lines of a framework with components.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from builder.common.strict_yaml import Located
from builder.matrix import cells, reader, tags
from builder.matrix.cells import CUDA, Cell
from builder.matrix.schema import CPU, Matrix

CUDAS = ("12.9", "12.10", "9.2", CPU)
PYTHONS = ("3.9", "3.11")
LINES = ("1.9", "1.10", "2.0")
FRAMEWORKS = {"ember": "em", "quartz": "qz", "slate": "sl"}
BASE = {
    "registry": "",
    "namespace": "team",
    "debian": {"bird": {"image": f"example/base:x@sha256:{'1' * 64}", "glibc": "2.36"}},
    "python": {python: {"debian": "bird"} for python in PYTHONS},
    "cuda": {cuda: {} for cuda in CUDAS},
    "components": {
        "base": {},
        "python": {"needs": ["base"], "packages": ["pip"]},
        CUDA: {"needs": ["python"]},
        "legacy": {"needs": [CUDA], "packages": ["legacy"]},
        "board": {"needs": ["python"], "packages": ["board"]},
        "lab": {"needs": ["board"], "packages": ["lab", "board"]},
        **{name: {"needs": [CUDA]} for name in FRAMEWORKS},
    },
    "variants": {"plain": [], "lab": ["lab"], "board": ["board"]},
}


def some(values: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    """One or more of them, each once, in any order: the first is the default of its line."""
    return st.lists(st.sampled_from(values), min_size=1, unique=True)


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    frameworks: dict[str, Any] = {}
    for name in draw(some(tuple(FRAMEWORKS))):
        versions = {
            line: {
                "release": f"{line}.1",
                "cuda": draw(some(CUDAS)),
                "python": draw(some(PYTHONS)),
                "components": draw(st.sampled_from([[], ["legacy"], ["board"]])),
                "arch": draw(some(("amd64", "arm64"))),
            }
            for line in draw(some(LINES))
        }
        frameworks[name] = {
            "short": FRAMEWORKS[name],
            "image": f"{name}-cuda",
            "cpu_image": f"{name}-cpu",
            "package": name,
            "versions": versions,
        }
    data = BASE | {"frameworks": frameworks}
    return reader.read_matrix(Located("matrix.yaml", data, {}))


@given(matrices())
def test_ids_are_unique_and_can_be_parsed(matrix: Matrix) -> None:
    expanded = cells.expand(matrix)
    assert len({cell.id for cell in expanded}) == len(expanded)
    assert [cells.cell_of_id(matrix, cell.id, "x") for cell in expanded] == list(expanded)


@given(matrices())
def test_components_come_after_what_they_need_and_the_cpu_has_no_cuda(matrix: Matrix) -> None:
    for cell in cells.expand(matrix):
        parts = cells.components(matrix, cell)
        assert len(set(parts)) == len(parts)
        assert (CUDA in parts) is not cell.is_cpu
        for number, part in enumerate(parts):
            needs = {need for need in matrix.components[part].needs if need != CUDA or not cell.is_cpu}
            assert needs <= set(parts[:number])
        line = matrix.frameworks[cell.framework].versions[cell.line]
        own = {name for name in line.components if not (cell.is_cpu and CUDA in matrix.components[name].needs)}
        assert {cell.framework, *own, *matrix.variants[cell.variant]} <= set(parts)
        assert not (set(line.components) - own) & set(parts)


@given(matrices(), st.data())
def test_a_selection_is_in_order_and_stable(matrix: Matrix, data: st.DataObject) -> None:
    expanded = cells.expand(matrix)
    ids = data.draw(st.lists(st.sampled_from([cell.id for cell in expanded]), min_size=1, max_size=5))
    patterns = [data.draw(st.sampled_from([id_, id_[:4] + "*", "*" + id_[-4:]])) for id_ in ids]
    chosen = cells.select(matrix, expanded, patterns)
    assert {cell.id for cell in chosen} >= set(ids)
    assert [expanded.index(cell) for cell in chosen] == sorted({expanded.index(cell) for cell in chosen})
    assert cells.select(matrix, expanded, patterns[::-1]) == chosen
    assert cells.select(matrix, expanded, [cell.id for cell in chosen]) == chosen
    alone = [cells.select(matrix, expanded, [pattern]) for pattern in patterns]
    assert {cell for selected in alone for cell in selected} == set(chosen)


def groups(cells_: Iterable[Cell]) -> dict[str, list[Cell]]:
    result: dict[str, list[Cell]] = {}
    for cell in cells_:
        result.setdefault(cell.group, []).append(cell)
    return result


@given(matrices())
def test_a_group_is_one_environment_without_its_variants(matrix: Matrix) -> None:
    """One line, CUDA, Python and architecture; the components that its cells share precede those of a variant."""
    members_of = groups(cells.expand(matrix))
    axes = {
        group: {(cell.framework, cell.line, cell.cuda, cell.python, cell.arch) for cell in members}
        for group, members in members_of.items()
    }
    assert all(len(values) == 1 for values in axes.values())
    assert len(set.union(*axes.values())) == len(members_of), (
        "two groups are of the same line, CUDA, Python and architecture"
    )
    for members in members_of.values():
        [foundation] = {cells.foundation(matrix, cell) for cell in members}
        assert all(cells.components(matrix, cell)[: len(foundation)] == foundation for cell in members)
        plain = next(cell for cell in members if cell.variant == "plain")
        assert cells.components(matrix, plain) == foundation


@given(matrices())
def test_a_tag_belongs_to_one_cell_of_an_architecture_and_has_its_axes(matrix: Matrix) -> None:
    expanded = cells.expand(matrix)
    references = tags.compute(matrix, expanded)
    for arch in ("amd64", "arm64"):  # cells that differ only in it share their tags
        everything = [str(reference) for cell in expanded if cell.arch == arch for reference in references[cell.id]]
        assert len(set(everything)) == len(everything)
    for cell in expanded:
        image = f"team/{cell.framework}-{'cpu' if cell.is_cpu else 'cuda'}"
        assert {reference.repository for reference in references[cell.id]} == {image}
        assert references[cell.id][0].tag == f"{cell.release}-{cell.cuda_tag}-{cell.python_tag}{cell.suffix}"
        # What a tag leaves out is the default of the line; on the cpu there is nothing to choose but Python.
        entry = matrix.frameworks[cell.framework].versions[cell.line]
        is_default = cell.python == entry.python[0] and (cell.is_cpu or cell.cuda == entry.cuda[0])
        assert (f"{cell.line}{cell.suffix}" in {reference.tag for reference in references[cell.id]}) is is_default
