"""Which releases are proposed for matrix.yaml, on metadata of real wheels."""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from packaging.version import Version

from builder.cli.context import Context
from builder.common import strict_yaml
from builder.common.errors import FetchError
from builder.compat import explain
from builder.compat.explain import Explainer, Resolve
from builder.index.host import Host
from builder.index.releases import Index, ListedPackage, ListedRelease
from builder.index.settings import IndexSettings
from builder.matrix import cells, reader
from builder.matrix.cells import Cell
from builder.matrix.facts import Build
from builder.matrix.schema import FrameworkVersion, Matrix
from tests.fakes.wire import Reply, Sent, Wire
from tests.paths import ROOT
from tests.unit.compat.test_explain import CELLS, FACTS, MATRIX, STORED, Stored, resolves
from tools.upstream import FACTS as UPSTREAM_FACTS
from tools.upstream import Findings, Proposal, find, propose, upstream

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
    matrix = reader.read_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))
    explainer = Explainer(
        matrix=matrix, known=CELLS, catalogue=catalogue or Stored(), facts=FACTS, resolve=resolve
    )  # fmt: skip
    return list(propose(explainer, framework))


class More(Stored):
    """With more releases of torch, and with other packages."""

    def __init__(self, *versions: str, yanked: str = "", packages: tuple[ListedPackage, ...] = ()) -> None:
        self._versions, self._yanked = versions, yanked
        self._listed = {package.name: package for package in packages}

    def package(self, name: str, index: str = "") -> ListedPackage:
        package = self._listed.get(name) or super().package(name, index)
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


# ---- what a week has brought

ENGINES = """
  vllm: {needs: [pytorch], packages: [vllm==0.32.0]}
  sglang: {needs: [pytorch], packages: [sglang==0.5.23, unknown==1.0]}
variants:
"""


class Engines(Stored):
    """With the METADATA of engines."""

    def files(self, name: str, index: str = "") -> list[Any]:
        return [SimpleNamespace(filename=wheel) for wheel in self.package(name).releases[-1].wheels]

    def metadata_text(self, file: Any, index: str = "", *, whole: bool = True) -> bytes:
        name = file.filename.split("-")[0]
        [(version, metadata)] = json.loads((STORED / f"{name}.json").read_text())["metadata"].items()
        requires = "".join(f"Requires-Dist: {text}\n" for text in metadata["requires"])
        return f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{requires}".encode()


BUILD = Build(cuda="13.2", architectures=["sm_80"], source="its wheel")
FOUND = f"""\
Frameworks, for matrix.yaml:
{NEW_TENSORFLOW}
CUDA and builds, for builder/matrix/facts.yaml:
  toolkits.drivers lacks CUDA 13.4: see CUDA's page
  builds.torch lacks 2.15.0: {{cuda: "13.2", architectures: [sm_80], source: its wheel}}
Engines, for components in matrix.yaml:
  vllm 0.33.0 is newer than 0.32.0 in components.vllm (requires torch==2.14.0, which matrix.yaml does not have)
Ends of support within 90 days:
  debian.bullseye: support of Debian bullseye ended on 2026-08-31: no security updates since
  python.3.10: support of Python 3.10 ends on 2026-10-31, in 59 days
The newest engines are in matrix.yaml: sglang 0.5.23 (requires torch==2.14.1)
To do: 6
"""


def found(text: str, catalogue: Index, today: date) -> Findings:
    matrix = reader.read_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))
    known = FACTS.model_copy(
        update={
            "builds": {"torch": {"2.14.1": BUILD}},
            "toolkits": FACTS.toolkits.model_copy(update={"drivers": {"13.3": "610"}, "source": "CUDA's page"}),
        }
    )
    explainer = Explainer(
        matrix=matrix, known=cells.expand(matrix), catalogue=catalogue, facts=known, resolve=for_cuda_12
    )  # fmt: skip
    return find(explainer, lambda *_: BUILD, today)


def test_everything_that_is_newer_is_listed_by_what_it_is_for() -> None:
    text = MATRIX.replace("\nvariants:\n", ENGINES)
    text = text.replace('["11.8"], python: ["3.9"]', '["11.8"], python: ["3.9", "3.10"]')
    line = '      "2.14.1": {release: 2.14.1, cuda: ["13.2"], python: ["3.13"]}\n'  # which SGLang requires
    text = text.replace('      "2.9": {release: 2.9.1', f'{line}      "2.9": {{release: 2.9.1')
    assert "\n".join(found(text, Engines(), date(2026, 9, 2)).lines) + "\n" == FOUND


def test_a_support_that_ended_is_not_listed_again_if_matrix_yaml_has_a_reason() -> None:
    reason = MATRIX.replace('glibc: "2.31"', 'glibc: "2.31", after_support: "TensorFlow 2.9 needs it"')
    assert found(reason, Stored(), date(2026, 9, 2)).support == []
    [line] = found(reason, Stored(), date(2026, 8, 31)).support
    assert line.endswith(", today")


