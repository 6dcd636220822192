"""Lock files: contents, when they are out of date, and errors for damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from builder.common.errors import StaleError
from builder.debian.os_lock import OsRequest
from builder.index.wheels import is_cuda_wheel
from builder.lock import lockfile
from builder.lock.lockfile import GROUP_LOCKS, Lock
from builder.matrix.project import Project
from tests.fakes import locks

Edit = Callable[[str, str], Project]
GROUP = "em-1.10-cu1210-py311"
CELL = f"{GROUP}-jupyter"
REQUEST = OsRequest(debian="newbird", packages=("python3", "tini"))


@pytest.mark.parametrize("group", locks.GROUPS)
def test_the_tiny_locks_are_up_to_date(tiny: Project, snapshot: Callable[[str, str], None], group: str) -> None:
    snapshot(f"tiny/locks/{group}.json", GROUP_LOCKS.dump(locks.locks(tiny)[group]))


def test_requirements_by_component(tiny: Project) -> None:
    cell = tiny.select([CELL])[0]
    assert lockfile.requirements(tiny.matrix, cell) == {
        "python": ["pip"],
        "ember": ["ember==1.10.0", "emberkit", "ember-extra==1.10.0"],
        "board": ["board"],
        "jupyter": ["notebook"],
    }
    quartz = tiny.select(["qz-0.5-cu129-py311"])[0]
    assert lockfile.requirements(tiny.matrix, quartz)["quartz"] == ["quartz[cuda]==0.5.3"]


def test_on_the_cpu_another_package_and_nothing_of_cuda(on_cpu: Project, edit: Edit) -> None:
    [cell] = on_cpu.select(["qz-0.5-cpu-py311"])
    assert lockfile.requirements(on_cpu.matrix, cell) == {"python": ["pip"], "quartz": ["quartz==0.5.3"]}
    project = edit("cuda: {needs: [python]}", "cuda: {needs: [python], packages: [sums]}")
    assert "cuda" not in lockfile.requirements(project.matrix, cell)
    [cuda] = project.select(["qz-0.5-cu129-py311"])
    assert lockfile.requirements(project.matrix, cuda) == {
        "python": ["pip"], "cuda": ["sums"], "quartz": ["quartz[cuda]==0.5.3"]
    }  # fmt: skip


def test_requirements_of_a_component_of_a_line(edit: Edit) -> None:
    edit("  board: {needs", "  legacy: {needs: [cuda], packages: [old-sums]}\n  board: {needs")
    project = edit("{release: 1.9.2", "{components: [legacy], release: 1.9.2")
    [old, new] = project.select(["em-1.9-cu129-py39", "em-1.10-cu129-py311"])
    assert list(lockfile.requirements(project.matrix, old).items()) == [
        ("python", ["pip"]),
        ("ember", ["ember==1.9.2", "emberkit"]),
        ("legacy", ["old-sums"]),
    ]
    assert "legacy" not in lockfile.requirements(project.matrix, new)


def stale(project: Project, cell_id: str = CELL) -> str:
    """Why the tiny lock is not current for a cell."""
    [cell] = project.select([cell_id])
    lock = GROUP_LOCKS.read(project.root, cell.group)
    assert lock is not None
    return lockfile.stale_reason(project.matrix, lock, [cell])


STALE = {
    "release": ("release: 1.10.0", "release: 1.10.1", "ember: matrix.yaml requires ember==1.10.1, "),
    "packages of a component": (
        "packages: [notebook]",
        "packages: [notebook, lab]",
        "jupyter: matrix.yaml requires notebook, lab, the lock has notebook",
    ),
    "glibc": ('glibc: "2.36"', 'glibc: "2.41"', "glibc: matrix.yaml has 2.41, the lock 2.36"),
    "toolkit": ("toolkit: 12.10.1", "toolkit: 12.10.2", "toolkit: matrix.yaml has 12.10.2, the lock 12.10.1"),
    "no toolkit": ("{toolkit: 12.10.1}", "{}", "toolkit: matrix.yaml has nothing, the lock 12.10.1"),
    "constraint of the line": (
        "release: 1.10.0\n",
        "release: 1.10.0\n        constraints: [sums<2]\n",
        "constraints: matrix.yaml has sums<2, the lock nothing",
    ),
    "package for this CUDA": (
        "package: ember\n",
        'package: ember\n    package_on: {"12": "ember[cuda]"}\n',
        "ember: matrix.yaml requires ember[cuda]==1.10.0",
    ),
    "new component": (
        "  jupyter: [board, jupyter]\n",
        "  jupyter: [board, jupyter, more]\n",
        "the component more is new",
    ),
}


@pytest.mark.parametrize(("old", "new", "reason"), STALE.values(), ids=STALE.keys())
def test_changes_that_make_a_lock_stale(tiny: Project, edit: Edit, old: str, new: str, reason: str) -> None:
    assert stale(tiny) == ""
    if "more" in new:
        edit("  board: {needs", "  more: {needs: [base], packages: [more]}\n  board: {needs")
    assert stale(edit(old, new)).startswith(reason)


FRESH = {
    "another CUDA's toolkit": ('"12.9": {}', '"12.9": {toolkit: 12.9.1}'),
    "constraint of another framework": ("{release: 0.5.3", "{constraints: [sums<2], release: 0.5.3"),
    "package of another framework": ("quartz[cuda]", "quartz[gpu]"),
    "package of Debian that is a Python": ("{debian: newbird}", "{debian: newbird, apt: [python3, python3-extra]}"),
    "budget": ("exclude:", 'budgets: [{cells: "*", image: 4GB, layer: 1GB}]\nexclude:'),
    "command": ("command: [start-jupyter]", "command: [other]"),
    "source": ("namespace: team", "namespace: team\nsource: https://git.example.test/team/images"),
    "reason": ("made up: no wheels", "made up: not a wheel"),
    "base image": ("example/base:new@", "example/base:newer@"),
    "Debian package": ("apt: [python3]", "apt: [python3, git]"),
    "order of components": ("jupyter: [board, jupyter]", "jupyter: [jupyter, board]"),
}


@pytest.mark.parametrize(("old", "new"), FRESH.values(), ids=FRESH.keys())
def test_changes_that_do_not_concern_the_cell(edit: Edit, old: str, new: str) -> None:
    """Other cells, lines, components and variants do not concern it either: test_locality.py."""
    assert stale(edit(old, new)) == ""


def test_a_cpu_beside_it_leaves_the_locks_of_cuda_alone(on_cpu: Project) -> None:
    for cell in locks.LOCKED:
        assert stale(on_cpu, cell) == ""


def test_what_a_cell_needs_of_its_groups_lock(tiny: Project) -> None:
    """Each wheel once, with the first component that needs it; CUDA's of the framework are those of `cuda`."""
    [cell] = tiny.select([CELL])
    lock = lockfile.of_cell(tiny.matrix, cell, locks.locks(tiny)[GROUP])
    assert {wheel.name: wheel.component for wheel in lock.wheels} == {
        **dict.fromkeys(locks.CUDA, "cuda"),
        **dict.fromkeys(("ember", "ember-extra", "emberkit"), "ember"),
        "pip": "python",
        "board": "board",
        "notebook": "jupyter",
    }
    assert list(lock.wheels) == sorted(lock.wheels, key=lambda wheel: (wheel.component, wheel.name))
    [plain] = tiny.select([GROUP])
    assert {wheel.component for wheel in lockfile.of_cell(tiny.matrix, plain, locks.locks(tiny)[GROUP]).wheels} == {
        "cuda",
        "ember",
        "python",
    }


