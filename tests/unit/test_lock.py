"""Lock files: what they hold, when they are stale, and what a damaged one says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from builder import lock
from builder.errors import LockError
from builder.project import Project
from tests.unit import tiny_locks

Edit = Callable[[str, str], Project]
CELL = "em-1.10-cu1210-py311-jupyter"


@pytest.mark.parametrize("cell", tiny_locks.LOCKED)
def test_the_tiny_locks_are_up_to_date(tiny: Project, snapshot: Callable[[str, str], None], cell: str) -> None:
    snapshot(f"tiny/locks/{cell}.json", lock.dump(tiny_locks.locks(tiny)[cell]))


def test_read_gives_what_was_written(tiny: Project) -> None:
    for cell, made in tiny_locks.locks(tiny).items():
        assert lock.read(tiny.root, cell) == made


def test_an_empty_lock(tiny: Project) -> None:
    empty = replace(tiny_locks.locks(tiny)[CELL], wheels=())
    lock.path(tiny.root, CELL).write_text(lock.dump(empty))
    assert lock.read(tiny.root, CELL) == empty


def test_a_line_a_wheel(tiny: Project) -> None:
    made = tiny_locks.locks(tiny)[CELL]
    lines = [line for line in lock.dump(made).splitlines() if '"sha256"' in line]
    assert [json.loads(line.strip().rstrip(","))["name"] for line in lines] == [wheel.name for wheel in made.wheels]
    assert "example.test" not in lock.dump(made)


def test_none(tiny: Project) -> None:
    assert lock.read(tiny.root, "em-1.9-cu129-py39") is None


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": lambda text: text[: len(text) // 2],
    "not UTF-8": lambda text: text + b"\xff",
    "not JSON": lambda text: text.replace(b"{", b"[", 1),
    "a list": lambda _: b"[]\n",
    "2,000 brackets": lambda _: b"[" * 2000,
    "other format": lambda text: text.replace(b'"format": 1', b'"format": 2'),
    "unknown key": lambda text: text.replace(b'"format": 1', b'"format": 1, "more": 1'),
    "size as text": lambda text: text.replace(b'"size": 1003', b'"size": "1003"'),
    "negative size": lambda text: text.replace(b'"size": 1003', b'"size": -1'),
    "other spacing": lambda text: text + b"\n",
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "keys twice": lambda text: text.replace(b'"format": 1,', b'"format": 1, "format": 1,'),
    "another cell's": lambda text: text.replace(f'"cell": "{CELL}"'.encode(), b'"cell": "em-1.9-cu129-py39"'),
    "path in a file name": lambda text: text.replace(b'"file": "pip', b'"file": "../pip'),
    "newline in a name": lambda text: text.replace(b'"name": "pip"', b'"name": "pip\\n"'),
    "option in a name": lambda text: text.replace(b'"name": "pip"', b'"name": "--pip"'),
    "line in a version": lambda text: text.replace(b'"version": "2.0"', b'"version": "2.0 --index-url x"', 1),
    "short hash": lambda text: text.replace(b'"sha256": "', b'"sha256": "0', 1),
    "hash in capitals": lambda text: text.upper().replace(b'"SHA256"', b'"sha256"'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged(tiny: Project, damage: Callable[[bytes], bytes]) -> None:
    path = lock.path(tiny.root, CELL)
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before, "this test damages nothing"
    with pytest.raises(LockError) as caught:
        lock.read(tiny.root, CELL)
    assert f"{CELL}.json" in str(caught.value)
    assert caught.value.hint == f"Make it again: builder lock {CELL}"
    assert len(str(caught.value)) < 500


def test_a_folder_instead_of_a_file(tiny: Project) -> None:
    lock.path(tiny.root, "em-1.9-cu129-py39").mkdir()
    with pytest.raises(LockError, match=r"em-1.9-cu129-py39.json: .*Is a directory"):
        lock.read(tiny.root, "em-1.9-cu129-py39")


def test_requirements_by_component(tiny: Project) -> None:
    cell = tiny.select([CELL])[0]
    assert lock.requirements(tiny.matrix, cell) == {
        "python": ["pip"],
        "ember": ["ember==1.10.0", "emberkit", "ember-extra==1.10.0"],
        "board": ["board"],
        "jupyter": ["notebook"],
    }
    quartz = tiny.select(["qz-0.5-cu129-py311"])[0]
    assert lock.requirements(tiny.matrix, quartz)["quartz"] == ["quartz[cuda]==0.5.3"]


def test_on_the_cpu_another_package_and_nothing_of_cuda(on_cpu: Project, edit: Edit) -> None:
    [cell] = on_cpu.select(["qz-0.5-cpu-py311"])
    assert lock.requirements(on_cpu.matrix, cell) == {"python": ["pip"], "quartz": ["quartz==0.5.3"]}
    project = edit("cuda: {needs: [python]}", "cuda: {needs: [python], packages: [sums]}")
    assert "cuda" not in lock.requirements(project.matrix, cell)
    [cuda] = project.select(["qz-0.5-cu129-py311"])
    assert lock.requirements(project.matrix, cuda) == {
        "python": ["pip"], "cuda": ["sums"], "quartz": ["quartz[cuda]==0.5.3"]
    }  # fmt: skip


def test_a_component_of_a_line_asks_for_its_packages(edit: Edit) -> None:
    edit("  board: {needs", "  legacy: {needs: [cuda], packages: [old-sums]}\n  board: {needs")
    project = edit("{release: 1.9.2", "{components: [legacy], release: 1.9.2")
    [old, new] = project.select(["em-1.9-cu129-py39", "em-1.10-cu129-py311"])
    assert list(lock.requirements(project.matrix, old).items()) == [
        ("python", ["pip"]),
        ("ember", ["ember==1.9.2", "emberkit"]),
        ("legacy", ["old-sums"]),
    ]
    assert "legacy" not in lock.requirements(project.matrix, new)


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        ("em-1.9-cu129-py39", "board ember==1.9.2 emberkit notebook pip"),
        # With the other framework of this CUDA and Python, whose only cell adds no variant that is not there.
        (
            "em-1.10-cu1210-py39",
            "board cuda-toolkit[all]==12.10.1 ember-extra==1.10.0 ember==1.10.0 emberkit notebook pip "
            "quartz[cuda]==0.5.3",
        ),
    ],
)
def test_together_is_asked_for_what_all_cells_and_their_cuda_ask_for(tiny: Project, group: str, wanted: str) -> None:
    assert lock.joint_requirements(tiny.matrix, tiny.together[group]) == wanted.split()


def test_on_the_cpu_no_cuda_is_pinned(on_cpu: Project) -> None:
    wanted = lock.joint_requirements(on_cpu.matrix, on_cpu.together["qz-0.5-cpu-py311"])
    assert wanted == ["board", "notebook", "pip", "quartz==0.5.3"]


def test_constraints_are_those_of_all_lines_together(edit: Edit) -> None:
    edit("{release: 0.5.3", "{constraints: [sums<3, tools<82], release: 0.5.3")
    project = edit("{release: 1.9.2", "{constraints: [sums<2], release: 1.9.2")
    found = {group: lock.joint_constraints(project.matrix, cells) for group, cells in project.together.items()}
    assert found == {
        "em-1.9-cu129-py39": ["sums<2"],
        "em-1.10-cu129-py311": ["sums<3", "tools<82"],
        "em-1.10-cu1210-py39": ["sums<3", "tools<82"],
        "em-1.10-cu1210-py311": [],
        "qz-0.5-cu129-py311": ["sums<3", "tools<82"],
        "qz-0.5-cu1210-py39": ["sums<3", "tools<82"],
    }


def inputs(project: Project, cell_id: str = CELL) -> str:
    cell = project.select([cell_id])[0]
    return lock.inputs(project.matrix, cell, project.together[cell.group])


STALE = {
    "release": ("release: 1.10.0", "release: 1.10.1"),
    "packages of the line": ("ember-extra==1.10.0", "ember-extra==1.10.2"),
    "packages of a component": ("packages: [notebook]", "packages: [notebook, lab]"),
    "package of a sibling's component": ("  board: [board]\n", "  board: [board, more]\n"),
    "glibc": ('glibc: "2.36"', 'glibc: "2.41"'),
    "toolkit of its CUDA": ("toolkit: 12.10.1", "toolkit: 12.10.2"),
    "constraint of the line": ("release: 1.10.0\n", "release: 1.10.0\n        constraints: [sums<2]\n"),
    "package for this CUDA": ("package: ember\n", 'package: ember\n    package_on: {"12": "ember[cuda]"}\n'),
    "order of components": ("jupyter: [board, jupyter]", "jupyter: [jupyter, board]"),
}


@pytest.mark.parametrize(("old", "new"), STALE.values(), ids=STALE.keys())
def test_inputs_change_with_what_is_asked_for(tiny: Project, edit: Edit, old: str, new: str) -> None:
    before = inputs(tiny)
    if "more" in new:
        edit("  board: {needs", "  more: {needs: [base], packages: [more]}\n  board: {needs")
    assert inputs(edit(old, new)) != before


FRESH = {
    "another CUDA's toolkit": ('"12.9": {}', '"12.9": {toolkit: 12.9.1}'),
    "constraint of a framework on another CUDA": ("{release: 0.5.3", "{constraints: [sums<2], release: 0.5.3"),
    "package for no CUDA": (
        "package: quartz[cuda]\n",
        'package: quartz[cuda]\n    package_on: {"12": "quartz[cuda]"}\n',
    ),
    "package of another framework on this CUDA and another Python": ("quartz[cuda]", "quartz[gpu]"),
    "package of Debian that is a Python": ("{debian: newbird}", "{debian: newbird, apt: [python3, python3-extra]}"),
    "budget": ("exclude:", 'budgets: [{cells: "*", image: 4GB, layer: 1GB}]\nexclude:'),
    "command": ("command: [start-jupyter]", "command: [other]"),
    "namespace": ("namespace: team", "namespace: others"),
    "reason": ("made up: no wheels", "made up: not a wheel"),
    "base image": ("example/base:new@", "example/base:newer@"),
    "another line": ("release: 1.9.2", "release: 1.9.3"),
    "Debian package": ("apt: [python3]", "apt: [python3, git]"),
}


@pytest.mark.parametrize(("old", "new"), FRESH.values(), ids=FRESH.keys())
def test_inputs_do_not_change_with_the_rest(tiny: Project, edit: Edit, old: str, new: str) -> None:
    before = inputs(tiny)
    assert inputs(edit(old, new)) == before


def test_inputs_change_with_what_another_framework_beside_it_asks_for(tiny: Project, edit: Edit) -> None:
    """They are resolved at once, so that they share CUDA's wheels."""
    beside = "em-1.10-cu129-py311"
    before = inputs(tiny, beside)
    assert inputs(edit("release: 0.5.3", "release: 0.5.4"), beside) != before


