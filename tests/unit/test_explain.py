"""Which constraint is named, in which words, and what is offered instead; on metadata that was read off real wheels.

metadata/ has releases, names of wheels, Requires-Python and the Requires-Dist that count here, as the index had them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder import cells, digest, explain, facts, gpu, host, matrix, runson, strict_yaml
from builder.cells import Cell
from builder.cli import explain as command
from builder.cli.context import Context
from builder.cudaof import Finder
from builder.errors import BuilderError, FetchError, RefusedError, RegistryError, UsageError, VerifyError
from builder.explain import Explanation
from builder.facts import Build, Facts, Trap
from builder.gpu import Gpu
from builder.host import Host
from builder.matrix import Framework, Matrix
from builder.released import Metadata, Package, Release
from builder.runson import Verdict
from tests.unit.wire import Reply, Sent, Wire, connect

STORED = Path(__file__).parent / "metadata"
IMAGE = f"debian:x@sha256:{'1' * 64}"
MATRIX = f"""\
registry: ""
namespace: org
debian:
  stretch: {{image: "{IMAGE}", glibc: "2.24"}}
  bullseye: {{image: "{IMAGE}", glibc: "2.31"}}
  bookworm: {{image: "{IMAGE}", glibc: "2.36"}}
  trixie: {{image: "{IMAGE}", glibc: "2.41"}}
python:
  "3.9": {{debian: bullseye}}
  "3.10": {{debian: stretch, uv: 3.10.19}}
  "3.11": {{debian: bookworm}}
  "3.13": {{debian: trixie}}
cuda:
  "11.8": {{toolkit: 11.8.0}}
  "12.8": {{toolkit: 12.8.1}}
  "13.2": {{toolkit: 13.2.2}}
  cpu: {{}}
frameworks:
  pytorch:
    short: pt
    image: pt-cuda
    package: torch
    versions:
      "2.15": {{release: 2.15.0, cuda: ["13.2"], python: ["3.13", "3.11"]}}
      "2.9": {{release: 2.9.1, cuda: ["12.8"], python: ["3.11", "3.13"]}}
  tensorflow:
    short: tf
    image: tf-cuda
    cpu_image: tf-cpu
    package: tensorflow
    package_on: {{"12": "tensorflow[and-cuda]", cpu: tensorflow-cpu}}
    versions:
      "2.20": {{release: 2.20.0, cuda: ["12.8", cpu], python: ["3.11", "3.13"], constraints: [setuptools<82]}}
      "2.9": {{release: 2.9.3, cuda: ["11.8"], python: ["3.9"], constraints: [numpy<2], components: [cuda11]}}
  jax:
    short: jax
    image: jax-cuda
    cpu_image: jax-cpu
    package: jax
    package_on: {{"12": "jax[cuda12]", "13": "jax[cuda13]"}}
    versions:
      "0.12": {{release: 0.12.0.1, cuda: ["12.8", "13.2", cpu], python: ["3.13"]}}
      "0.10": {{release: 0.10.2, cuda: ["12.8", "13.2", cpu], python: ["3.11"]}}
components:
  base: {{}}
  cuda: {{needs: [base]}}
  cuda11: {{needs: [cuda]}}
  pytorch: {{needs: [cuda]}}
  tensorflow: {{needs: [cuda]}}
  jax: {{needs: [cuda]}}
  jupyter: {{needs: [base]}}
variants:
  plain: []
  jupyter: [jupyter]
exclude:
  - {{cells: "pt-2.15-*-py311-jupyter", reason: "made up: nobody wants it"}}
