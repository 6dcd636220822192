"""Which releases are proposed for matrix.yaml, on metadata of real wheels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from packaging.version import Version

from builder.cli.context import Context
from builder.common import strict_yaml
from builder.compat.explain import Explainer, Resolve
from builder.index.host import Host
from builder.index.releases import ListedPackage, ListedRelease
from builder.index.settings import IndexSettings
from builder.matrix import reader
from builder.matrix.cells import Cell
from builder.matrix.schema import FrameworkVersion, Matrix
from tests.fakes.wire import Reply, Sent, Wire
from tests.unit.compat.test_explain import CELLS, FACTS, MATRIX, Stored, resolves
from tools.upstream import Proposal, propose, upstream

NEW_TENSORFLOW = """\
      # tensorflow 2.21.0 is new in frameworks.tensorflow.versions.
      #   left out CUDA 11.8: it would be CPU only
      #   left out CUDA 13.2: it would be CPU only
      #   left out Python 3.9: tensorflow 2.21.0 has no wheel on the index for Python 3.9 on x86_64 and Debian \
bullseye (glibc 2.31)
      #   left out Python 3.10: tensorflow 2.21.0 has no wheel on the index for Python 3.10 on x86_64 and Debian \
stretch (glibc 2.24)
      "2.21": {release: 2.21.0, cuda: ['12.8', cpu], python: ['3.11', '3.13'], constraints: [setuptools<82]}"""


def for_cuda_12(_: Matrix, cell: Cell) -> str:
    return "" if cell.cuda in ("12.8", "cpu") else "it would be CPU only"


def proposed(
    *edits: tuple[str, str], resolve: Resolve = resolves, catalogue: Any = None, framework: str = "pytorch"
) -> list[Proposal]:
    text = MATRIX
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    matrix = reader.check_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))
    explainer = Explainer(
        matrix=matrix, known=CELLS, catalogue=catalogue or Stored(), facts=FACTS, resolve=resolve
    )  # fmt: skip
    return list(propose(explainer, framework))


class More(Stored):
    """With more releases of torch, and with other packages."""

    def __init__(self, *versions: str, yanked: str = "", packages: tuple[ListedPackage, ...] = ()) -> None:
        self._versions, self._yanked = versions, yanked
        self._listed = {package.name: package for package in packages}

    def package(self, name: str) -> ListedPackage:
        package = self._listed.get(name) or super().package(name)
        if name != "torch":
            return package
        like = package.release(Version("2.9.1"))
        assert like
        more = [
            replace(like, version=Version(version), is_yanked=version == self._yanked) for version in self._versions
        ]
        releases = sorted([*package.releases, *more], key=lambda release: release.version)
        return replace(package, releases=tuple(releases))


def packages(*pins: str) -> tuple[str, str]:
    """An edit of the matrix: packages of the line 2.9 of PyTorch."""
    old = 'release: 2.9.1, cuda: ["12.8"], python: ["3.11", "3.13"]'
    return old, f"{old}, packages: [{', '.join(pins)}]"


def test_nothing_is_proposed_where_the_newest_releases_are_in_the_matrix() -> None:
    assert proposed() == []


def test_a_newer_line_has_what_works_and_the_reasons_for_the_rest() -> None:
    (proposal,) = proposed(framework="tensorflow", resolve=for_cuda_12)
    assert "\n".join(proposal.lines) == NEW_TENSORFLOW


def test_a_newer_line_has_no_python_whose_images_were_not_built_yet() -> None:
    edit = ('"3.13": {debian: trixie}', '"3.13": {debian: trixie, not_built: "nobody can fetch it"}')
    (proposal,) = proposed(edit, framework="tensorflow")
    assert "3.13" not in "\n".join(proposal.lines)


def test_a_newer_release_of_a_line_takes_along_what_is_pinned_to_the_old_one() -> None:
    audio = ListedPackage(name="torchaudio", releases=(ListedRelease(version=Version("2.9.2")),))
    (proposal,) = proposed(
        packages("torchaudio==2.9.1", "numpy==2.9.0"), catalogue=More("2.9.2", packages=(audio,))
    )  # fmt: skip
    *_, line = proposal.lines
    assert (proposal.replaces, proposal.notes) == ("2.9.1", ())
    assert line.endswith(
        "2.9.2, cuda: ['12.8'], python: ['3.11', '3.13'], packages: [torchaudio==2.9.2, numpy==2.9.0]}"
    )


@pytest.mark.parametrize("version", ["2.9.0", None, "2.9.2"])
def test_a_pin_without_such_a_release_is_kept_and_named(version: str | None) -> None:
    """A yanked one does not count."""
    releases = (ListedRelease(version=Version(version), is_yanked=version == "2.9.2"),) if version else ()
    catalogue = More("2.9.2", packages=(ListedPackage(name="torchaudio", releases=releases),))
    (proposal,) = proposed(packages("torchaudio==2.9.1"), catalogue=catalogue)
    assert proposal.entry
    assert proposal.entry.packages == ["torchaudio==2.9.1"]
    assert proposal.notes == ("torchaudio has no release 2.9.2: check torchaudio==2.9.1",)


@pytest.mark.parametrize("version", ["2.9.2rc1", "2.9.1.post1", "2.9.2+local", "1!2.9.2", "2.9.12345", "2.14.7"])
def test_what_matrix_yaml_does_not_allow_is_not_proposed(version: str) -> None:
    """Nor a line older than the newest."""
    assert proposed(catalogue=More(version)) == []


def test_a_yanked_release_is_not_proposed() -> None:
    (proposal,) = proposed(catalogue=More("2.9.2", "2.9.3", yanked="2.9.3"))
    assert proposal.release == "2.9.2"


def test_a_line_of_three_numbers_has_its_own_releases() -> None:
    edit = ('"2.9": {release: 2.9.1, cuda: ["12.8"]', '"2.9.1": {release: 2.9.1, cuda: ["12.8"]')
    assert [each.line for each in proposed(edit, catalogue=More("2.9.2", "2.9.1.1"))] == ["2.9.1"]


def test_a_line_has_the_largest_product_of_what_resolves() -> None:
    def resolve(_: Matrix, cell: Cell) -> str:
        return "numpy does not" if (cell.cuda, cell.python) == ("cpu", "3.13") else for_cuda_12(_, cell)

    (proposal,) = proposed(framework="tensorflow", resolve=resolve)
    assert proposal.entry
    # 12.8 with both Pythons, or both with 3.11: the first.
    assert (proposal.entry.cuda, proposal.entry.python) == (["12.8", "cpu"], ["3.11"])
    assert "left out Python 3.13: numpy does not" in proposal.notes


def test_a_release_with_which_nothing_works_is_named_without_a_line() -> None:
    (proposal,) = proposed(catalogue=More("2.9.2"), resolve=lambda *_: "torchvision does not")
    assert proposal.entry is None
    first, *rest = proposal.lines
    assert first.endswith('versions."2.9", but no CUDA and Python version of matrix.yaml work with it.')
    assert rest == ["      #   CUDA 12.8: torchvision does not"]


def test_exclusions_are_no_reason_against_a_release() -> None:
    edit = ('cells: "pt-2.15-*-py311-jupyter"', 'cells: "pt-2.9-*-py311"')
    (proposal,) = proposed(edit, catalogue=More("2.9.2"))
    assert proposal.entry
    assert proposal.entry.python == ["3.11", "3.13"]


def test_the_lines_are_valid_yaml() -> None:
    entry = FrameworkVersion(
        release="1.0.0", cuda=["12.8", "cpu"], python=["3.11"], packages=["a[b,c]==1", "d<2,>1"], constraints=["e<3"]
    )
    proposal = Proposal(
        framework="f", package="f", line="1.0", release="1.0.0", replaces="", entry=entry, notes=("note",)
    )
    data = yaml.safe_load("\n".join(proposal.lines))
    assert FrameworkVersion.model_validate(data["1.0"]) == entry


# ---- the program


def run(root: Path, *arguments: str) -> Result:
    (root / "matrix.yaml").write_text(MATRIX)
    context = Context(root=root)
    context.host = Host(index=IndexSettings(url="https://index.example.test/simple/"))
    return CliRunner().invoke(upstream, arguments, obj=context)


def serve(monkeypatch: pytest.MonkeyPatch, wheels: Mapping[str, Sequence[str]]) -> None:
    """An index with wheels of these versions of each package."""

    def answer(sent: Sent) -> Reply:
        name = sent.url.rstrip("/").rpartition("/")[2]
        names = [f"{name}-{version}-cp27-none-win32.whl" for version in wheels[name]]
        files = [{"filename": each, "url": each, "hashes": {}} for each in names]
        body = json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": files}).encode()
        return Reply(body=body, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})

    Wire.install(monkeypatch, answer)


NO_WHEEL = "jax 0.12.1 has no wheel on the index for Python 3.13 on x86_64 and Debian trixie (glibc 2.41)"
NEW_JAX = f"""\
      # jax 0.12.1 is newer than 0.12.0.1 in frameworks.jax.versions."0.12", but no CUDA and Python version of \
matrix.yaml work with it.
      #   CUDA 12.8: {NO_WHEEL}
      #   CUDA 13.2: {NO_WHEEL}
      #   cpu: {NO_WHEEL}
"""
CURRENT = {"torch": ["2.9.1", "2.15.0"], "tensorflow": ["2.9.3", "2.20.0"], "jax": ["0.10.2", "0.12.0.1"]}


def test_the_program_prints_what_can_be_pasted_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, CURRENT | {"jax": ["0.10.2", "0.12.1"]})
    result = run(tmp_path)
    assert result.stdout == NEW_JAX
    assert result.stderr.splitlines() == [
        f"{name}: getting the list of releases" for name in ("pytorch", "tensorflow", "jax")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.yaml"]


def test_the_program_for_one_framework(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each framework is updated in a pull request of its own."""
    serve(monkeypatch, CURRENT | {"jax": ["0.10.2", "0.12.1"]})
    assert run(tmp_path, "pytorch").stdout == "no newer releases of pytorch\n"
    assert run(tmp_path, "jax").stdout == NEW_JAX
    assert "did you mean 'pytorch'?" in str(run(tmp_path, "pytorhc").exception)
