"""Tags: complete, and each for one cell only."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from builder.common.errors import MatrixError
from builder.matrix import tags
from builder.matrix.project import Project
from tests.fakes.engine import place

EMBER = "registry.example.test:5000/team/ember-cuda"
QUARTZ = "registry.example.test:5000/team/quartz-cuda"


@pytest.mark.parametrize(
    ("cell", "image", "expected"),
    [
        ("em-1.10-cu1210-py311", EMBER, "1.10.0-cu1210-py311 1.10-cu1210-py311 1.10.0 1.10"),
        (
            "em-1.10-cu129-py311-jupyter", EMBER,
            "1.10.0-cu129-py311-jupyter 1.10-cu129-py311-jupyter 1.10.0-cu129-jupyter 1.10-cu129-jupyter",
        ),
        (
            "em-1.10-cu1210-py39-board", EMBER,
            "1.10.0-cu1210-py39-board 1.10-cu1210-py39-board 1.10.0-py39-board 1.10-py39-board",
        ),
        ("qz-0.5-cu1210-py39-board", QUARTZ, "0.5.3-cu1210-py39-board 0.5-cu1210-py39-board"),
    ],
    ids=["all defaults", "another CUDA", "another Python", "both others: the alias is the full tag"],
)  # fmt: skip
def test_references(tiny: Project, cell: str, image: str, expected: str) -> None:
    computed = tags.compute(tiny.matrix, tiny.cells)[cell]
    assert [str(reference) for reference in computed] == [f"{image}:{tag}" for tag in expected.split()]


def test_on_the_cpu_tags_leave_out_the_cpu(on_cpu: Project) -> None:
    """The cpu is not the default of the line, but the name of the image already has it."""
    computed = tags.compute(on_cpu.matrix, on_cpu.cells)
    image = "registry.example.test:5000/team/quartz"
    assert [str(reference) for reference in computed["qz-0.5-cpu-py311-jupyter"]] == [
        f"{image}:0.5.3-cpu-py311-jupyter",
        f"{image}:0.5-cpu-py311-jupyter",
        f"{image}:0.5.3-jupyter",
        f"{image}:0.5-jupyter",
    ]
    assert str(computed["qz-0.5-cu129-py311-jupyter"][-1]) == f"{QUARTZ}:0.5-jupyter"


@pytest.mark.parametrize("more", ["", ", arch: [arm64]"], ids=["one architecture", "different architectures"])
def test_two_cells_with_one_tag(edit: Callable[[str, str], Project], more: str) -> None:
    line = f'{{release: 1.9.2, cuda: ["12.9"], python: ["3.9"]{more}}}'
    project = edit('"1.9": {release: 1.9.2', f'"1.9.2": {line}\n      "1.9": {{release: 1.9.2')
    with pytest.raises(MatrixError, match="have the same tag") as caught:
        tags.compute(project.matrix, project.cells)
    assert place(caught.value).startswith("matrix.yaml:")


def test_architectures_share_their_tags(edit: Callable[[str, str], Project]) -> None:
    project = edit('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}')
    computed = tags.compute(project.matrix, project.cells)
    assert computed["qz-0.5-cu129-py311-arm64"] == computed["qz-0.5-cu129-py311"]
    assert computed["qz-0.5-cu129-py311-board-arm64"] == computed["qz-0.5-cu129-py311-board"]


def test_without_a_registry(edit: Callable[[str, str], Project]) -> None:
    project = edit("registry: registry.example.test:5000", 'registry: ""')
    computed = tags.compute(project.matrix, project.cells)
    assert str(computed["em-1.9-cu129-py39"][-1]) == "team/ember-cuda:1.9"


@pytest.mark.parametrize(
    ("line", "release"), [("0.5", "0.5.3"), ("0.5", "0.5.0rc1"), ("0.5.0", "0.5.0rc1"), ("0.5.3", "0.5.3.post1")]
)
def test_every_tag_of_an_image_is_recognized(edit: Callable[[str, str], Project], line: str, release: str) -> None:
    edit("{cell: qz-0.5-", f"{{cell: qz-{line}-")
    tiny = edit('"0.5": {release: 0.5.3', f'"{line}": {{release: {release}')
    for full, *aliases in tags.compute(tiny.matrix, tiny.cells).values():
        for name in (full, *aliases):
            assert tags.is_tag_of(name.tag, full.tag)


FULL = "2.9.1-cu128-py311-jupyter"
AXES = [[*cuda, *python, "jupyter"] for cuda in ([], ["cu128"]) for python in ([], ["py311"])]
words = st.sampled_from(["cu128", "cu126", "py311", "ssh", "jupyter", "20261122", "2026", ""])


@given(
    st.sampled_from(["2.9.1", "2.9", "2", "2.8", "2.9.1.1", "2.9.", "2.", ""]),
    st.sampled_from(AXES) | st.lists(words, max_size=4),
)
@example("2.9.1", ["cu128", "py311", "jupyter"])
@example("2.9.1", ["cu128", "py311"])
@example("2.9", ["ssh"])
@example("2.9", [])
@example("2.8", ["jupyter"])
@example("2.9.1.1", ["jupyter"])
@example("2.9", ["20261122", "jupyter"])
@example("2.9", ["jupyter", "2026"])
@example("", [])
@example("", ["jupyter"])
@example("2.9", ["cu126", "jupyter"])
@example("2.9", ["py311", "cu128", "jupyter"])
@example("2.9.1", ["cu128", "py311", "jupyter", "20261122"])
def test_a_tag_of_an_image_leaves_out_the_cuda_the_python_or_numbers_of_the_version(
    version: str, parts: list[str]
) -> None:
    """In the order of the full tag, and never the variant: without it, the tag is that of another image."""
    expected = version in ("2.9.1", "2.9", "2") and parts in AXES
    assert tags.is_tag_of("-".join([version, *parts]), FULL) == expected


@given(st.integers(1, 200), st.randoms())
def test_stamps_of_a_day_are_in_order(count: int, random: Random) -> None:
    stamps = list(itertools.islice(tags.stamps("20261122"), count))
    assert all(map(tags.is_stamp, stamps))
    ordered = ["20261121.9", *stamps]
    assert sorted(random.sample(ordered, len(ordered)), key=tags.stamp_order) == ordered
    assert len(set(stamps)) == count
    assert list(itertools.islice(tags.stamps(stamps[-1]), 2)) == [stamps[-1], f"20261122.{count}"]


@given(st.text("0123456789.-T", max_size=12) | st.from_regex(r"[0-9]{7,9}(\.[0-9]{0,5})?", fullmatch=True))
@example("20261122.01")
def test_a_stamp_is_a_day_and_a_number(text: str) -> None:
    day, dot, number = text.partition(".")
    is_number = not dot or (number.isdigit() and 1 <= int(number) <= 9999 and str(int(number)) == number)
    assert tags.is_stamp(text) == (len(day) == 8 and day.isdigit() and is_number)