"""


class Stored:
    """The files in metadata/ as an index."""

    def package(self, name: str) -> Package:
        releases = [
            Release(
                version=Version(version),
                wheels=tuple(told.get("wheels", ())),
                requires_python=told.get("requires_python", ""),
                is_yanked=told.get("is_yanked", False),
            )
            for version, told in _read(name).get("releases", {}).items()
        ]
        return Package(name=name, releases=tuple(releases))

    def metadata(self, name: str, version: Version) -> Metadata:
        told = _read(name)["metadata"][str(version)]
        return Metadata(name=name, version=str(version), requires=tuple(told["requires"]), extras=tuple(told["extras"]))


@cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    path = STORED / f"{name}.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


@cache
def made() -> tuple[Matrix, tuple[Cell, ...]]:
    found = matrix.check(strict_yaml.parse(MATRIX.encode(), "matrix.yaml"))
    return found, cells.expand(found)


def known() -> Facts:
    build = Build(cuda="11.2", architectures=["sm_70"], source="made up")
    return facts.load().model_copy(update={"builds": {"tensorflow": {"2.9.3": build}}})


def told(text: str, resolve: Callable[[Matrix, Cell], str] = lambda *_: "") -> Explanation:
    found, listed = made()
    return explain.explain(found, listed, Stored(), known(), explain.parse(found, text), resolve)


def near(text: str) -> list[str]:
    return [str(one) for one in told(text).near]


RUNTIME_12 = "nvidia-cuda-runtime-cu12==12.8.90, which is CUDA 12.8"
REFUSALS = {
    "pt-2.99-cu128-py311": "torch has no release of 2.99 on the index: nearest are 2.15, 2.14, 2.11; the newest stable "
    "one is 2.15.0",
    "pt-99.0-cu132-py311": "torch has no release of 99.0 on the index: nearest are 2.15, 2.14, 2.11; the newest stable "
    "one is 2.15.0",
    "pt-0.9-cu132-py311": "torch has no release of 0.9 on the index: nearest are 2.0, 2.8, 2.9; the newest stable one "
    "is 2.15.0",
    "pt-2.9.7-cu128-py311": "torch has no release 2.9.7; of 2.9 it has 2.9.0, 2.9.1",
    "tf-2.22-cu128-py313": "tensorflow 2.22 has no release that an installer would pick, only pre-releases or yanked "
    "ones: 2.22.0rc0",
    "jax-0.4.32-cu128-py311": "jax 0.4.32 has no release that an installer would pick, only pre-releases or yanked "
    "ones: 0.4.32 (yanked)",
    "pt-2.9-cu128-py39": "torch 2.9.1 has no wheel for Python 3.9: its wheels are for Python 3.10 to 3.14 "
    "(Requires-Python: >=3.10)",
    "jax-0.12-cu128-py311": "jax 0.12.0.1 is not for Python 3.11 (Requires-Python: >=3.12)",
    "jax-0.4.30-cu128-py313": "jaxlib 0.4.30 has no wheel for Python 3.13: its wheels are for Python 3.9 to 3.12 "
    "(Requires-Python: >=3.9)",
    "pt-2.9-cu128-py310": "the wheel of torch 2.9.1 is built for manylinux_2_28_x86_64, and Debian stretch has only "
    "glibc 2.24",
    "pt-2.15-cu128-py313": "torch 2.15.0 requires cuda-toolkit==13.2.2, which is CUDA 13.2, not 12.8",
    "pt-2.9-cu126-py311": f"torch 2.9.1 requires {RUNTIME_12}, not 12.6",
    "tf-2.20-cu124-py311": "tensorflow 2.20.0 requires nvidia-cuda-runtime-cu12<13.0,>=12.5.82, which is CUDA 12.5 to "
    "12.9, not 12.4",
    "tf-2.20-cu132-py313": "tensorflow 2.20.0 has CUDA only by its extra and-cuda: it requires "
    "nvidia-cuda-runtime-cu12<13.0,>=12.5.82, which is CUDA 12.5 to 12.9, not 13.2",
    "jax-0.12-cu118-py313": "jax 0.12.0.1 has CUDA only by its extra cuda: jax-cuda12-plugin 0.12.0.1 requires "
    "nvidia-cuda-runtime-cu12>=12.1.105, which is CUDA 12.1 to 12.9, not 11.8",
    "jax-0.4.30-cu132-py311": "jax 0.4.30 has no extra cuda13 (it has cuda, cuda12, cuda12-local, cuda12-pip): an "
    "installer only warns, and installs it for the CPU alone",
    "jax-0.7.1-cu130-py311": "jax 0.7.1 requires jax-cuda13-plugin[with-cuda]<=0.7.1,>=0.7.1, of which the index has "
    "no release",
    "pt-2.9-cpu-py311": "there is no wheel of torch 2.9.1 for the cpu on the index: the one for Linux is a CUDA build, "
    f"it requires {RUNTIME_12}",
    "tf-2.14-cpu-py311": "no wheel for the cpu on the index: tensorflow-cpu has no release 2.14.1",
    "tf-2.14-cu118-py311": "tensorflow 2.14.1 has CUDA 11.8 only by its extra and-cuda, which matrix.yaml does not ask "
    'for: set frameworks.tensorflow.package_on."11" to tensorflow[and-cuda]',
    "tf-2.9-cu132-py39": "tensorflow 2.9.3 names no CUDA wheels in its metadata, and was compiled for CUDA 11.2 "
    "(builder/facts.yaml), which 13.2 is no later minor version of",
    "tf-2.9-cu111-py39": "tensorflow 2.9.3 names no CUDA wheels in its metadata, and was compiled for CUDA 11.2 "
    "(builder/facts.yaml), which 11.1 is no later minor version of",
    "pt-2.9-cu128-py312": "no Debian release of matrix.yaml has Python 3.12 (it has 3.9 on bullseye, 3.10 on stretch, "
    '3.11 on bookworm, 3.13 on trixie); under `python`, "3.12": {debian: trixie, uv: <full version>} would take it '
    "from uv",
    "pt-2.15-cu132-py311-jupyter": "matrix.yaml excludes it: made up: nobody wants it",
}


@pytest.mark.parametrize("text", REFUSALS)
def test_the_constraint_that_fails(text: str) -> None:
    found = told(text)
    assert not found.works
    assert found.because == (REFUSALS[text],)
    assert found.lines[0] == f"{text} does not work: {REFUSALS[text]}"


def test_python_and_cuda_are_told_together() -> None:
    assert told("pt-2.9-cu130-py39").lines == [
        f"pt-2.9-cu130-py39 does not work: {REFUSALS['pt-2.9-cu128-py39']}",
        f"torch 2.9.1 requires {RUNTIME_12}, not 13.0",
        "nearest that work: pt-2.9-cu128-py311 (CUDA 12.8, Python 3.11); pt-2.9-cu128-py313 (CUDA 12.8, Python 3.13)",
    ]


@pytest.mark.parametrize("cell", made()[1], ids=lambda cell: cell.id)
def test_every_cell_of_the_matrix_works(cell: Cell) -> None:
    found = told(cell.id)
    assert found.works, found.lines
    assert found.add == ("it is in matrix.yaml",)


def test_a_full_release_is_the_cell_of_its_line() -> None:
    assert told("pt-2.9.1-cu128-py311").id == "pt-2.9-cu128-py311"
    assert told("jax-0.12.0.1-cpu-py313").lines == [
        "jax-0.12-cpu-py313 works: jax 0.12.0.1 has a wheel for Python 3.13 and asks for no CUDA",
        "it is in matrix.yaml",
    ]


ADDED = {
    "pt-2.8-cu128-py313": [
        '  under frameworks.pytorch.versions: "2.8": {release: 2.8.0, cuda: ["12.8"], python: ["3.13"]}'
    ],
    "pt-2.11-cu130-py313": [
        '  under cuda: "13.0": {toolkit: 13.0.2}',  # its metadata pins 13.0.2, though there is 13.0.3.0
        '  under frameworks.pytorch.versions: "2.11": {release: 2.11.0, cuda: ["13.0"], python: ["3.13"]}',
    ],
    "tf-2.21-cpu-py311": [
        '  under frameworks.tensorflow.versions: "2.21": {release: 2.21.0, cuda: [cpu], python: ["3.11"], '
        "constraints: [setuptools<82]}"
    ],
    "jax-0.10-cu128-py313": ['  under include: - {cell: jax-0.10-cu128-py313, reason: "<why>"}'],
}


@pytest.mark.parametrize("text", ADDED)
def test_what_works_and_is_not_in_the_matrix_comes_with_the_line_to_add(text: str) -> None:
    found = told(text)
    assert found.works, found.lines
    assert list(found.add) == ["it is not in matrix.yaml; add:", *ADDED[text]]


def test_a_line_without_cuda_wheels_takes_the_components_of_its_sibling() -> None:
    older = Build(cuda="11.2", architectures=["sm_70"], source="made up")
    found, listed = made()
    knows = known().model_copy(update={"builds": {"tensorflow": {"2.8.4": older}}})

    class Older(Stored):
        """With a release that is as 2.9.3."""

        def package(self, name: str) -> Package:
            package = super().package(name)
            if name != "tensorflow":
                return package
            older = replace(package.releases[0], version=Version("2.8.4"))
            return replace(package, releases=(older, *package.releases))

        def metadata(self, name: str, version: Version) -> Metadata:
            return replace(super().metadata(name, Version("2.9.3")), version=str(version))

    asked = explain.parse(found, "tf-2.8-cu118-py39")
    assert explain.explain(found, listed, Older(), knows, asked, lambda *_: "").add[1] == (
        '  under frameworks.tensorflow.versions: "2.8": {release: 2.8.4, cuda: ["11.8"], python: ["3.9"], '
        "constraints: [numpy<2], components: [cuda11]}"
    )
    nobody_knows = explain.explain(found, listed, Older(), known(), asked, lambda *_: "")
    assert nobody_knows.because == (
        "tensorflow 2.8.4 names no CUDA wheels in its metadata, and builder/facts.yaml does not say which CUDA it was "
        "compiled for",
    )


def test_the_nearest_differ_in_few_axes_then_in_little() -> None:
    assert near("jax-0.12-cu128-py311") == [
        "jax-0.10-cu128-py311 (release 0.10.2)",
        "jax-0.12-cu128-py313 (Python 3.13)",
        "jax-0.10-cu132-py311 (release 0.10.2, CUDA 13.2)",
    ]
    # The matrix's own before one that is as near and not in it.
    assert near("jax-0.4.30-cu132-py311") == [
        "jax-0.4.30-cu128-py311 (CUDA 12.8; not in the matrix)",
        "jax-0.10-cu132-py311 (release 0.10.2)",
        "jax-0.4.30-cpu-py311 (no CUDA; not in the matrix)",
    ]


def test_the_nearest_have_the_variant_where_it_exists() -> None:
    assert near("pt-2.9-cu128-py39-jupyter") == [
        "pt-2.9-cu128-py311-jupyter (Python 3.11)",
        "pt-2.9-cu128-py313-jupyter (Python 3.13)",
    ]
    assert near("pt-2.15-cu132-py311-jupyter")[:2] == [
        "pt-2.15-cu132-py311 (variant plain)",
        "pt-2.15-cu132-py313-jupyter (Python 3.13)",
    ]


def test_a_line_without_stable_release_is_near_to_the_newest_that_has_one() -> None:
    assert near("tf-2.22-cu128-py313")[:2] == [
        "tf-2.21-cu128-py313 (release 2.21.0; not in the matrix)",
        "tf-2.20-cu128-py313 (release 2.20.0)",
    ]


def test_of_a_lower_major_version_the_newest_line_is_near() -> None:
    found, _ = made()
    few = found.model_copy(update={"frameworks": {**found.frameworks, "pytorch": _without(found, "2.15")}})
    asked = explain.parse(few, "pt-99.0-cu132-py311")
    nearest = explain.explain(few, (), Stored(), known(), asked, lambda *_: "").near
    assert str(nearest[0]) == "pt-2.15-cu132-py311 (release 2.15.0; not in the matrix)"


def _without(found: Matrix, line: str) -> Framework:
    pytorch = found.frameworks["pytorch"]
    return pytorch.model_copy(
        update={"versions": {key: pytorch.versions[key] for key in pytorch.versions if key != line}}
    )


def test_bounds_that_no_metadata_says_are_added_before_it_is_resolved() -> None:
    def resolve(supposed: Matrix, cell: Cell) -> str:
        bounds = supposed.frameworks[cell.framework].versions[cell.line].constraints
        return "" if bounds == ["numpy<2"] else "torch 2.0.1 takes numpy<2, not 2.4.6"

    found = told("pt-2.0-cu117-py311", resolve)
    assert found.works, found.lines
    assert found.add == (
        "it is not in matrix.yaml; add:",
        '  under cuda: "11.7": {}',
        '  under frameworks.pytorch.versions: "2.0": {release: 2.0.1, cuda: ["11.7"], python: ["3.11"], '
        "constraints: [numpy<2]}",
    )


class Named(Stored):
    """With packages that are made up, and requirements of torch 2.8.0 in place of its own."""

    def __init__(self, requires: tuple[str, ...], **others: Metadata) -> None:
        self._requires = requires
        self._others = {one.name: one for one in others.values()}

    def package(self, name: str) -> Package:
        if other := self._others.get(canonicalize_name(name)):
            return Package(name=name, releases=(Release(version=Version(other.version)),))
        return super().package(name)

    def metadata(self, name: str, version: Version) -> Metadata:
        if other := self._others.get(name):
            return other
        found = super().metadata(name, version)
        return replace(found, requires=self._requires) if str(version) == "2.8.0" else found


def of_named(catalogue: Named, traps: list[Trap]) -> Explanation:
    found, listed = made()
    knows = known().model_copy(update={"traps": traps})
    asked = explain.parse(found, "pt-2.8-cu128-py313")
    return explain.explain(found, listed, catalogue, knows, asked, lambda *_: "")


def trap(package: str, affected: str, wants: str) -> Trap:
    return Trap(package=package, affected=affected, other="other", wants=wants, reason="made up", source="made up")


RUNTIME = "nvidia-cuda-runtime-cu12==12.8.90"


def test_bounds_of_what_comes_along_are_added_too_where_they_concern_it() -> None:
    part = Metadata(name="part", version="2.1")
    traps = [trap("part", "<3", ">=1,<2"), trap("part", ">=3", "<4"), trap("torch", "<2.8", "<5"), trap("x", "", "<6")]
    assert of_named(Named((RUNTIME, "Part>=2"), part=part), traps).add[1].endswith(', constraints: ["other>=1,<2"]}')
    assert "constraints" not in of_named(Named((RUNTIME,), part=part), traps).add[1]


ODD = {
    "compares what cannot be compared": 'foo; sys_platform ~= "linux"',
    "knows other variables": 'foo; "x" in extras',
    "is nested": f"foo; {'(' * 600}os_name == 'a'{')' * 600}",
    "has a number of 5000 digits": f"foo; python_version >= '{'9' * 5000}'",
    "has a bound of 5000 digits": f"nvidia-cuda-runtime-cu12=={'9' * 5000}",
    "has an escape sequence": "nvidia-cuda-runtime-cu12===\x1b[31m",
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_requirement_that_nobody_can_read_does_not_count(odd: str) -> None:
    found = of_named(Named((odd, RUNTIME)), [])
    assert found.works
    assert RUNTIME in found.because[0]


def test_plugins_that_ask_for_plugins_without_end() -> None:
    """The metadata of the plugin gives the name of the framework, and asks for the plugin again."""
    again = Metadata(name="torch", version="2.8.0", requires=("torch-cuda12-x",))

    class Endless(Named):
        def package(self, name: str) -> Package:
            if name == "torch-cuda12-x":
                return Package(name=name, releases=(Release(version=Version("1")),))
            return super().package(name)

        def metadata(self, name: str, version: Version) -> Metadata:
            return again if name == "torch-cuda12-x" else super().metadata(name, version)

    found = of_named(Endless(("torch-cuda12-x",)), [])
    assert not found.works
    assert any("names no CUDA wheels in its metadata" in one for one in found.because)


def test_a_name_is_no_expression() -> None:
    class Odd(Named):
        def metadata(self, name: str, version: Version) -> Metadata:
            return replace(super().metadata(name, version), name="torch(")

    assert of_named(Odd((RUNTIME,)), []).works
    asking = of_named(Odd(("foo",)), [])
    assert "names no CUDA wheels" in asking.because[0]


def test_an_extra_whose_cuda_is_not_on_the_index() -> None:
    class Extra(Named):
        def metadata(self, name: str, version: Version) -> Metadata:
            return replace(super().metadata(name, version), extras=("cuda",))

    found = of_named(Extra(("nvidia-cuda-runtime-cu12>=99; extra == 'cuda'",)), [])
    assert found.because[0] == (
        "torch 2.8.0 has CUDA only by its extra cuda: it requires nvidia-cuda-runtime-cu12>=99, of which the index has "
        "no release, not 12.8"
    )


def test_an_index_that_fails_is_no_reason_against_a_combination() -> None:
    def fail(*_: object) -> str:
        raise FetchError("the index is silent")

    with pytest.raises(FetchError):
        told("pt-2.8-cu128-py313", fail)
    with pytest.raises(FetchError):
        told("tf-2.22-cu128-py313", fail)  # for a neighbour


def test_no_neighbour_is_offered_that_does_not_resolve() -> None:
    asked = []

    def refuse(_: Matrix, cell: Cell) -> str:
        asked.append(cell.id)
        return "no"

    found = told("tf-2.22-cu128-py313", refuse)
    assert len(found.near) == 3
    assert all(one.is_listed for one in found.near)
    assert "tf-2.21-cu128-py313" in asked


def test_not_more_than_three_neighbours_are_resolved() -> None:
    asked = []

    def refuse(_: Matrix, cell: Cell) -> str:
        asked.append(cell.id)
        return "no"

    found, _ = made()
    wanted = explain.parse(found, "tf-2.22-cu128-py313")
    refused = explain.explain(found, (), Stored(), known(), wanted, refuse)
    assert refused.lines[-1] == "nearest that work: none of this framework"
    assert len(asked) == 3  # each takes seconds


def test_a_yanked_release_is_not_the_newest() -> None:
    newest = Finder(made()[0], Stored(), known()).newest(Requirement("jax<0.5"))
    assert newest
    assert str(newest.version) == "0.4.30"


def test_the_resolution_has_the_last_word_and_sees_the_matrix_with_the_cell() -> None:
    seen: dict[str, Matrix] = {}

    def refuse(supposed: Matrix, cell: Cell) -> str:
        seen[cell.id] = supposed
        return UV

    found = told("pt-2.11-cu130-py313", refuse)
    assert found.because == (
        "tensorflow[and-cuda] 2.21.0 requires nvidia-nccl-cu12>=2.27.7,<3.0, and torch 2.9.1 requires "
        "nvidia-nccl-cu12==2.27.5;",
        "no version of nvidia-nccl-cu12 is both",
    )
    supposed = seen["pt-2.11-cu130-py313"]
    assert supposed.cuda["13.0"].toolkit == "13.0.2"
    assert supposed.frameworks["pytorch"].versions["2.11"].release == "2.11.0"
    assert "13.0" not in made()[0].cuda


UV = """\
pt-x: cannot be resolved to wheels
  error: No solution found when resolving dependencies
  cause: Because tensorflow[and-cuda]==2.21.0 depends on nvidia-nccl-cu12>=2.27.7,<3.0 and torch==2.9.1 depends on \