def test_a_wheel_that_two_components_need_belongs_to_the_first(tiny: Project) -> None:
    whole = locks.locks(tiny)[GROUP]
    jupyter = whole.components["jupyter"]
    parts = {**whole.components, "jupyter": replace(jupyter, wheels=sorted([*jupyter.wheels, "board", "emberkit"]))}
    shared = replace(whole, components=parts)
    [cell] = tiny.select([CELL])
    assert lockfile.of_cell(tiny.matrix, cell, shared) == lockfile.of_cell(tiny.matrix, cell, whole)


def test_cuda_wheels_of_a_variant_belong_to_its_component(tiny: Project) -> None:
    whole = locks.locks(tiny)[GROUP]
    compiler = locks.entry("nvidia-compiler", "1", 1, "py3-none-manylinux_2_28_x86_64")
    board = replace(whole.components["board"], wheels=["board", "nvidia-compiler", locks.CUDA[0]])
    wheels = tuple(sorted([*whole.wheels, compiler], key=lambda wheel: wheel.name))
    added = replace(whole, wheels=wheels, components={**whole.components, "board": board})
    [cell] = tiny.select([CELL])
    owners = {
        wheel.name: wheel.component for wheel in lockfile.of_cell(tiny.matrix, cell, added).wheels if wheel.is_cuda
    }
    assert owners == {**dict.fromkeys(locks.CUDA, "cuda"), "nvidia-compiler": "board"}


def test_a_lock_without_a_component_of_the_cell(tiny: Project) -> None:
    whole = locks.locks(tiny)[GROUP]
    del whole.components["jupyter"]
    [cell] = tiny.select([CELL])
    with pytest.raises(StaleError, match=f"locks/{GROUP}.json has no component jupyter"):
        lockfile.of_cell(tiny.matrix, cell, whole)


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
    assert is_cuda_wheel(file) is is_cuda


def with_index(lock: Lock) -> Lock:
    """The lock, with `notebook` from an index of its own."""
    wheels = (replace(wheel, index="company") if wheel.name == "notebook" else wheel for wheel in lock.wheels)
    return replace(lock, wheels=tuple(wheels))


def test_the_name_of_an_index_is_beside_its_wheels_only(tiny: Project) -> None:
    lock = with_index(locks.locks(tiny)[GROUP])
    text = GROUP_LOCKS.dump(lock)
    (line,) = [line for line in text.splitlines() if '"index"' in line]
    assert line.strip().startswith('{"name": "notebook"')
    assert line.rstrip(",").endswith('"index": "company"}')
    assert GROUP_LOCKS.parse(text, GROUP) == lock


def test_a_lock_with_wheels_of_another_index_is_out_of_date(tiny: Project, edit: Edit) -> None:
    lock = locks.locks(tiny)[GROUP]
    edit("debian:\n", "indexes: {company: https://python.example.test/simple}\ndebian:\n")
    project = edit("    packages: [notebook]\n", "    packages: [notebook]\n    index: company\n")
    for cell in project.groups[GROUP]:  # whether they have the component or not
        assert lockfile.stale_reason(project.matrix, lock, [cell]) == (
            "notebook: matrix.yaml takes it from the index company, the lock from the default index"
        )
    assert lockfile.stale_reason(project.matrix, with_index(lock), project.groups[GROUP]) == ""
    assert lockfile.stale_reason(tiny.matrix, lock, tiny.groups[GROUP]) == ""
