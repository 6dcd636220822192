"""What is not in an image does not change it: neither its lock, its Dockerfile, its layers nor the digest of its plan.

Two matrices are drawn from one set of definitions: each has some of the framework lines, CUDA versions, Pythons,
components and variants. So each is the other with things added and things removed. Every cell that both have must be
the same in both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.common import strict_yaml
from builder.common.strict_yaml import Located
from builder.lock import lockfile
from builder.lock.lockfile import GROUP_LOCKS, Lock
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import plan, render
from tests.fakes import locks as tiny_locks
from tests.paths import ROOT

PYTHONS = {"3.9": {"debian": "oldbird"}, "3.11": {"debian": "newbird"}, "3.13": {"debian": "newbird"}}
CUDAS: dict[str, Any] = {"12.9": {}, "12.10": {"toolkit": "12.10.1"}, "13.0": {"env": {"NEW": "1"}}}
LINES = {"ember": ("1.9", "1.10"), "quartz": ("0.5", "0.6")}
EXTRAS = {
    "board": {"needs": ["python"], "packages": ["board"]},
    "jupyter": {"needs": ["python"], "packages": ["notebook", "board"], "port": 8888, "command": ["start"]},
    "tools": {"needs": ["base"], "apt": ["git"]},
    "science": {"needs": ["python"], "packages": ["frames", "plots"], "env": {"SCIENCE": "yes"}},
}
VARIANTS = {
    "plain": [],
    "board": ["board"],
    "jupyter": ["board", "jupyter"],
    "lab": ["tools", "jupyter", "science"],
    "tools": ["tools"],
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a matrix has, in this order."""

    lines: tuple[tuple[str, str], ...]
    cudas: tuple[str, ...]
    pythons: tuple[str, ...]
    variants: tuple[str, ...]
    namespace: str

    def text(self) -> str:
        """As matrix.yaml: JSON is YAML. Some have components that no variant has."""
        named = {name for variant in self.variants for name in VARIANTS[variant]}
        debian = {
            name: {"image": f"example/{name}:1@sha256:{'1' * 64}", "glibc": "2.36"} for name in ("oldbird", "newbird")
        }
        framework = {"needs": ["cuda"]}
        return json.dumps(
            {
                "registry": "",
                "namespace": self.namespace,
                "debian": debian,
                "python": {name: PYTHONS[name] for name in self.pythons},
                "cuda": {name: CUDAS[name] for name in self.cudas},
                "frameworks": {
                    name: {
                        "short": name[:2],
                        "image": f"{name}-cuda",
                        "package": name,
                        "versions": {
                            line: {"release": f"{line}.1", "cuda": list(self.cudas), "python": list(self.pythons)}
                            for framework_name, line in self.lines
                            if framework_name == name
                        },
                    }
                    for name in dict.fromkeys(name for name, _ in self.lines)
                },
                "components": {
                    "base": {"apt": ["tini"]},
                    "python": {"needs": ["base"], "packages": ["pip"]},
                    "cuda": {"needs": ["python"]},
                    **dict.fromkeys(LINES, framework),
                    **{name: part for name, part in EXTRAS.items() if name in named or len(self.pythons) > 1},
                },
                "variants": {name: VARIANTS[name] for name in self.variants},
            }
        )


def some(names: list[Any], least: int = 1) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(names), min_size=least, max_size=2, unique=True).map(tuple)


choices = st.builds(
    Choice,
    lines=some([(name, line) for name, lines in LINES.items() for line in lines]),
    cudas=some(list(CUDAS)),
    pythons=some(list(PYTHONS)),
    variants=some([name for name in VARIANTS if name != "plain"], 0).map(lambda names: ("plain", *names)),
    namespace=st.sampled_from(["team", "others"]),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout without matrix.yaml and locks. Its matrix.yaml is read as JSON, which is faster."""

    read_yaml = strict_yaml.parse_yaml

    def parse(blob: bytes, name: str) -> Located:
        if name != "matrix.yaml":
            return read_yaml(blob, name)
        return Located(name, json.loads(blob), {})

    folder = tmp_path_factory.mktemp("locality")
    ignored = shutil.ignore_patterns("host", "__pycache__")
    shutil.copytree(ROOT / "templates", folder / "templates", symlinks=True, ignore=ignored)
    (folder / "locks").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_yaml, "parse_yaml", parse)
        yield folder


def write(root: Path, choice: Choice) -> Project:
    """The project, without locks."""
    shutil.rmtree(root / "locks")
    (root / "locks").mkdir()
    (root / "matrix.yaml").write_text(choice.text())
    return Project(root)


def put(project: Project, locks: dict[str, Lock]) -> None:
    for group, lock in locks.items():
        (project.root / GROUP_LOCKS.path(group)).write_text(GROUP_LOCKS.dump(lock))
    tiny_locks.write_os_locks(project)


def seen(project: Project, chosen: Sequence[Cell]) -> dict[str, tuple[Any, ...]]:
    """Cell id -> all that must not change: Dockerfile and what it reads, layers, digest of the plan."""
    planned = plan.make_locked_plan(project, chosen)
    result = {}
    for image in planned.images:
        texts = render.render(project, plan.Plan(images=(image,)))
        result[image.id] = (texts, image.layers, image.plan, image.os_inputs, image.constraints)
    return result


@settings(max_examples=25)
@given(choices, choices)
def test_what_one_matrix_adds_to_another_changes_no_cell_of_both(root: Path, first: Choice, second: Choice) -> None:
    project = write(root, first)
    locks = {group: tiny_locks.lock_of(project, cells) for group, cells in project.groups.items()}
    put(project, locks)
    before = seen(project, project.cells)

    changed = write(root, second)
    new = {group: tiny_locks.lock_of(changed, cells) for group, cells in changed.groups.items()}
    common = [cell for cell in changed.cells if cell.id in before]

    # The locks of the first matrix are current for every cell that both have.
    for cell in common:
        assert lockfile.stale_reason(changed.matrix, locks[cell.group], [cell]) == ""
        assert lockfile.of_cell(changed.matrix, cell, locks[cell.group]) == lockfile.of_cell(
            changed.matrix, cell, new[cell.group]
        )
    # So they are the same with those locks, and with locks that have what the second matrix adds.
    for both in ({**new, **{group: locks[group] for group in locks.keys() & new.keys()}}, new):
        put(changed, both)
        assert seen(changed, common) == {cell.id: before[cell.id] for cell in common}


@settings(max_examples=25)
@given(choices, choices)
def test_only_groups_that_lack_something_are_locked_again(root: Path, first: Choice, second: Choice) -> None:
    project = write(root, first)
    locks = {group: tiny_locks.lock_of(project, cells) for group, cells in project.groups.items()}
    changed = write(root, second)
    put(changed, locks)
    for group, cells in changed.groups.items():
        lock = locks.get(group)
        needs = lockfile.group_requirements(changed.matrix, cells)
        same = lock is not None and lock.components.keys() == needs.keys()
        assert (lockfile.stale_reason(changed.matrix, lock, cells, cells) == "") is same