nvidia-nccl-cu12{platform_machine == 'x86_64' and sys_platform == 'linux'}==2.27.5, we can conclude that torch==2.9.1 \
and tensorflow[and-cuda]==2.21.0 are incompatible.
  And because you require torch==2.9.1 and tensorflow[and-cuda]==2.21.0, we can conclude that your requirements are \
unsatisfiable."""
UV_PINNED = """\
error: No solution found when resolving dependencies
  cause: Because torch==2.9.1 depends on nvidia-cuda-runtime-cu12{platform_machine == 'x86_64'}==12.8.90 and you \
require torch==2.9.1, we can conclude that you require nvidia-cuda-runtime-cu12==12.8.90.
  And because you require nvidia-cuda-runtime-cu12==12.6.77, we can conclude that your requirements are \
unsatisfiable."""


def test_uv_s_reason_in_two_lines() -> None:
    assert explain.shorten(UV_PINNED) == [
        "torch 2.9.1 requires nvidia-cuda-runtime-cu12==12.8.90, and matrix.yaml requires "
        "nvidia-cuda-runtime-cu12==12.6.77;",
        "no version of nvidia-cuda-runtime-cu12 is both",
    ]
    only = "Because only ember<2 is available and you require ember>=2"
    assert explain.shorten(f"error: x\n  cause: {only}, we can conclude that it is so.") == [only]
    trap = "tensorboard 2.20.0 takes setuptools<82, not 84.0.0: it imports pkg_resources"
    assert explain.shorten(trap) == [trap]
    assert [len(line) for line in explain.shorten("Because " + "x" * 900)] == [300]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pt", "'pt' is no combination"),
        ("pt-2.9-cu128-py311-", "is no combination"),
        ("pt-2.9-cu128-py311\n", "is no combination"),
        ("pt-2.9rc1-cu128-py311", "is no combination"),
        ("xx-2.9-cu128-py311", "no framework is called 'xx'"),
        ("pt-2.15-cu13-py311", "cu13 names no minor version of CUDA"),
        ("pt-2.9-cu128-py311-jupiter", "no variant 'jupiter'; did you mean 'jupyter'?"),
    ],
)
def test_what_is_no_combination(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        explain.parse(made()[0], text)
    assert said in str(refused.value)
    assert refused.value.hint or "did you mean" in said


@pytest.mark.parametrize(("tag", "cuda"), [("cu118", "11.8"), ("cu1210", "12.10"), ("cu92", "9.2"), ("cpu", "cpu")])
def test_cuda_tags(tag: str, cuda: str) -> None:
    assert explain.parse(made()[0], f"pt-2.9-{tag}-py310").cuda == cuda


@pytest.mark.parametrize(("tag", "hint"), [("cu13", "Write cu132 for 13.2."), ("cu14", "Write cu140 for 14.0.")])
def test_a_major_version_of_cuda_is_not_enough(tag: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        explain.parse(made()[0], f"pt-2.15-{tag}-py311")
    assert refused.value.hint == hint


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, on the matrix above, with the stored index and a resolution that refuses nothing."""
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    monkeypatch.setattr(command, "Index", lambda _: Stored())
    monkeypatch.setattr(host, "read", Host)
    monkeypatch.setattr(command, "_resolution", lambda *_: lambda *_: "")
    return lambda *arguments: CliRunner().invoke(command.explain_command, arguments, obj=Context(root=tmp_path))


