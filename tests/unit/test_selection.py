"""Properties of cells, of what is resolved together, of tags and of layers, over made-up matrices.

The matrices have CUDA versions that sort other than their text, the cpu, several lines of a framework, and components
of lines.
"""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from builder import cells, layers, matrix, strict_yaml, tags
from builder.cells import CUDA, Cell
from builder.layers import LARGE, Parts
from builder.matrix import CPU, Matrix
from tests.unit.tiny_locks import wheel

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
        "python": {"needs": ["base"]},
        CUDA: {"needs": ["python"]},
        "legacy": {"needs": [CUDA]},
        "board": {"needs": ["python"]},
        "lab": {"needs": ["board"]},
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
                "components": draw(st.sampled_from([[], ["legacy"]])),
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
    text = json.dumps(BASE | {"frameworks": frameworks})  # which is YAML too
    return matrix.check(strict_yaml.parse(text.encode(), "matrix.yaml"))


randoms = st.randoms(use_true_random=False)


@given(matrices())
def test_ids_name_one_cell_each_and_can_be_read_back(made: Matrix) -> None:
    found = cells.expand(made)
    assert len({cell.id for cell in found}) == len(found)
    assert [cells.parse(made, cell.id, "x") for cell in found] == list(found)


@given(matrices())
def test_cells_are_in_the_order_of_versions_the_cpu_last(made: Matrix) -> None:
    found = cells.expand(made)
    assert [name for name in made.frameworks if any(cell.framework == name for cell in found)] == list(
        dict.fromkeys(cell.framework for cell in found)
    )
    for one, other in pairwise(found):
        if one.framework == other.framework:
            assert Version(one.line) <= Version(other.line)
        if (one.framework, one.line) == (other.framework, other.line):
            assert not one.is_cpu or other.is_cpu
            if not other.is_cpu:
                assert Version(one.cuda) <= Version(other.cuda)
        if (one.framework, one.line, one.cuda) == (other.framework, other.line, other.cuda):
            assert Version(one.python) <= Version(other.python)
    assert all(len({cell.id for cell in found if cell.group == one.group}) == len(made.variants) for one in found)


@given(matrices())
def test_components_come_after_what_they_need_and_the_cpu_has_no_cuda(made: Matrix) -> None:
    for cell in cells.expand(made):
        parts = cells.components(made, cell)
        assert len(set(parts)) == len(parts)
        assert (CUDA in parts) is not cell.is_cpu
        for number, part in enumerate(parts):
            needs = {need for need in made.components[part].needs if need != CUDA or not cell.is_cpu}
            assert needs <= set(parts[:number])
        line = made.frameworks[cell.framework].versions[cell.line]
        own = {name for name in line.components if not (cell.is_cpu and CUDA in made.components[name].needs)}
        assert {cell.framework, *own, *made.variants[cell.variant]} <= set(parts)
        assert not (set(line.components) - own) & set(parts)


@given(matrices(), st.data())
def test_a_selection_is_in_order_and_what_is_selected_again_is_the_same(made: Matrix, data: st.DataObject) -> None:
    found = cells.expand(made)
    wanted = data.draw(st.lists(st.sampled_from([cell.id for cell in found]), min_size=1, max_size=5))
    patterns = [data.draw(st.sampled_from([one, one[:4] + "*", "*" + one[-4:]])) for one in wanted]
    chosen = cells.select(made, found, patterns)
    assert {cell.id for cell in chosen} >= set(wanted)
    assert [found.index(cell) for cell in chosen] == sorted({found.index(cell) for cell in chosen})
    assert cells.select(made, found, patterns[::-1]) == chosen
    assert cells.select(made, found, [cell.id for cell in chosen]) == chosen
    alone = [cells.select(made, found, [pattern]) for pattern in patterns]
    assert {cell for one in alone for cell in one} == set(chosen)


def resolved(made: Matrix, found: tuple[Cell, ...]) -> dict[str, set[str]]:
    """Group -> the groups that it is resolved with, itself among them."""
    return {group: {cell.group for cell in members} for group, members in cells.together(made, found).items()}


@given(matrices())
def test_what_is_resolved_together_can_be_one_environment(made: Matrix) -> None:
    found = cells.expand(made)
    together = cells.together(made, found)
    assert set(together) == {cell.group for cell in found}
    for group, members in together.items():
        assert group in {cell.group for cell in members}
        assert len({(cell.cuda, cell.python) for cell in members}) == 1
        lines = {(cell.framework, cell.line) for cell in members}
        assert len(lines) == len({name for name, _ in lines}), "at most one line of a framework"
        # Whole groups: a variant must not bring another wheel into its siblings later.
        assert {cell for cell in found if cell.group in {one.group for one in members}} == set(members)


