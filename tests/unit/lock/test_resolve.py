"""Resolving, with a stand-in for uv: which versions and wheels are taken, what is kept, and what failures say."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from builder.common.console import View
from builder.common.errors import BuilderError, FetchError, LockError
from builder.index.host import Host
from builder.index.local_index import LocalIndex
from builder.index.releases import Index
from builder.index.settings import IndexSettings
from builder.index.wheels import LockedWheel
from builder.lock import lockfile
from builder.lock import uv as uv_program
from builder.lock.lockfile import GROUP_LOCKS, Lock
from builder.lock.resolve import Resolver
from builder.lock.uv import Target
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from tests.fakes import locks
from tests.fakes.engine import MemoryConsole
from tests.fakes.wire import Reply, Wire

Edit = Callable[[str, str], Project]
GROUP = "em-1.10-cu1210-py311"  # its CUDA has a toolkit
NO_TOOLKIT = "qz-0.5-cu129-py311"
TARGET = Target(name="em-1-cu129-py311", python="3.11", arch="amd64", glibc="2.36")
LINUX = "manylinux_2_28_x86_64"


def entry(file: str, *, sha256: str | None = None) -> dict[str, Any]:
    hashes = {"sha256": sha256 if sha256 is not None else hashlib.sha256(file.encode()).hexdigest()}
    return {"url": f"https://files.example.test/a/{file}", "hashes": hashes}


def best(*files: str, target: Target = TARGET) -> str:
    wheel, url = uv_program._best_wheel(target, "x", {"version": "1.0", "wheels": [entry(file) for file in files]})
    assert url.endswith(wheel.file)
    return wheel.file


# From the most specific to the least, as pip orders them.
ORDER = [
    "cp311-cp311-manylinux_2_36_x86_64",
    "cp311-cp311-manylinux_2_17_x86_64",
    "cp311-cp311-manylinux2014_x86_64",
    "cp311-cp311-manylinux_2_16_x86_64",
    "cp311-cp311-manylinux2010_x86_64",
    "cp311-cp311-manylinux1_x86_64",
    "cp311-cp311-linux_x86_64",
    "cp311-abi3-manylinux_2_28_x86_64",
    "cp311-none-manylinux_2_28_x86_64",
    "cp310-abi3-manylinux_2_28_x86_64",
    "py3-none-manylinux_2_28_x86_64",
    "py311-none-any",
    "py3-none-any",
]
TAKEN = {
    # The first is to be taken.
    **{better: [f"x-1.0-{better}.whl", f"x-1.0-{tag}.whl"] for better, tag in pairwise(ORDER)},
    "the highest build": ["x-1.0-10-py3-none-any.whl", "x-1.0-9-py3-none-any.whl", "x-1.0-py3-none-any.whl"],
    "the last letter of a build": ["x-1.0-2b-py3-none-any.whl", "x-1.0-2a-py3-none-any.whl"],
    "the platform before the build": ["x-1.0-cp311-cp311-linux_x86_64.whl", "x-1.0-9-py3-none-any.whl"],
    "one file listed twice": ["x-1.0-py3-none-any.whl", "x-1.0-py3-none-any.whl"],
    "the best of several tags": [
        "x-1.0-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", "x-1.0-py3-none-manylinux2014_x86_64.whl"
    ],
}  # fmt: skip


@pytest.mark.parametrize("files", TAKEN.values(), ids=TAKEN.keys())
def test_the_wheel_that_an_installer_takes(files: list[str]) -> None:
    assert best(*files) == files[0]
    assert best(*reversed(files)) == files[0]


@pytest.mark.parametrize(
    "tag",
    [
        "cp312-cp312-manylinux_2_17_x86_64", "cp310-cp310-manylinux_2_17_x86_64", "cp312-abi3-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_37_x86_64", "cp311-cp311-manylinux_2_17_aarch64", "cp311-cp311-musllinux_1_2_x86_64",
        "cp311-cp311t-manylinux_2_17_x86_64", "cp311-cp311-win_amd64", "py2-none-any",
        "pp311-pypy311_pp73-manylinux_2_17_x86_64",
    ],
)  # fmt: skip
def test_tags_that_do_not_fit(tag: str) -> None:
    assert best(SAME, f"x-1.0-{tag}.whl") == SAME


def test_wheels_of_another_machine() -> None:
    old, arm64 = replace(TARGET, python="3.9", glibc="2.31"), replace(TARGET, arch="arm64")
    fits, newer = (f"x-1.0-cp39-cp39-manylinux_2_{glibc}_x86_64.whl" for glibc in ("31", "34"))
    assert best(SAME, fits, newer, target=old) == fits
    amd64, aarch64 = (f"x-1.0-cp311-cp311-manylinux_2_17_{name}.whl" for name in ("x86_64", "aarch64"))
    assert best(SAME, amd64, aarch64, target=arm64) == aarch64


def test_a_local_version_in_an_address() -> None:
    package = {"version": "1.0+cu129", "wheels": [entry("x-1.0%2Bcu129-py3-none-any.whl")]}
    wheel, _ = uv_program._best_wheel(TARGET, "x", package)
    assert (wheel.file, wheel.version) == ("x-1.0+cu129-py3-none-any.whl", "1.0+cu129")


SAME = "x-1.0-py3-none-any.whl"
UNFIT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "none at all": ([], "x 1.0 has no wheel for Python 3.11 on x86_64"),
    "none that fits": ([entry("x-1.0-cp312-cp312-win_amd64.whl")], "x 1.0 has no wheel for Python 3.11"),
    "two builds alike": ([entry(SAME), entry("x-1.0-py2.py3-none-any.whl")], "x has two builds that fit equally"),
    "one name, two contents": ([entry(SAME), entry(SAME, sha256="0" * 64)], "x has two builds that fit equally"),
    "no hash": ([entry(SAME, sha256="")], f"the index has no SHA-256 for {SAME}"),
    "no wheel's name": ([entry("x.whl")], "the index lists an invalid wheel file name: 'x.whl'"),
}


@pytest.mark.parametrize(("wheels", "message"), UNFIT.values(), ids=UNFIT.keys())
def test_no_wheel_can_be_chosen(wheels: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(LockError) as caught:
        uv_program._best_wheel(TARGET, "x", {"version": "1.0", "wheels": wheels})
    assert str(caught.value).startswith(f"{TARGET.name}: {message}")


# ---- uv's output

NO_SOLUTION = """\
warning: something else
error: No solution found when resolving dependencies
  cause: Because you require ember==1.0 and ember==1.1, we can conclude that your requirements are unsatisfiable.