def test_command_says_what_works(run: Callable[..., Result]) -> None:
    done = run("pt-2.9-cu128-py311")
    assert done.exit_code == 0
    assert done.output == (
        f"pt-2.9-cu128-py311 works: torch 2.9.1 has a wheel for Python 3.11 and requires {RUNTIME_12}\n"
        "it is in matrix.yaml\n"
    )


def test_command_ends_with_an_error_of_its_own_where_it_refuses(run: Callable[..., Result]) -> None:
    done = run("pt-2.9-cu130-py39")
    assert isinstance(done.exception, RefusedError)
    assert done.exception.exit_code not in (0, 1, UsageError.exit_code)
    assert len(done.output.splitlines()) == 3


@pytest.mark.parametrize(
    "arguments", [(), ("pt-2.9-cu128-py311", "pt-2.9-cu128-py313"), ("--driver", "570", "pt-2.9-cu128-py311")]
)
def test_command_wants_one_combination_or_a_gpu(run: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    assert isinstance(run(*arguments).exception, UsageError)


def test_cells_on_a_gpu(run: Callable[..., Result]) -> None:
    done = run("--gpu", "RTX 5090", "--driver", "580.65.06", "pt-2.9-cu128-py311", "tf-2.20-cpu-py313*")
    head, *lines = done.output.splitlines()
    assert done.exit_code == 0
    assert head == "GeForce RTX 5090 (compute capability 12.0), driver 580.65.06:"
    assert [line.split(":")[0].split(maxsplit=1) for line in lines] == [
        ["runs", "pt-2.9-cu128-py311"],
        ["runs", "tf-2.20-cpu-py313{,-jupyter}"],
    ]


def test_a_named_cell_that_does_not_run_is_refused_and_one_of_all_is_not(run: Callable[..., Result]) -> None:
    old = ("--gpu", "RTX 5090", "--driver", "550.54")
    assert isinstance(run(*old, "pt-2.9-cu128-py311", "tf-2.20-cpu-py313").exception, RefusedError)
    everything = run(*old)
    assert everything.exit_code == 0  # those for the cpu run
    refused = [line for line in everything.output.splitlines() if "pt-2.9-cu128-py311" in line]
    assert len(refused) == 1
    assert "does not run" in refused[0]
    assert "driver 550.54 is too old" in refused[0]


def test_gpus_of_this_machine(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Gpu(name="NVIDIA H200", capability="9.0", memory=1)
    monkeypatch.setattr(gpu, "read", lambda: ("580.65.06", (h200, h200)))
    done = run("--gpu", "this", "pt-2.9-cu128-py311")
    assert done.output.splitlines() == [
        "NVIDIA H200 (compute capability 9.0), driver 580.65.06:",
        "  runs          pt-2.9-cu128-py311",
    ]
    monkeypatch.setattr(gpu, "read", lambda: ("", ()))
    assert isinstance(run("--gpu", "this").exception, UsageError)


CONFIG = json.dumps({"config": {"Labels": {"gpu-images.cuda": "12.8", "gpu-images.driver": "525.60.13"}}}).encode()
MANIFEST = json.dumps({"config": {"digest": digest.of_bytes(CONFIG)}, "layers": []}).encode()
LISTED = json.dumps(
    {
        "manifests": [
            {"digest": "sha256:" + "7" * 64, "platform": {"architecture": "arm64", "os": "linux"}},
            {"digest": "sha256:" + "8" * 64, "platform": {"architecture": "amd64", "os": "windows"}},
            {"digest": digest.of_bytes(MANIFEST), "platform": {"architecture": "amd64", "os": "linux"}},
        ]
    }
).encode()
KIND = "application/vnd.oci.image"


def serve(monkeypatch: pytest.MonkeyPatch, first: Reply, config: bytes = CONFIG) -> Wire:
    def answer(sent: Sent) -> Reply:
        if "/blobs/" in sent.path:
            return Reply(body=config)
        if sent.path.endswith(digest.of_bytes(MANIFEST)):
            return Reply(body=MANIFEST, headers={"Content-Type": f"{KIND}.manifest.v1+json"})
        return first

    return Wire.lay(monkeypatch, answer)


@pytest.mark.parametrize(("content", "kind"), [(MANIFEST, "manifest"), (LISTED, "index")])
def test_labels_of_an_image_in_a_registry(monkeypatch: pytest.MonkeyPatch, content: bytes, kind: str) -> None:
    wire = serve(monkeypatch, Reply(body=content, headers={"Content-Type": f"{KIND}.{kind}.v1+json"}))
    assert command.labels_of(connect(), "2.9") == {"gpu-images.cuda": "12.8", "gpu-images.driver": "525.60.13"}
    assert [one for one in wire.said if "/blobs/" in one] == [f"GET /v2/a/b/blobs/{digest.of_bytes(CONFIG)}"]


def test_an_image_in_a_registry_is_judged_by_its_labels(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, Reply(body=MANIFEST, headers={"Content-Type": f"{KIND}.manifest.v1+json"}))
    done = run("--gpu", "H100", "--driver", "470.82", "registry.example.test/a/b:2.9")
    assert isinstance(done.exception, RefusedError)
    assert "  does not run  registry.example.test/a/b:2.9: driver 470.82 is too old" in done.output


def test_a_name_with_a_registry_is_asked_there_whatever_the_matrix_has(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "matrix.yaml").write_text(MATRIX.replace('registry: ""', "registry: registry.example.test"))
    old = json.dumps({"config": {"Labels": {"gpu-images.cuda": "13.2", "gpu-images.driver": "580.65.06"}}}).encode()
    manifest = json.dumps({"config": {"digest": digest.of_bytes(old)}, "layers": []}).encode()
    wire = serve(monkeypatch, Reply(body=manifest, headers={"Content-Type": f"{KIND}.manifest.v1+json"}), old)
    name = "registry.example.test/org/pt-cuda:2.9"
    done = run("--gpu", "H100", "--driver", "570.82", name)
    assert f"  does not run  {name}: driver 570.82 is too old: CUDA 13.2" in done.output
    assert "GET /v2/org/pt-cuda/manifests/2.9" in wire.said


@pytest.mark.parametrize("name", ["org/pt-cuda:2.9", "pt-cuda:2.9.1-cu128-py311"])
def test_a_short_tag_is_a_cell_of_the_matrix(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "matrix.yaml").write_text(MATRIX.replace('registry: ""', "registry: registry.example.test"))
    wire = serve(monkeypatch, Reply(status=404))
    done = run("--gpu", "H100", "--driver", "580.82", name)
    assert done.output.splitlines()[1:] == [f"  runs          {name} (pt-2.9-cu128-py311)"]
    assert not wire.seen


def test_of_two_drivers_that_are_wanted_the_newer_one_is_told(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = (
        "driver 450 is too old: CUDA 12.8 takes 525.60.13 or newer",
        "it has neither machine code nor PTX",
        "driver 450 is too old: its PTX, made by CUDA 12.8, takes 1000.1 or newer",
        "driver 450 is too old: GeForce RTX 5090 (12.0) takes 570.26 or newer",
    )
    monkeypatch.setattr(runson, "judge", lambda *_: Verdict(runs=False, reasons=reasons))
    told = run("--gpu", "RTX 5090", "--driver", "450", "pt-2.9-cu128-py311").output.splitlines()[1]
    assert told.endswith(f"pt-2.9-cu128-py311: {reasons[1]}; {reasons[2]}")


def test_drivers_as_they_are_judged(run: Callable[..., Result]) -> None:
    """The words of the verdict are those that are looked for."""
    done = run("--gpu", "RTX 5090", "--driver", "450.80", "pt-2.9-cu128-py311")
    assert done.output.count("is too old") == 1


HOSTILE = ("../../../admin?x=", "sha256:" + "7" * 63, "sha256:" + "7" * 64 + "\n", "sha512:" + "7" * 64, None, 7)


@pytest.mark.parametrize("told", HOSTILE)
def test_what_is_no_digest_is_never_asked_for(monkeypatch: pytest.MonkeyPatch, told: object) -> None:
    listed = {"manifests": [{"digest": told, "platform": {"architecture": "amd64", "os": "linux"}}]}
    for content, kind in ((listed, "index"), ({"config": {"digest": told}}, "manifest")):
        first = Reply(body=json.dumps(content).encode(), headers={"Content-Type": f"{KIND}.{kind}.v1+json"})
        wire = serve(monkeypatch, first)
        with pytest.raises(VerifyError):
            command.labels_of(connect(), "2.9")
        assert wire.said == ["GET /v2/a/b/manifests/2.9"]


def test_other_bytes_than_the_digest_says(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, Reply(body=LISTED, headers={"Content-Type": f"{KIND}.index.v1+json"}), CONFIG + b" ")
    with pytest.raises(RegistryError, match="other bytes than the digest says"):
        command.labels_of(connect(), "2.9")


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"config": {"digest": 7}}', b'{"config": []}'])
def test_what_is_no_image_ends_in_an_error_of_ours(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    serve(monkeypatch, Reply(body=content, headers={"Content-Type": f"{KIND}.manifest.v1+json"}))
    with pytest.raises(BuilderError):
        command.labels_of(connect(), "2.9")
    serve(monkeypatch, Reply(status=404))
    with pytest.raises(VerifyError, match="has no 2"):
        command.labels_of(connect(), "2.9")