@given(matrices())
def test_nothing_of_the_same_cuda_and_python_is_left_out(made: Matrix) -> None:
    """Every framework is there by one line: the group's own, or else the first that the matrix names."""
    found = cells.expand(made)
    for group, members in cells.together(made, found).items():
        [own] = {(cell.framework, cell.line) for cell in found if cell.group == group}
        alike = {(cell.framework, cell.line) for cell in found if (cell.cuda, cell.python) == where(members[0])}
        expected = {
            name: next(line for line in made.frameworks[name].versions if (name, line) in alike) for name, _ in alike
        } | dict([own])
        assert {cell.framework: cell.line for cell in members} == expected


def where(cell: Cell) -> tuple[str, str]:
    return cell.cuda, cell.python


@given(matrices())
def test_first_lines_are_parts_of_a_whole(made: Matrix) -> None:
    """Groups of the lines that the matrix names first are resolved with one another, so all get the same versions."""
    resolutions = resolved(made, cells.expand(made))
    for group, others in resolutions.items():
        if all(group in resolutions[other] for other in others):
            assert all(resolutions[other] == others for other in others)
        # Who is resolved with a first line only lends it: both lists differ in the line of one framework.
        assert all(len(resolutions[other] ^ others) <= 2 for other in others)


@given(matrices(), randoms)
def test_the_order_of_cells_is_nothing_to_what_is_resolved_together(made: Matrix, random: Random) -> None:
    found = cells.expand(made)
    assert resolved(made, tuple(random.sample(found, len(found)))) == resolved(made, found)


@given(matrices())
def test_a_tag_belongs_to_one_cell_and_says_what_it_is(made: Matrix) -> None:
    found = cells.expand(made)
    references = tags.compute(made, found)
    everything = [str(reference) for cell in found for reference in references[cell.id]]
    assert len(set(everything)) == len(everything)
    for cell in found:
        image = f"team/{cell.framework}-{'cpu' if cell.is_cpu else 'cuda'}"
        assert {reference.repository for reference in references[cell.id]} == {image}
        assert references[cell.id][0].tag == f"{cell.release}-{cell.cuda_tag}-{cell.python_tag}{cell.suffix}"
        # What a tag leaves out is the default of the line; on the cpu there is nothing to choose but Python.
        entry = made.frameworks[cell.framework].versions[cell.line]
        is_default = cell.python == entry.python[0] and (cell.is_cpu or cell.cuda == entry.cuda[0])
        assert (f"{cell.line}{cell.suffix}" in {reference.tag for reference in references[cell.id]}) is is_default


@given(matrices(), randoms)
def test_images_of_one_cuda_begin_alike_and_the_cpu_with_none_of_it(made: Matrix, random: Random) -> None:
    """As if every group were locked with its CUDA's libraries: some of them go to one framework alone."""
    found = cells.expand(made)
    images = {}
    for cell in found:
        libraries = [] if cell.is_cpu else [wheel(CUDA, f"nvidia-blas-{cell.cuda_tag}", "1", LARGE)]
        if not cell.is_cpu and cell.framework == "ember":
            libraries.append(wheel(CUDA, f"nvidia-amber-{cell.cuda_tag}", "1", LARGE))
        own = [wheel(cell.framework, cell.framework, cell.release, LARGE), wheel("python", "pip", "1", 10)]
        images[cell.id] = Parts(
            framework=cell.framework,
            components=cells.components(made, cell),
            python=cell.python,
            wheels=tuple(random.sample([*libraries, *own], len(libraries) + len(own))),
            os=f"sha256:os {cell.python}",
            files="sha256:files",
            compiler="sha256:compiler",
        )
    stacks = layers.arrange(images)
    users = {
        layer.inputs: sum(layer.inputs in {one.inputs for one in stacked} for stacked in stacks.values())
        for stacked in stacks.values()
        for layer in stacked
    }
    lowest: dict[str, str] = {}
    for cell in found:
        libraries_of = [layer for layer in stacks[cell.id] if layer.component == CUDA]
        if cell.is_cpu:
            assert not libraries_of
            continue
        assert list(stacks[cell.id][: len(libraries_of)]) == libraries_of
        counts = [users[layer.inputs] for layer in libraries_of]
        assert counts == sorted(counts, reverse=True), "what more images use lies lower"
        blas = next(layer for layer in libraries_of if layer.name.startswith("nvidia-blas"))
        if counts.count(users[blas.inputs]) == 1:
            assert lowest.setdefault(cell.cuda, stacks[cell.id][0].inputs) == stacks[cell.id][0].inputs