def test_a_cpu_beside_it_leaves_the_locks_of_cuda_alone(on_cpu: Project) -> None:
    for cell in tiny_locks.LOCKED:
        locked = lock.read(on_cpu.root, cell)
        assert locked is not None
        assert locked.inputs == inputs(on_cpu, cell)


@pytest.mark.parametrize(
    ("file", "is_cuda"),
    [
        ("nvidia_cublas_cu12-12.8.4.1-py3-none-manylinux_2_27_x86_64.whl", True),
        ("nvidia_nccl_cu12-2.27.5-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("nvidia_ml_py-13.580.82-py3-none-any.whl", False),
        ("nvidia_thing-1.0-cp311-cp311-manylinux_2_27_x86_64.whl", False),
        ("torch-2.9.1-cp311-cp311-manylinux_2_28_x86_64.whl", False),
        ("triton-3.5.1-py3-none-manylinux_2_27_x86_64.whl", False),
    ],
)
def test_cuda_wheels(file: str, is_cuda: bool) -> None:
    assert lock.is_cuda_wheel(file) is is_cuda


def test_the_digest_is_that_of_the_wheels(tiny: Project) -> None:
    made = tiny_locks.locks(tiny)[CELL]
    assert replace(made, inputs="other").digest == made.digest
    assert replace(made, wheels=made.wheels[1:]).digest != made.digest
    assert {wheel.name for wheel in made.of_component("cuda")} == set(tiny_locks.CUDA)
