"""Which constraint is named, and what works nearby; on releases of real packages and reasons that uv reported.

metadata/ has releases, names of wheels and Requires-Python, as on the index.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from packaging.version import Version

from builder.cli import explain as command
from builder.cli.context import Context
from builder.common import strict_yaml
from builder.common.errors import FetchError, RefusedError, UsageError
from builder.compat import explain, gpus
from builder.compat.explain import Explainer, Explanation, Resolve
from builder.compat.gpus import Gpu
from builder.index import host
from builder.index.host import Host
from builder.index.releases import Index, ListedPackage, ListedRelease
from builder.lock.resolve import Resolver
from builder.matrix import cells, facts, reader
from builder.matrix.cells import Cell
from builder.matrix.schema import FrameworkVersion, Matrix
from tests.paths import UNIT

STORED = UNIT / "metadata"
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


class Stored(Index):
    """The files in metadata/ as an index."""

    def __init__(self) -> None:
        """It has no settings."""

    def package(self, name: str, index: str = "") -> ListedPackage:
        releases = [
            ListedRelease(
                version=Version(version),
                wheels=tuple(release.get("wheels", ())),
                requires_python=release.get("requires_python", ""),
                is_yanked=release.get("is_yanked", False),
            )
            for version, release in _read(name).get("releases", {}).items()
        ]
        return ListedPackage(name=name, releases=tuple(releases))


@cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    path = STORED / f"{name}.json"
    content: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return content


CHECKED = reader.read_matrix(strict_yaml.parse_yaml(MATRIX.encode(), "matrix.yaml"))
CELLS = cells.expand(CHECKED)
FACTS = facts.load_facts()


def resolves(*_: object) -> str:
    """uv finds no conflict."""
    return ""


def conflicts(*_: object) -> str:
    return "no"


def explained(text: str, resolve: Resolve = resolves, **changes: Any) -> Explanation:
    explainer = Explainer(
        matrix=CHECKED, known=CELLS, catalogue=Stored(), facts=FACTS, resolve=resolve,
        locked={cell.id for cell in CELLS},
    )  # fmt: skip
    explainer = replace(explainer, **changes)
    return explainer.explain(explain.cell_of_combination(explainer.matrix, text))


# What uv does not report.
FAULTS = {
    "pt-2.99-cu128-py311": "torch has no release 2.99 on the index; the newest is 2.15.0",
    "tf-2.22.0rc5-cu128-py313": "tensorflow has no release 2.22.0rc5 on the index; the newest is 2.21.0",
    "tf-2.22-cu128-py313": "tensorflow 2.22 has only pre-releases or yanked releases: 2.22.0rc0",
    "jax-0.4.32-cu128-py311": "jax 0.4.32 has only pre-releases or yanked releases: 0.4.32 (yanked)",
    "pt-2.15-cu132-py311-jupyter": "excluded by matrix.yaml:56:5: made up: nobody wants it",
}


@pytest.mark.parametrize("text", FAULTS)
def test_the_constraint_that_fails(text: str) -> None:
    explanation = explained(text)
    assert not explanation.works
    assert explanation.because == FAULTS[text]
    assert explanation.lines[0] == f"{text} does not work: {FAULTS[text]}"


class OnArm(Stored):
    """The wheels of Stored, for both architectures."""

    def package(self, name: str, index: str = "") -> ListedPackage:
        package = super().package(name, index)
        releases = tuple(
            replace(each, wheels=(*each.wheels, *(wheel.replace("x86_64", "aarch64") for wheel in each.wheels)))
            for each in package.releases
        )
        return replace(package, releases=releases)


def test_a_line_of_matrix_yaml() -> None:
    entry = FrameworkVersion(
        release="2.9.1", cuda=["12.8"], python=["3.11"], packages=["a[b,c]==1", "d<2,>1"],
        arch={"12.8": ["amd64"], "*": ["arm64"]},
    )  # fmt: skip
    line = explain.matrix_line("2.9", entry)
    assert FrameworkVersion.model_validate(strict_yaml.parse_yaml(line.encode(), "x").data["2.9"]) == entry
    plain = FrameworkVersion(release="2.9.1", cuda=["12.8"], python=["3.11"])
    assert explain.matrix_line("2.9", plain) == "\"2.9\": {release: 2.9.1, cuda: ['12.8'], python: ['3.11']}"


def test_a_release_without_a_wheel_for_the_cell() -> None:
    """manylinux_2_28, on a Debian with glibc 2.24; a Python that it is not for; a package without that release."""
    for text, package, place in (
        ("pt-2.9-cu128-py310", "torch 2.9.1", "Python 3.10 on x86_64 and Debian stretch (glibc 2.24)"),
        ("pt-2.9-cu128-py39", "torch 2.9.1", "Python 3.9 on x86_64 and Debian bullseye (glibc 2.31)"),
        ("tf-2.14-cpu-py311", "tensorflow-cpu 2.14.1", "Python 3.11 on x86_64 and Debian bookworm (glibc 2.36)"),
    ):
        assert explained(text).because == f"{package} has no wheel on the index for {place}"


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_every_cell_of_the_matrix_works(cell: Cell) -> None:
    explanation = explained(cell.id)
    assert explanation.works, explanation.lines
    assert explanation.add == ("it is in matrix.yaml",)


def test_a_full_release_is_the_cell_of_its_line() -> None:
    assert explained("pt-2.9.1-cu128-py311").id == "pt-2.9-cu128-py311"
    assert explained("jax-0.12.0.1-cpu-py313").lines == [
        "jax-0.12-cpu-py313 works: its packages resolve for Python 3.13 and the CPU",
        "it is in matrix.yaml",
    ]


ADDED = {
    "pt-2.8-cu128-py313": [
        "  under frameworks.pytorch.versions: \"2.8\": {release: 2.8.0, cuda: ['12.8'], python: ['3.13']}"
    ],
    "pt-2.11-cu130-py313": [
        '  under cuda: "13.0": {toolkit: 13.0.3.0}',  # its metadata pins 13.0.2, which the toolkit does not override
        "  under frameworks.pytorch.versions: \"2.11\": {release: 2.11.0, cuda: ['13.0'], python: ['3.13']}",
    ],
    "tf-2.21-cpu-py311": [
        "  under frameworks.tensorflow.versions: \"2.21\": {release: 2.21.0, cuda: [cpu], python: ['3.11'], "
        "constraints: [setuptools<82]}"
    ],
    "jax-0.10-cu128-py313": ['  under include: - {cell: jax-0.10-cu128-py313, reason: "<why it is needed>"}'],
    "pt-2.9-cu128-py312": [
        '  under python: "3.12": {debian: trixie, uv: <the full version>}',
        '  under include: - {cell: pt-2.9-cu128-py312, reason: "<why it is needed>"}',
    ],
}


@pytest.mark.parametrize("text", ADDED)
def test_a_cell_that_works_is_shown_with_the_lines_to_add(text: str) -> None:
    explanation = explained(text)
    assert explanation.works, explanation.lines
    assert list(explanation.add) == ["no image of it was built; add to matrix.yaml:", *ADDED[text]]


def test_a_line_without_cuda_wheels_has_the_components_of_its_sibling() -> None:
    class Older(Stored):
        """With a release like 2.9.3."""

        def package(self, name: str, index: str = "") -> ListedPackage:
            package = super().package(name, index)
            if name != "tensorflow":
                return package
            older = replace(package.releases[0], version=Version("2.8.4"))
            return replace(package, releases=(older, *package.releases))

    assert explained("tf-2.8-cu118-py39", catalogue=Older()).add[1] == (
        "  under frameworks.tensorflow.versions: \"2.8\": {release: 2.8.4, cuda: ['11.8'], python: ['3.9'], "
        "constraints: [numpy<2], components: [cuda11]}"
    )


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("jax-0.12-cu128-py311", "jax-0.12-cu128-py313, jax-0.12-cu132-py313, jax-0.12-cpu-py313"),
        (
            "pt-2.9-cu128-py39-jupyter",
            "pt-2.9-cu128-py311-jupyter, pt-2.9-cu128-py313-jupyter, pt-2.15-cu132-py313-jupyter",
        ),
        ("tf-2.22-cu128-py313", "tf-2.20-cu128-py313, tf-2.20-cu128-py311, tf-2.20-cpu-py313"),
        ("pt-2.9-cu128-py311-arm64", "no cell of this framework has a current lock"),
    ],
)
def test_the_nearest_of_the_matrix_have_the_same_variant_then_line_then_cuda(text: str, near: str) -> None:
    explanation = explained(text, conflicts, catalogue=OnArm() if "arm64" in text else Stored())
    assert explanation.lines[-1] == f"nearest that work: {near}"


def test_a_cell_without_a_current_lock_is_no_proposal() -> None:
    """After an edit of matrix.yaml, it may fail for the same reason."""
    locked = {"pt-2.9-cu128-py313"}
    assert explained("pt-2.9-cu124-py311", conflicts, locked=locked).near == ("pt-2.9-cu128-py313",)
    assert explained("pt-2.9-cu128-py311", conflicts, locked=locked).because == "no"
    assert explained("pt-2.9-cu128-py313", conflicts, locked=locked).works


def test_bounds_of_facts_yaml_are_added_before_resolving() -> None:
    def resolve(supposed: Matrix, cell: Cell) -> str:
        bounds = supposed.frameworks[cell.framework].versions[cell.line].constraints
        return "" if bounds == ["numpy<2"] else "torch 2.0.1 needs numpy<2, not 2.4.6"

    explanation = explained("pt-2.0-cu117-py311", resolve)
    assert explanation.works, explanation.lines
    assert explanation.add == (
        "no image of it was built; add to matrix.yaml:",
        '  under cuda: "11.7": {}',
        "  under frameworks.pytorch.versions: \"2.0\": {release: 2.0.1, cuda: ['11.7'], python: ['3.11'], "
        "constraints: [numpy<2]}",
    )


def test_an_index_that_fails_is_no_reason_against_a_combination() -> None:
    def fail(*_: object) -> str:
        raise FetchError("the index timed out")

    with pytest.raises(FetchError):
        explained("pt-2.8-cu128-py313", fail)


def test_uv_resolves_the_matrix_with_the_cell() -> None:
    """With its release, its CUDA and its Python, which the matrix does not have."""
    seen: dict[str, Matrix] = {}

    def refuse(supposed: Matrix, cell: Cell) -> str:
        seen[cell.id] = supposed
        return "Because no"

    for text in ("pt-2.11-cu130-py313", "pt-2.9-cu128-py312"):
        assert explained(text, refuse).because == "no"
    supposed = seen["pt-2.11-cu130-py313"]
    assert supposed.cuda["13.0"].toolkit == "13.0.3.0"
    assert supposed.frameworks["pytorch"].versions["2.11"].release == "2.11.0"
    assert seen["pt-2.9-cu128-py312"].python["3.12"].debian == "trixie"
    assert "13.0" not in CHECKED.cuda


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (
            "error: x\n  cause: Because tensorflow[and-cuda]==2.21.0 depends on `nccl`>=2.27.7 and torch==2.9.1 "
            "depends on nccl==2.27.5, we can conclude that they are incompatible.\n  And because you require",
            "tensorflow[and-cuda]==2.21.0 depends on nccl>=2.27.7 and torch==2.9.1 depends on nccl==2.27.5",
        ),
        ("Because only ember<2 is available, we can conclude that it is so.\n  hint: x", "only ember<2 is available"),
        (
            "tensorboard 2.20.0 needs setuptools<82, not 84.0.0: x",
            "tensorboard 2.20.0 needs setuptools<82, not 84.0.0: x",
        ),
        (
            "matrix.yaml: x causes it; without it, this resolves. Because y",
            "matrix.yaml: x causes it; without it, this resolves. y",
        ),
        ("Because " + "x" * 900, "x" * 297 + "..."),
        ("", ""),
        ("2 faults in the wheels of x\nx: needs CUDA 13\n  -> Correct it.\nx: a is for CUDA 13", "x: needs CUDA 13"),
    ],
)
def test_the_reason_of_uv_in_a_sentence(reason: str, sentence: str) -> None:
    assert explain.summarize_reason(reason) == sentence


def test_a_pre_release_works_if_it_is_named() -> None:
    explanation = explained("tf-2.22.0rc0-cu128-py313")
    assert explanation.works, explanation.lines
    # The key is a version that matrix.yaml allows.
    line = explanation.add[-1].strip().removeprefix("under frameworks.tensorflow.versions: ")
    assert line.startswith('"2.22.0": {release: 2.22.0rc0, ')
    versions = f'versions:\n      {line}\n      "2.20": {{release: 2.20.0'
    with_it = MATRIX.replace('versions:\n      "2.20": {release: 2.20.0', versions)
    matrix = reader.read_matrix(strict_yaml.parse_yaml(with_it.encode(), "matrix.yaml"))
    listed = explained("tf-2.22.0-cu128-py313", matrix=matrix, known=cells.expand(matrix))
    assert listed.lines[1:] == ["it is in matrix.yaml"], listed.lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pt-2.15", "use FRAMEWORK-VERSION-CUDA-PYTHON[-VARIANT][-arm64]\nFor example pt-2.15-cu132-py311, "),
        ("pt-99-cu130-py313", "'pt-99-cu130-py313': invalid version '99'; use FRAMEWORK"),
        ("pt-2.9-cu13-py311", "invalid CUDA 'cu13'; "),
        ("pt-2.9-cu13-py311", "Write CUDA with its minor version, as cu130."),
        ("vllm", "Frameworks: pt (pytorch), tf (tensorflow), jax (jax). For a package, use `builder add`."),
        ("pt-2.9-cu128-py311-", "invalid combination"),
        ("pt-2.9-cu128-py311\n", "invalid combination"),
        ("pt-2.9-rc1-cu128-py311", "invalid combination"),
        ("pt-2.9.1+cu128-cu128-py311", "invalid combination"),
        ("xx-2.9-cu128-py311", "unknown framework 'xx'"),
        ("pt-2.9-cu128-py311-jupiter", "unknown variant 'jupiter'; did you mean 'jupyter'?"),
    ],
)
def test_an_invalid_combination(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        explain.cell_of_combination(CHECKED, text)
    assert message in f"{refused.value}\n{refused.value.hint}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command, with the matrix above, the stored index and a resolver that finds no conflict."""
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    monkeypatch.setattr(command, "Index", lambda _: Stored())
    monkeypatch.setattr(host, "read_host", Host)
    monkeypatch.setattr(Resolver, "reason", resolves)

    def call(*arguments: str, today: date = date(2026, 11, 22)) -> Result:
        return CliRunner().invoke(command.explain_command, list(arguments), obj=Context(root=tmp_path, today=today))

    return call