"""
_CONFLICT = "error: No solution found when resolving dependencies\n  cause: Because {}, we can conclude that ..."
_FETCH = "Failed to fetch: http://127.0.0.1:8000/simple/x/"
_REQUEST = f"  cause: {_FETCH}\n  cause: error sending request for url (http://127.0.0.1:8000/simple/x/)"
_REFUSED = "  cause: client error (Connect)\n  cause: tcp connect error\n  cause: Connection refused (os error 111)"
_ABSENT = _CONFLICT.format("x was not found in the package registry and you require x")
CHANGE, NO_RESPONSE, UPLOAD, BUILD = (
    "Change a version in matrix.yaml",
    "The package index did not respond correctly. `builder doctor` checks the index.",
    "Upload the wheel to the index again",
    "build a wheel once",
)
# What uv 0.13.8 prints, and the hint.
REQUIREMENTS = {
    "no solution": (NO_SOLUTION, CHANGE),
    # Names of packages with a word of networks.
    "timeout": (_CONFLICT.format("x depends on async-timeout<5.0 and you require async-timeout==5.0.1"), CHANGE),
    "dns": (_CONFLICT.format("you require dnspython==2.6.1 and dnspython<2"), CHANGE),
    "connect": (_CONFLICT.format("there is no version of connectorx==99 and you require connectorx==99"), CHANGE),
    "fetch": (_CONFLICT.format("failed-to-fetch was not found in the package registry"), CHANGE),
    "pre-release": (
        "hint: `x` was requested with a pre-release marker (e.g., x==1rc1), but pre-releases weren't enabled (try: "
        "`--prerelease=allow`)",
        "to the `packages` of the framework version",
    ),
    "hash": ("error: Failed to download `x==1`\n  cause: Hash mismatch for `x==1`", "do not match its hashes"),
    "format": ("  cause: Because x==1 has an invalid package format and\n\nhint: The structure of `x`", UPLOAD),
    "archive": ("error: Failed to download `x==1`\n  cause: Failed to extract archive: x-1-py3-none-any.whl", UPLOAD),
    "unusable wheels": ("  cause: Because x==1 has no usable wheels and you require x==1", BUILD),
    "wheels of another Python": ("  cause: Because x==1 has no wheels with a matching Python version tag", BUILD),
    "yanked": (
        'warning: `ember==1.10.0` is yanked (reason: "broken")',
        "builder lock --upgrade-package PACKAGE CELLS && builder render",
    ),
}
REQUESTS = {
    "authority": (
        "error: error sending request\n  cause: invalid peer certificate: UnknownIssuer",
        "Set SSL_CERT_FILE",
    ),
    "certificate": ("error: error sending request\n  cause: invalid peer certificate: Expired", NO_RESPONSE),
    "cut short": (
        "  cause: Failed to extract archive: x-1-py3-none-any.whl\n  cause: error decoding response body",
        NO_RESPONSE,
    ),
    "closed port": (f"error: Request failed after 3 retries in 4.7s\n{_REQUEST}\n{_REFUSED}", NO_RESPONSE),
    "status": (f"error: {_FETCH}\n  cause: HTTP status server error (503 Service Unavailable) for url", NO_RESPONSE),
    "a page for people": ('error: Unsupported `Content-Type` "text/plain" for `http://127.0.0.1/x/`.', NO_RESPONSE),
    "no type": ("error: Missing `Content-Type` header for `http://127.0.0.1:8000/simple/x/`", NO_RESPONSE),
    "no login": (
        f"{_ABSENT}\n\nhint: An index URL (http://127.0.0.1:8000/simple) could not be queried due to a lack of valid "
        "authentication credentials (401 Unauthorized)",
        NO_RESPONSE,
    ),
    "no permission": (
        f"{_ABSENT}\n\nhint: An index (http://127.0.0.1:8000/simple) returned a 403 Forbidden error.",
        NO_RESPONSE,
    ),
}


@pytest.mark.parametrize(
    ("output", "hint", "kind"),
    [
        *(pytest.param(*row, LockError, id=name) for name, row in REQUIREMENTS.items()),
        *(pytest.param(*row, FetchError, id=name) for name, row in REQUESTS.items()),
    ],
)
def test_a_failure_is_one_of_the_requirements_or_of_the_index(
    tiny: Project, uv: Uv, output: str, hint: str, kind: type[BuilderError]
) -> None:
    uv.result = 0 if "yanked" in output else 2, output
    with pytest.raises(BuilderError) as caught:
        uv.resolve(tiny, NO_TOOLKIT)
    assert type(caught.value) is kind
    assert hint in caught.value.hint
    assert output.splitlines()[-1].split(": ")[-1].replace("`", "") in str(caught.value).replace("`", "")
    assert len(uv.calls) == 1, "it is tried once"
    if output == NO_SOLUTION:
        heading, *lines = str(caught.value).splitlines()
        assert heading == f"{NO_TOOLKIT}: cannot be resolved to wheels"
        assert [line[:24] for line in lines] == ["  No solution found when", "  Because you require em"]


# ---- a stand-in for uv

RUNTIME, SUMS = locks.CUDA
TOOLKIT = "cuda-toolkit[all]==12.10.1"
TOOLKIT_VERSIONS = {"cuda-toolkit": "12.10.1", RUNTIME: "12.10.1", SUMS: "12.10.1"}
NEEDS = {
    "ember": [RUNTIME, SUMS],
    "quartz[cuda]": [RUNTIME],
    "cuda-toolkit[all]": [f"{RUNTIME}==12.10.1", f"{SUMS}==12.10.1"],
}


class Listing(Index):
    """All indexes list the wheels of `uv`, without requests."""

    def __init__(self, uv: Uv, settings: IndexSettings) -> None:
        super().__init__(settings)
        self._uv = uv

    def files(self, name: str, index: str = "") -> list[Any]:
        return [SimpleNamespace(filename=path.name, url=path.as_uri()) for path in self._uv.wheels.glob("*.whl")]

    def metadata_text(self, file: Any, index: str = "", *, whole: bool = False) -> bytes:
        name = canonicalize_name(file.filename.split("-")[0])
        lines = [f"Name: {name}", f"Version: {file.filename.split('-')[1]}", "License: MIT", "Author: The team"]
        for needed, requirements in {**NEEDS, **self._uv.needs}.items():
            needer = Requirement(needed)
            marker = "".join(f'; extra == "{extra}"' for extra in needer.extras)
            lines += [f"Requires-Dist: {text}{marker}" for text in requirements if needer.name == name]
        return "\n".join(lines).encode()


@dataclass(frozen=True, kw_only=True)
class Call:
    """Input of one uv process. A closure call writes wheels, any other call only versions."""

    packages: list[str]
    bounds: list[str]
    preferred: dict[str, str]
    python: str
    is_closure: bool

    @property
    def is_toolkit(self) -> bool:
        return any(package.startswith("cuda-toolkit") for package in self.packages)


class Uv:
    """Stands in for `uv pip compile`: `run` of a resolver.

    The index has every version of every package, each as one wheel in the folder `wheels`. `needs` are dependencies,
    in addition to those in NEEDS or in place of them. A version in the output file is taken where it fits, else the
    newest. `result` is the exit code and what is written to stderr. `messages` is what the resolver says. `listed` adds
    to the entries of wheels.
    """

    def __init__(self, wheels: Path) -> None:
        self.wheels = wheels
        self.newest, self.newest_cuda = "2.0", "12.9.7"
        self.needs: dict[str, list[str]] = {}
        self.result = 0, ""
        self.listed = ""
        self.linux = LINUX  # the platform of the CUDA wheels on the index
        self.commands: list[list[str]] = []
        self.calls: list[Call] = []
        self.console = MemoryConsole()
        self.environ: dict[str, str] = {}

    @property
    def version_calls(self) -> list[Call]:
        """The calls that choose versions for the group's own requirements."""
        return [call for call in self.calls if not call.is_closure and not call.is_toolkit]

    @property
    def closures(self) -> list[list[str]]:
        """The packages of each closure call."""
        return [call.packages for call in self.calls if call.is_closure]

    @property
    def messages(self) -> list[str]:
        return [text for text in re.split(r"\n(?! )", self.console.text.rstrip("\n")) if text]

    @property
    def conflicts(self) -> list[str]:
        return [message for message in self.messages if "fit the locked wheels" in message]

    def resolver(
        self, project: Project, index: IndexSettings | None = None, *, known: Iterable[LockedWheel] = ()
    ) -> Resolver:
        host = Host(index=index or IndexSettings())
        resolver = Resolver(project, host, View(self.console))
        resolver.uv.run, resolver.uv.catalogue = self, Listing(self, host.index)
        resolver.known.update({wheel.sha256: wheel for wheel in known})
        return resolver

    def resolve(
        self, project: Project, group: str, present: Lock | None = None, prefer: Mapping[str, str] | None = None
    ) -> Lock:
        return self.resolver(project).lock(project.groups[group], present, prefer or {})

    def __call__(self, command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.environ = env
        out = Path(command[command.index("-o") + 1])
        call = Call(
            packages=[line for line in Path(command[3]).read_text().splitlines() if line],
            bounds=Path(command[command.index("--constraint") + 1]).read_text().splitlines(),
            preferred=dict(line.split("==") for line in out.read_text().splitlines()) if out.exists() else {},
            python=command[command.index("--python-version") + 1],
            is_closure=out.name == "pylock.toml",
        )
        self.calls.append(call)
        code, err = self.result
        if (versions := self.versions(call)) is None:
            code, err = 1, NO_SOLUTION
        elif call.is_closure:
            packages = "".join(self.table(*pair) for pair in versions.items()) or "packages = []\n"
            out.write_text(f"lock-version = '1.0'\n{packages}")
        else:
            out.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        return subprocess.CompletedProcess(command, code, "", err)

    def versions(self, call: Call) -> dict[str, str] | None:
        """None if there is no solution."""
        versions = {}
        for name, specifiers in self.specifiers(call).items():
            exact = [
                specifier.version
                for specifier in specifiers
                if specifier.operator == "==" and "*" not in specifier.version
            ]
            present = [call.preferred[name]] if name in call.preferred else []
            fallback = self.newest_cuda if name.startswith("nvidia-") else self.newest
            fitting = [version for version in (*exact, *present, fallback) if version in specifiers]
            if not fitting:
                return None
            versions[name] = fitting[0]
        return versions

    def specifiers(self, call: Call) -> dict[str, SpecifierSet]:
        """Name -> what its version must satisfy, for the packages and all that they need."""
        specifiers: dict[str, SpecifierSet] = {}
        pending = list(call.packages)
        while pending:
            requirement = Requirement(pending.pop(0))
            extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
            pending += {**NEEDS, **self.needs}.get(requirement.name + extras, [])
            specifiers[requirement.name] = specifiers.get(requirement.name, SpecifierSet()) & requirement.specifier
        for bound in map(Requirement, call.bounds):
            if bound.name in specifiers:
                specifiers[bound.name] &= bound.specifier
        return specifiers

    def table(self, name: str, version: str) -> str:
        """The package in pylock.toml; its wheel is written."""
        tag = f"py3-none-{self.linux}" if name.startswith("nvidia-") else "py3-none-any"
        path = self.wheels / f"{name.replace('-', '_')}-{version}-{tag}.whl"
        path.write_bytes(path.name.encode())
        sha256 = hashlib.sha256(path.name.encode()).hexdigest()
        return (
            f"[[packages]]\nname = '{name}'\nversion = '{version}'\n"
            f"wheels = [{{ url = '{path.as_uri()}', hashes = {{ sha256 = '{sha256}' }}{self.listed} }}]\n"
        )


@pytest.fixture
def uv(tmp_path: Path) -> Uv:
    return Uv(tmp_path)


def pins(lock: Lock) -> list[str]:
    return [f"{name}=={version}" for name, version in lock.versions.items()]


def with_extra(edit: Edit, packages: str = "extra") -> Project:
    """The tiny project with a new component `extra` in the variant `jupyter`."""
    edit("  board: {needs", f"  extra: {{needs: [python], packages: [{packages}]}}\n  board: {{needs")
    return edit("jupyter: [board, jupyter]", "jupyter: [board, extra, jupyter]")


# ---- a group


def test_wheels_for_arm64_are_for_its_platform(edit: Edit, uv: Uv) -> None:
    """Also those of the toolkit, whose versions may differ."""
    project = edit('python: ["3.11", "3.9"]', 'python: ["3.11", "3.9"]\n        arch: [amd64, arm64]')
    uv.linux = "manylinux_2_28_aarch64"
    resolver = uv.resolver(project)
    lock = resolver.lock(project.groups[f"{GROUP}-arm64"], None, {})
    platforms = {command[command.index("--python-platform") + 1] for command in uv.commands}
    assert platforms == {"aarch64-manylinux_2_36"}
    assert lock.basis.platform == "aarch64"
    assert {wheel.file.rsplit("_", 1)[1] for wheel in lock.wheels if wheel.name.startswith("nvidia-")} == {
        "aarch64.whl"
    }
    assert GROUP_LOCKS.parse(GROUP_LOCKS.dump(lock), lock.group) == lock


def test_versions_are_chosen_for_the_whole_group_then_wheels_for_each_component(tiny: Project, uv: Uv) -> None:
    group = tiny.groups[GROUP]
    uv.needs = {"notebook": ["shared"], "board": ["shared"]}
    lock = uv.resolve(tiny, GROUP)
    [choice] = uv.version_calls
    assert choice.packages == ["board", "ember-extra==1.10.0", "ember==1.10.0", "emberkit", "notebook", "pip"]
    needs = lockfile.group_requirements(tiny.matrix, group)
    assert uv.closures == list(needs.values())
    assert all(sorted(call.bounds) == sorted(pins(lock)) for call in uv.calls if call.is_closure), "all are pinned"
    assert len(uv.calls) == 1 + 1 + len(needs), "the toolkit, the versions, and each component once"
    assert all("--only-binary" in command and ":all:" in command for command in uv.commands)
    for option, value in (("--python-platform", "x86_64-manylinux_2_36"), ("--prerelease", "explicit")):
        assert {command[command.index(option) + 1] for command in uv.commands} == {value}

    assert (lock.group, lock.basis) == (GROUP, lockfile.basis(tiny.matrix, group[0]))
    assert {name: part.requirements for name, part in lock.components.items()} == needs
    assert {name: part.wheels for name, part in lock.components.items()} == {
        "python": ["pip"],
        "ember": ["ember", "ember-extra", "emberkit", RUNTIME, SUMS],
        "board": ["board", "shared"],
        "jupyter": ["notebook", "shared"],
    }
    assert [wheel.name for wheel in lock.wheels] == sorted(lock.versions)
    assert all(wheel.size == len(wheel.file) for wheel in lock.wheels)
    assert str(uv.wheels) not in GROUP_LOCKS.dump(lock)
    assert GROUP_LOCKS.parse(GROUP_LOCKS.dump(lock), GROUP) == lock
    assert lockfile.stale_reason(tiny.matrix, lock, group, group) == ""


def test_what_the_framework_requires_in_one_version_is_held(tiny: Project, uv: Uv) -> None:
    """Also through other exact requirements, with their extras. A range is not held."""
    uv.needs = {
        "ember": ["cuda-toolkit[sums]==12.10.1", RUNTIME, "spark<=1.5,>=1.5", "range<3,>=1", "compatible~=2.0"],
        "cuda-toolkit[sums]": [f"{SUMS}==12.10.1.*", "wild==2.*"],
        "cuda-toolkit[runtime]": [f"{RUNTIME}==12.10.1"],
        "cuda-toolkit[all]": ["nvcc==12.10.88", f"{RUNTIME}==12.10.1", f"{SUMS}==12.10.1"],
        "range": ["of-a-range==2.0"],
        "emberkit": ["of-a-package-beside-it==2.0"],
    }
    lock = uv.resolve(tiny, GROUP, prefer={"spark": "1.5"})
    assert lock.held == ["cuda-toolkit", "ember", "ember-extra", SUMS, "spark"]
    assert lock.toolkit == {"nvcc": "==12.10.88", RUNTIME: "==12.10.1", SUMS: "==12.10.1"}, "also what no image has"
    assert GROUP_LOCKS.parse(GROUP_LOCKS.dump(lock), GROUP) == lock


def test_versions_of_the_toolkit_are_preferences(tiny: Project, uv: Uv) -> None:
    lock = uv.resolve(tiny, GROUP, prefer={SUMS: "12.10.9", "notebook": "1.5"})
    assert uv.calls[0].packages == [TOOLKIT]
    assert not any(call.is_toolkit for call in uv.calls[1:]), "the toolkit is never a requirement of the group"
    [choice] = uv.version_calls
    assert choice.preferred == {"notebook": "1.5", **TOOLKIT_VERSIONS}, "they take precedence over other groups"
    assert choice.bounds == []
    assert (lock.versions[RUNTIME], lock.versions[SUMS]) == ("12.10.1", "12.10.1")
    assert "cuda-toolkit" not in lock.versions
    assert lock.toolkit == {}, "the framework does not require it"


def test_the_toolkit_is_resolved_once_for_each_python_and_platform(edit: Edit, uv: Uv) -> None:
    project = edit('python: ["3.11", "3.9"]', 'python: ["3.11", "3.9"]\n        arch: [amd64, arm64]')
    resolver = uv.resolver(project)
    for group in ("em-1.10-cu1210-py39", "qz-0.5-cu1210-py39", GROUP, NO_TOOLKIT, f"{GROUP}-arm64"):
        uv.linux = LINUX.replace("x86_64", "aarch64") if "arm64" in group else LINUX
        resolver.lock(project.groups[group], None, {})
    assert [call.python for call in uv.calls if call.is_toolkit] == ["3.9", "3.11", "3.11"]
    assert [call.preferred.get(SUMS) for call in uv.version_calls] == ["12.10.1", "12.10.1", "12.10.1", None, "12.10.1"]


def test_constraints_of_the_line_hold_and_preferred_versions_are_taken(edit: Edit, uv: Uv) -> None:
    edit("{release: 1.9.2", "{constraints: [sums<3], release: 1.9.2")
    project = edit("{release: 0.5.3", "{constraints: [tools<82, pip<2], release: 0.5.3")
    preferred = {"notebook": "1.5", "pip": "1.9", "gone": "1"}
    lock = uv.resolve(project, NO_TOOLKIT, prefer=preferred)
    [choice] = uv.version_calls
    assert (choice.bounds, choice.preferred) == (["pip<2", "tools<82"], preferred)
    assert all("notebook==1.5" in call.bounds for call in uv.calls if call.is_closure)
    assert (lock.versions["notebook"], lock.versions["pip"], lock.versions["board"]) == ("1.5", "1.9", "2.0")
    assert "gone" not in lock.versions


def test_a_runtime_that_only_a_variant_requires_does_not_make_a_framework_one_for_cuda(edit: Edit, uv: Uv) -> None:
    """The compiler of the variant `devel` requires a CUDA runtime: jax 0.6.2 without an extra was locked as cu132."""
    edit("package: quartz[cuda]", "package: quartz")
    project = with_extra(edit, RUNTIME)
    with pytest.raises(LockError, match="no CUDA runtime"):
        uv.resolve(project, NO_TOOLKIT)


def test_size_and_licence_of_a_wheel_are_requested_once(tiny: Project, uv: Uv) -> None:
    resolver = uv.resolver(tiny)
    first = resolver.lock(tiny.groups["em-1.10-cu129-py311"], None, {})
    second = resolver.lock(tiny.groups[NO_TOOLKIT], None, {})
    assert [message for message in uv.messages if "size" in message] == [
        f"em-1.10-cu129-py311: getting the size of {len(first.wheels)} wheels",
        f"{NO_TOOLKIT}: getting the size of 1 wheel",
    ]
    assert {(wheel.license, wheel.supplier) for wheel in second.wheels} == {("MIT", "The team")}
    resolver = uv.resolver(tiny, known=[replace(wheel, size=77, license="BSD") for wheel in second.wheels])
    again = resolver.lock(tiny.groups[NO_TOOLKIT], None, {})
    assert {(wheel.size, wheel.license) for wheel in again.wheels} == {(77, "BSD")}


@pytest.mark.parametrize(("listed", "is_requested"), [(4321, False), (0, True)])
def test_a_size_that_the_index_lists_is_not_requested(tiny: Project, uv: Uv, listed: int, is_requested: bool) -> None:
    """It was requested with HEAD, which some indexes refuse. Source: PEP 700, PEP 751."""
    uv.listed = f", size = {listed}"
    lock = uv.resolve(tiny, NO_TOOLKIT)
    assert ({wheel.size for wheel in lock.wheels} == {4321}) is not is_requested
    assert all(wheel.size for wheel in lock.wheels)
    assert any("size" in message for message in uv.messages) is is_requested


# ---- beside a present lock


def test_a_lock_with_all_components_is_kept_without_uv(tiny: Project, uv: Uv) -> None:
    present = locks.lock_of(tiny, tiny.groups[GROUP])
    assert uv.resolve(tiny, GROUP, present, {"pip": "1.0", SUMS: "12.10.9"}) == present
    assert (uv.calls, uv.messages) == ([], [])


def test_a_component_that_no_cell_has_leaves_the_lock_without_uv(tiny: Project, edit: Edit, uv: Uv) -> None:
    """A wheel that another component needs as well stays."""
    present = locks.lock_of(tiny, tiny.groups[GROUP])
    jupyter = replace(present.components["jupyter"], wheels=["notebook", "pip"])
    present = replace(present, components={**present.components, "jupyter": jupyter})
    lock = uv.resolve(edit("jupyter: [board, jupyter]", "jupyter: [board]"), GROUP, present)
    assert uv.calls == []
    assert lock == replace(
        present,
        components={name: part for name, part in present.components.items() if name != "jupyter"},
        wheels=tuple(wheel for wheel in present.wheels if wheel.name != "notebook"),
    )
    assert "pip" in lock.versions


def test_a_new_component_is_resolved_beside_what_is_kept(tiny: Project, edit: Edit, uv: Uv) -> None:
    """Even if the index has newer versions of the kept wheels in the meantime."""
    present = locks.lock_of(tiny, tiny.groups[GROUP])
    project = with_extra(edit)
    uv.newest, uv.needs = "3.0", {"extra": ["pip", "other"]}
    lock = uv.resolve(project, GROUP, present, {"other": "1.5", "pip": "1.5"})

    assert {name: part for name, part in lock.components.items() if name != "extra"} == present.components
    assert list(lock.components) == list(lockfile.group_requirements(project.matrix, project.groups[GROUP]))
    assert lock.components["extra"].requirements == ["extra"]
    assert lock.components["extra"].wheels == ["extra", "other", "pip"]
    assert [wheel for wheel in lock.wheels if wheel.name not in {"extra", "other"}] == list(present.wheels)
    assert (lock.versions["extra"], lock.versions["other"]) == ("3.0", "1.5")
    assert GROUP_LOCKS.parse(GROUP_LOCKS.dump(lock), GROUP) == lock

    assert uv.closures == [["extra"]]
    [choice] = uv.version_calls
    assert choice.packages == ["board", "ember-extra==1.10.0", "ember==1.10.0", "emberkit", "extra", "notebook", "pip"]
    assert sorted(choice.bounds) == sorted(pins(present))
    assert f"{GROUP}: getting the size of 2 wheels" in uv.messages
    assert uv.conflicts == []


def test_a_new_component_that_does_not_fit_resolves_all_again(tiny: Project, edit: Edit, uv: Uv) -> None:
    """The locked versions are then only preferences: they stay where they still fit."""
    present = locks.lock_of(tiny, tiny.groups[GROUP])
    assert present.versions["pip"] == "2.0"
    project = with_extra(edit)
    uv.newest, uv.needs = "3.0", {"extra": ["pip==1.0", "other"]}
    lock = uv.resolve(project, GROUP, present, {"other": "1.5", "notebook": "1.5"})

    assert len(uv.conflicts) == 1
    refused, choice = uv.version_calls
    assert sorted(refused.bounds) == sorted(pins(present))
    assert choice.bounds == []
    assert choice.preferred == {"other": "1.5", **present.versions, **TOOLKIT_VERSIONS}
    assert uv.closures == list(lockfile.group_requirements(project.matrix, project.groups[GROUP]).values())
    assert lock.versions == {
        **present.versions, RUNTIME: "12.10.1", SUMS: "12.10.1", "pip": "1.0", "extra": "3.0", "other": "1.5"
    }  # fmt: skip


NOT_KEPT = {
    "requirements of a component": ("packages: [notebook]", "packages: [notebook<9]"),
    "release": ("release: 0.5.3", "release: 0.5.4"),
    "constraints": ("{release: 0.5.3", "{constraints: [sums<2], release: 0.5.3"),
    "glibc": ('glibc: "2.36"', 'glibc: "2.39"'),
}


@pytest.mark.parametrize(("old", "new"), NOT_KEPT.values(), ids=NOT_KEPT.keys())
def test_a_change_of_what_is_locked_resolves_all_again(tiny: Project, edit: Edit, uv: Uv, old: str, new: str) -> None:
    """The locked versions are then preferences, and take precedence over those of other groups."""
    present = locks.lock_of(tiny, tiny.groups[NO_TOOLKIT])
    project = edit(old, new)
    uv.newest = "3.0"
    lock = uv.resolve(project, NO_TOOLKIT, present, {"pip": "1.0", "other": "1.5"})
    [choice] = uv.version_calls
    assert (choice.bounds, choice.preferred) == (lock.basis.constraints, {**present.versions, "other": "1.5"})
    assert lockfile.stale_reason(project.matrix, lock, project.groups[NO_TOOLKIT]) == ""


# ---- the reason why a cell does not resolve


def test_the_reason_for_a_cell_that_the_matrix_need_not_have(tiny: Project, uv: Uv) -> None:
    """No lock is made."""
    cell = Cell(framework="ember", short="em", line="1.9", release="1.9.2", cuda="12.9", python="3.11", variant="plain")
    assert cell not in tiny.cells
    assert uv.resolver(tiny).reason(cell) == ""
    assert (uv.calls[0].packages, uv.calls[0].python) == (["ember==1.9.2", "emberkit", "pip"], "3.11")
    assert len(uv.version_calls) == 1, "without a failure, no setting is looked for"
    uv.newest_cuda = "12.8.9"
    message = uv.resolver(tiny).reason(cell)
    assert "was taken, 12.8.9 (nvidia-cuda-runtime-cu12)" in message, "lock would refuse it"
    uv.result = 1, NO_SOLUTION
    assert uv.resolver(tiny).reason(cell).startswith(f"{cell.id}: cannot be resolved to wheels\n  No solution found")


# ---- errors


def test_an_unreachable_index_is_neither_a_conflict_nor_a_reason(tiny: Project, edit: Edit, uv: Uv) -> None:
    present = locks.lock_of(tiny, tiny.groups[NO_TOOLKIT])
    uv.result = 2, "error: Failed to fetch: https://index.example.test/simple/ember/"
    with pytest.raises(FetchError):
        uv.resolve(with_extra(edit), NO_TOOLKIT, present)
    assert uv.conflicts == []
    with pytest.raises(FetchError):
        uv.resolver(tiny).reason(tiny.cells[0])


def test_uv_uses_the_main_index_alone_and_gets_no_login(tiny: Project, uv: Uv, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_EXTRA_INDEX_URL", "UV_OFFLINE", "UV_INDEX_COMPANY_USERNAME", "UV_INDEX_COMPANY_PASSWORD"):
        monkeypatch.setenv(name, "1")
    uv.resolve(tiny, GROUP)
    assert "UV_OFFLINE" in uv.environ
    assert "UV_EXTRA_INDEX_URL" not in uv.environ
    assert not any("COMPANY" in name for name in uv.environ)


def test_the_mirror_is_not_named(tiny: Project, uv: Uv) -> None:
    uv.result = 2, "error: Failed to fetch: https://me:pw@mirror.example.test/simple/x/"
    resolver = uv.resolver(tiny, IndexSettings(url="https://me:pw@mirror.example.test/simple"))
    with pytest.raises(FetchError, match="Failed to fetch: https://<mirror>/simple/x/") as caught:
        resolver.lock(tiny.groups[GROUP], None, {})
    assert "pw" not in str(caught.value)


def test_a_uv_that_stalls(tiny: Project, uv: Uv) -> None:
    def stall(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, uv_program.TIMEOUT_S)

    resolver = uv.resolver(tiny)
    resolver.uv.run = stall
    with pytest.raises(FetchError, match="timed out"):
        resolver.lock(tiny.groups[GROUP], None, {})


def test_a_file_that_the_index_lists_but_does_not_have(tiny: Project, uv: Uv) -> None:
    def lose(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        done = uv(command, **options)
        for path in uv.wheels.glob("emberkit-*"):
            path.unlink()
        return done

    resolver = uv.resolver(tiny)
    resolver.uv.run = lose
    with pytest.raises(FetchError, match=r"does not serve emberkit-2\.0-py3-none-any\.whl"):
        resolver.lock(tiny.groups[GROUP], None, {})


def test_sizes_are_requested_with_the_settings_of_the_index(
    tiny: Project, uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were once requested without login, proxy and certificates."""
    wire = Wire.install(monkeypatch, lambda _: Reply(headers={"Content-Length": "7"}))
    monkeypatch.setattr(Path, "as_uri", lambda path: f"https://index.example.test/files/{path.name}")
    settings = IndexSettings(url="https://me:pw@index.example.test/simple", ca_bundle="/ca.pem")
    lock = uv.resolver(tiny, settings).lock(tiny.groups[NO_TOOLKIT], None, {})
    assert {wheel.size for wheel in lock.wheels} == {7}
    assert len(wire.seen) == len(lock.wheels)
    for sent in wire.seen:
        assert sent.method == "GET"
        assert sent.headers["Authorization"].startswith("Basic ")
        assert sent.options["verify"] == "/ca.pem"
    wire.answers = lambda _: Reply(status=403)
    with pytest.raises(FetchError, match="403 Forbidden"):
        uv.resolver(tiny, settings).lock(tiny.groups[NO_TOOLKIT], None, {})


# ---- indexes


def resolve_with_indexes(
    uv: Uv,
    project: Project,
    present: Lock | None = None,
    *,
    absent: Sequence[str] = (),
    failures: Sequence[FetchError] = (),
) -> Lock:
    """Resolves GROUP. `absent` and `failures` are what the local index saw."""

    def serve(*arguments: Any) -> AbstractContextManager[tuple[str, LocalIndex]]:
        local = LocalIndex(*arguments)
        local.absent += absent
        local.failures += failures
        return nullcontext(("http://127.0.0.1:1/s/simple/", local))

    resolver = uv.resolver(project, IndexSettings().with_index("company", "https://python.example.test/simple"))
    resolver.uv.serve = serve
    return resolver.lock(project.groups[GROUP], present, {})


@pytest.fixture
def company(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The tiny project, whose `notebook` comes from an index of its own."""
    monkeypatch.setenv("NETRC", "/nonexistent")
    edit("debian:\n", "indexes: {company: https://python.example.test/simple}\ndebian:\n")
    return edit("    packages: [notebook]\n", "    packages: [notebook]\n    index: company\n")


@pytest.mark.parametrize("has_lock", [False, True])
def test_the_index_of_a_wheel_is_locked(tiny: Project, company: Project, uv: Uv, has_lock: bool) -> None:
    """A locked wheel of another index is not kept."""
    lock = resolve_with_indexes(uv, company, locks.locks(tiny)[GROUP] if has_lock else None)
    assert {wheel.name: wheel.index for wheel in lock.wheels if wheel.index} == {"notebook": "company"}
    assert uv.environ["UV_DEFAULT_INDEX"].startswith("http://127.0.0.1:")
    assert uv.environ["NO_PROXY"] == "127.0.0.1"
    assert lockfile.stale_reason(company.matrix, lock, company.groups[GROUP]) == ""
    uv.calls.clear()
    assert resolve_with_indexes(uv, company, lock) == lock
    assert uv.calls == []


def test_a_package_that_its_index_does_not_have_is_named(company: Project, uv: Uv) -> None:
    uv.result = 1, NO_SOLUTION
    with pytest.raises(LockError, match="the index company has no package notebook") as caught:
        resolve_with_indexes(uv, company, absent=["pip", "notebook"])
    assert type(caught.value) is LockError


@pytest.mark.parametrize("result", [(0, ""), (1, NO_SOLUTION)])
def test_a_failure_of_an_index_is_not_one_of_the_requirements(
    company: Project, uv: Uv, result: tuple[int, str]
) -> None:
    """Even if uv found other versions, or blames the requirements."""
    uv.result = result
    failure = FetchError("notebook: the index company returned 403 Forbidden", hint="Give a login.")
    with pytest.raises(FetchError, match=str(failure)) as caught:
        resolve_with_indexes(uv, company, failures=[failure])
    assert caught.value.hint == failure.hint
