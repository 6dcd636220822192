"""The list of packages that people add, its results, and how one of them is judged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from builder.matrix.project import Project
from tests.packages import run
from tests.packages.run import Fault, Package, PackageList, Result, Trial

ROOT = Path(__file__).resolve().parents[2]
CELL = "pt-2.9-cu128-py311"


@pytest.fixture(scope="module")
def project() -> Project:
    return Project(ROOT)


def test_every_package_has_a_check_and_images(project: Project) -> None:
    listed = run.read_list(ROOT)
    assert len(listed.packages) >= 30
    for name, package in listed.packages.items():
        cells = run.cells_of(project, package)
        assert {cell.framework for cell in cells} <= listed.frameworks.keys(), name
        # What the resolver refuses is never loaded.
        assert package.check or package.resolve_only or package.fails, name
        compile(package.check, name, "exec")


def test_the_page_has_the_recorded_results(project: Project) -> None:
    """After an edit of the list: python -m tests.packages.run --render."""
    listed = run.read_list(ROOT)
    results = run.read_results(ROOT)
    assert results == run.updated(results, [], listed, project)
    assert (ROOT / run.PAGE).read_text(encoding="utf-8") == run.page(results, listed)


# ---- the verdict


@dataclass
class FakeContainer:
    """A container with pip; `new` is what `pip install` changes, `status` by program or code the statuses of others."""

    new: Mapping[str, str] = field(default_factory=dict)
    conflicts: Sequence[str] = ()
    failing: Mapping[str, str] = field(default_factory=dict)  # output by the last argument
    commands: list[tuple[str, str]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: {"torch": "2.9.1", "numpy": "2.4.6"})
    is_installed: bool = False

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, *, user: str = ""
    ) -> subprocess.CompletedProcess[str]:
        self.commands.append((user, " ".join(command)))
        if (output := self.failing.get(command[-1])) is not None:
            return subprocess.CompletedProcess(command, 1, "", output)
        match list(command):
            case ["pip", "list", *_]:
                versions = {**self.versions, **self.new} if self.is_installed else self.versions
                output = json.dumps([{"name": name, "version": version} for name, version in versions.items()])
            case ["pip", "check"]:
                if self.is_installed and self.conflicts:
                    return subprocess.CompletedProcess(command, 1, "\n".join(self.conflicts), "")
                output = "No broken requirements found.\n"
            case ["cat", path]:
                assert path == run.CONSTRAINTS
                output = "# pinned\ntorch==2.9.1,!=0+to.override\n"
            case [_, *_, "install", "--no-input", _, _]:
                self.is_installed = True
                output = ""
            case _:
                output = ""
        return subprocess.CompletedProcess(command, 0, output, "")


def trial(container: FakeContainer, **values: object) -> Trial:
    package = Package.model_validate({"cells": [CELL], "check": "import faiss", **values})
    return Trial(name="Faiss_GPU[cu12]<2", package=package, container=container)


def test_a_package_that_works() -> None:
    container = FakeContainer(new={"faiss-gpu": "1.14", "numpy": "2.3.5", "idle": "1"})
    tried = trial(container)
    tried.run("import torch")
    assert tried.installed == {"faiss-gpu": "1.14"}
    assert tried.replaced == {"numpy": "2.4.6 -> 2.3.5"}
    assert container.commands[-2:] == [("", "python -c import faiss"), ("", "python -c import torch")]


MISSING = "Traceback (most recent call last):\n  File\nOSError: libcudart.so.12: cannot open shared object file\n"


@pytest.mark.parametrize(
    ("container", "message"),
    [
        (FakeContainer(failing={"import faiss": MISSING}), "OSError: libcudart.so.12: cannot open shared object file"),
        (FakeContainer(failing={"import torch": "ImportError: libcudnn.so.9\n"}), "ImportError: libcudnn.so.9"),
        (FakeContainer(new={"torch": "2.8.0"}), "replaces what the image pins: torch 2.9.1 -> 2.8.0"),
        (FakeContainer(conflicts=["torchvision 0.24 requires x"]), "torchvision 0.24 requires x"),
        (FakeContainer(failing={"check": MISSING}), f"pip check ended with status 1: {MISSING.splitlines()[-1]}"),
        (
            FakeContainer(failing={"Faiss_GPU[cu12]<2": "Collecting faiss\nERROR: no match\nadvice\n"}),
            "ERROR: no match",
        ),
    ],
    ids=["its library is missing", "the framework's is", "another version", "a conflict", "pip crashes", "refused"],
)
def test_a_package_that_does_not_work(container: FakeContainer, message: str) -> None:
    with pytest.raises(Fault) as caught:
        trial(container).run("import torch")
    assert str(caught.value) == message


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
    assert run.surprise(Package.model_validate(package), fault) == difference


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
    kept = run.updated(known, new, listed, project)
    assert kept == [new[0], new[1], known[1]]


def test_a_row_names_the_version_and_why() -> None:
    note = {"cells": [CELL], "fails": "x", "note": "It needs a|b."}
    listed = PackageList(frameworks={}, packages={"x[y]<2": Package.model_validate(note)})
    broken = result("x[y]<2").model_copy(update={"fault": "OSError", "replaced": {"numpy": "2 -> 1"}})
    page = run.page([broken, broken.model_copy(update={"tested": "2026-11-26"})], listed)
    text = r"**does not work**. It needs a\|b. Replaces numpy 2 -> 1."
    assert page.splitlines()[-1] == f"| `pip install 'x[y]<2'` | 1 | {text} |"
    assert "\nTested on 2026-11-26 (image of 2026-11-20), 2026-11-27 (image of 2026-11-20).\n" in page