def test_what_the_index_does_not_answer_is_one_line_and_the_rest_is_found() -> None:
    class WithoutTorch(Stored):
        def package(self, name: str, index: str = "") -> ListedPackage:
            if name in ("torch", "jax"):
                raise FetchError(f"{name}: cannot connect to the index\nand more")
            return super().package(name, index)

    result = found(MATRIX, WithoutTorch(), date(2026, 1, 1))
    assert [proposal.framework for proposal in result.proposals] == ["tensorflow"]
    assert list(result.lines)[-2:] == [
        "Not looked up: pytorch, jax, builder/matrix/facts.yaml: cannot connect to the index",
        "To do: 2",
    ]
    result.proposals.clear()
    result.facts.clear()
    assert list(result.lines)[-1] == "Run it again", "that nothing was found does not mean that there is nothing"


# ---- what is written


def test_what_was_found_is_added_to_the_files_of_this_repository(tmp_path: Path) -> None:
    """A new version comes last: the first one has the default tags. Comments and other lines stay."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("matrix.yaml", UPSTREAM_FACTS)}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    matrix = yaml.safe_load(texts["matrix.yaml"])
    old = FrameworkVersion.model_validate(matrix["frameworks"]["pytorch"]["versions"]["2.9"])
    newer = old.model_copy(update={"release": "2.9.9", "packages": ["torchaudio==2.9.9"]})
    proposals = [
        Proposal(
            framework=framework, package="x", line=line, release=entry.release, replaces=replaces, entry=entry, notes=()
        )
        for framework, line, replaces, entry in (
            ("pytorch", "2.9", "2.9.1", newer),
            ("pytorch", "9.9", "", newer),
            ("tensorflow", "9.9", "", newer),
        )
    ]
    proposals.append(replace(proposals[0], framework="jax", line="0.12", replaces="0.12.0.1", entry=None))
    Findings(proposals=proposals, builds=[("torch", '9.9.0: {cuda: "13.2"}')]).write(tmp_path)
    after = {name: (tmp_path / name).read_text(encoding="utf-8") for name in texts}

    for framework in ("pytorch", "tensorflow"):
        versions = matrix["frameworks"][framework]["versions"]
        versions["9.9"] = yaml.safe_load(explain.matrix_line("9.9", newer))["9.9"]
    matrix["frameworks"]["pytorch"]["versions"]["2.9"] |= {"release": "2.9.9", "packages": ["torchaudio==2.9.9"]}
    written = yaml.safe_load(after["matrix.yaml"])
    assert written == matrix
    assert list(written["frameworks"]["pytorch"]["versions"])[-1] == "9.9"
    builds = yaml.safe_load(texts[UPSTREAM_FACTS])
    builds["builds"]["torch"]["9.9.0"] = {"cuda": "13.2"}
    assert yaml.safe_load(after[UPSTREAM_FACTS]) == builds
    for name, text in texts.items():
        changed = [line for line in difflib.ndiff(text.splitlines(), after[name].splitlines()) if line[0] in "+-"]
        assert len(changed) == (4 if name == "matrix.yaml" else 1), changed


# ---- the program


def test_the_program_asks_the_index_and_writes_nothing_unless_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The index has one release that is newer, without a wheel for Linux."""
    wheels = {"torch": ["2.9.1", "2.15.0"], "tensorflow": ["2.9.3", "2.20.0"], "jax": ["0.10.2", "0.12.1"]}

    def answer(sent: Sent) -> Reply:
        name = sent.url.rstrip("/").rpartition("/")[2]
        names = [f"{name}-{version}-cp27-none-win32.whl" for version in wheels.get(name, ())]
        files = [{"filename": each, "url": each, "hashes": {}} for each in names]
        body = json.dumps({"meta": {"api-version": "1.0"}, "name": name, "files": files}).encode()
        return Reply(body=body, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})

    Wire.install(monkeypatch, answer)
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    context = Context(root=tmp_path)
    context.host = Host(index=IndexSettings(url="https://index.example.test/simple/"))
    context.today = date(2026, 1, 1)
    result = CliRunner().invoke(upstream, obj=context)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:2] == [
        "Frameworks, for matrix.yaml:",
        '      # jax 0.12.1 is newer than 0.12.0.1 in frameworks.jax.versions."0.12", but no CUDA and Python version '
        "of matrix.yaml work with it.",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.yaml"]
    assert (tmp_path / "matrix.yaml").read_text() == MATRIX
    Wire.install(monkeypatch, lambda _: Reply(403))
    assert CliRunner().invoke(upstream, obj=context).exit_code == 1