def test_a_combination_that_works(run: Callable[..., Result]) -> None:
    result = run("pt-2.9-cu128-py311")
    assert result.exit_code == 0
    assert result.stdout == (
        "pt-2.9-cu128-py311 works: its packages resolve for Python 3.11 and CUDA 12.8\nit is in matrix.yaml\n"
        'support of Debian bookworm ends on 2028-06-30 (Debian Wiki, "LTS"; Debian, "Debian Releases"; security team '
        "until 2026-06-10, then LTS)\n"
    )
    assert result.stderr == "pt-2.9-cu128-py311: resolving\n", "its lock is missing"


def test_a_damaged_lock_of_another_group_does_not_matter(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/pt-2.9-cu128-py313.json").write_text("{}")
    assert run("pt-2.9-cu128-py311").exit_code == 0


def test_ends_of_support_are_shown_with_their_source(run: Callable[..., Result], tmp_path: Path) -> None:
    """And with the reason to release the image anyway."""
    end = "support of Debian bookworm ends on 2028-06-30"
    source = '(Debian Wiki, "LTS"; Debian, "Debian Releases"; security team until 2026-06-10, then LTS)'
    assert run("pt-2.9-cu128-py311", today=date(2028, 6, 30)).stdout.endswith(f"{end}, today {source}\n")
    reason = 'glibc: "2.36", after_support: "one course needs it"'
    (tmp_path / "matrix.yaml").write_text(MATRIX.replace('glibc: "2.36"', reason))
    after = run("pt-2.9-cu128-py311", today=date(2028, 7, 1)).stdout
    ended = "support of Debian bookworm ended on 2028-06-30: no security updates since"
    assert after.endswith(f"{ended} {source}; released anyway: one course needs it\n")


def test_a_python_whose_images_were_not_built_yet(run: Callable[..., Result], tmp_path: Path) -> None:
    """Also in a cell that is not in the matrix."""
    edited = MATRIX.replace('"3.11": {debian: bookworm', '"3.11": {debian: bookworm, not_built: "nobody can fetch it"')
    (tmp_path / "matrix.yaml").write_text(edited)
    for text in ("pt-2.9-cu128-py311", "pt-2.8-cu128-py311"):
        assert run(text).stdout.endswith("\nits images are not in the set `all`: nobody can fetch it\n")
    assert "not in the set" not in run("pt-2.9-cu128-py313").stdout
    matrix = reader.read_matrix(strict_yaml.parse_yaml(edited.encode(), "matrix.yaml"))
    assert explained("pt-2.9-cu124-py311", conflicts, matrix=matrix).near[0] == "pt-2.9-cu128-py313"


def test_a_refusal_has_an_exit_code_of_its_own_and_one_reason(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Resolver, "reason", conflicts)
    result = run("pt-2.9-cu124-py311")
    assert result.exit_code == RefusedError.exit_code
    assert result.stdout.startswith("pt-2.9-cu124-py311 does not work: ")
    assert (len(result.stdout.splitlines()), result.stderr) == (2, "pt-2.9-cu124-py311: resolving\n")


@pytest.mark.parametrize(
    "arguments", [(), ("pt-2.9-cu128-py311", "pt-2.9-cu128-py313"), ("--driver", "570", "pt-2.9-cu128-py311")]
)
def test_one_combination_or_a_gpu_is_required(run: Callable[..., Result], arguments: tuple[str, ...]) -> None:
    assert isinstance(run(*arguments).exception, UsageError)


def test_cells_on_a_gpu(run: Callable[..., Result]) -> None:
    result = run("--gpu", "RTX 5090", "--driver", "580.65.06", "pt-2.9-cu128-py311", "tf-2.20-cpu-py313*")
    head, *lines = result.output.splitlines()
    assert result.exit_code == 0
    assert head == "GeForce RTX 5090 (compute capability 12.0), driver 580.65.06:"
    assert [line.split(":")[0].split(maxsplit=1) for line in lines] == [
        ["runs", "pt-2.9-cu128-py311"],
        ["runs", "tf-2.20-cpu-py313{,-jupyter}"],
    ]


def test_a_named_cell_that_does_not_run_is_refused_and_one_of_all_is_not(run: Callable[..., Result]) -> None:
    old = ("--gpu", "RTX 5090", "--driver", "550.54")
    assert isinstance(run(*old, "pt-2.9-cu128-py311", "tf-2.20-cpu-py313").exception, RefusedError)
    every_cell = run(*old)
    assert every_cell.exit_code == 0  # those for the CPU run
    [line] = [line for line in every_cell.output.splitlines() if "pt-2.9-cu128-py311" in line]
    assert line.startswith("  does not run  ")
    assert line.count("driver 550.54 is too old") == 1


def test_gpus_of_this_machine(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Gpu(name="NVIDIA H200", capability="9.0", memory=1)
    monkeypatch.setattr(gpus, "read_gpus", lambda: ("580.65.06", (h200, h200)))
    assert run("--gpu", "this", "pt-2.9-cu128-py311").output.splitlines() == [
        "NVIDIA H200 (compute capability 9.0), driver 580.65.06:",
        "  runs          pt-2.9-cu128-py311",
    ]
    monkeypatch.setattr(gpus, "read_gpus", lambda: ("", ()))
    assert isinstance(run("--gpu", "this").exception, UsageError)


# ---- named indexes


class Indexes(Stored):
    """Two indexes: the default one, and `own` with local versions of torch without CUDA. Records which one is read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def package(self, name: str, index: str = "") -> ListedPackage:
        package = super().package(name, index)
        if name != "torch":
            return package
        self.read.append(index)
        if not index:
            return package
        releases = tuple(
            replace(
                item,
                version=Version(f"{item.version}+cpu"),
                wheels=tuple(f.replace("-cp", "+cpu-cp", 1) for f in item.wheels),
            )
            for item in package.releases
        )
        return ListedPackage(name=name, releases=releases)


def test_a_cell_is_explained_by_the_index_that_it_comes_from() -> None:
    text = MATRIX.replace("debian:\n", "indexes: {own: https://python.example.test/cpu}\ndebian:\n", 1)
    text = text.replace("image: pt-cuda", "image: pt-cuda\n    cpu_image: pt-cpu")
    text = text.replace('release: 2.9.1, cuda: ["12.8"]', 'release: 2.9.1, cuda: ["12.8", cpu], index_on: {cpu: own}')
    matrix = reader.read_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))
    catalogue = Indexes()
    changes: dict[str, Any] = {"matrix": matrix, "known": cells.expand(matrix), "catalogue": catalogue}
    assert explained("pt-2.9-cpu-py311", **changes).lines == [
        "pt-2.9-cpu-py311 works: its packages resolve for Python 3.11 and the CPU",
        "it is in matrix.yaml",
    ]
    assert set(catalogue.read) == {"own"}
    catalogue.read.clear()
    assert explained("pt-2.9-cu128-py311", **changes).works
    assert set(catalogue.read) == {""}
    # A release that matrix.yaml does not have is looked up where the first line comes from.
    text = text.replace("release: 2.15.0, ", "release: 2.15.0, index: own, ")
    changes["matrix"] = reader.read_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))
    catalogue.read.clear()
    explained("pt-2.8-cu128-py311", **changes)
    assert set(catalogue.read) == {"own"}
    line = explain.matrix_line("2.9", matrix.frameworks["pytorch"].versions["2.9"])
    assert line.endswith("python: ['3.11', '3.13'], index_on: {cpu: own}}")
