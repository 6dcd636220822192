"""Checks builder/matrix/facts.yaml against the wheels on the index: python -m tools.facts.

Wheels are not downloaded whole: their directory and single files are read by HTTP range requests.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from builder.cli import SETTINGS, main
from builder.cli.context import Context
from builder.cli.options import debug_option
from builder.common import errors
from builder.common.errors import FetchError, StaleError, UsageError
from builder.index.releases import Index
from builder.index.session import DOCTOR, IndexSession, fetch_errors
from builder.index.wheels import PLATFORMS
from builder.lock.lockfile import TOOLKIT
from builder.matrix import facts
from builder.matrix.facts import Build, Facts
from builder.matrix.schema import AMD64, ARM64, CPU, Matrix

if TYPE_CHECKING:
    from zipfile import ZipFile

_FLAGS = re.compile(rb"((?:(?:sm|compute)_[0-9]{2,3}[af]? )+(?:sm|compute)_[0-9]{2,3}[af]?)\0")
# "Release Notes" of the PTX ISA, table "PTX Release History": the first CUDA with each version of PTX.
_CUDA_OF_PTX = {
    "8.0": "12.0", "8.1": "12.1", "8.2": "12.2", "8.3": "12.3", "8.4": "12.4", "8.5": "12.5", "8.6": "12.7",
    "8.7": "12.8", "8.8": "12.9", "9.0": "13.0", "9.1": "13.1", "9.2": "13.2", "9.3": "13.3",
}  # fmt: skip
# A fat binary begins with its magic number, format (1) and header length (16), then the length of what follows.
_FATBIN = struct.Struct("<8sQ")
_FATBIN_START = bytes.fromhex("50ed55ba01001000")
# Kind (1 PTX, 2 machine code), format, lengths of header and content, 8 bytes, version (minor, major), architecture.
_ENTRY = struct.Struct("<HHIQ8xHHI")
_PTX = 1
_UNREADABLE = (KeyError, ValueError, SyntaxError, struct.error)  # of a wheel without this information


@click.command(context_settings=SETTINGS)
@click.argument("requirements", metavar="[PACKAGE==VERSION]...", nargs=-1)
@debug_option
@click.pass_obj
def check_facts(context: Context, requirements: Sequence[str]) -> None:
    """Check builder/matrix/facts.yaml against the wheels on the index.

    The file lists the CUDA version and the GPU architectures that each framework release was compiled for, which are
    not in any metadata. Without arguments, checks the releases in matrix.yaml. Shows the entry to add if one is
    missing. Reads single files of the wheels, at most 12 MB each, and installs nothing.
    """
    known = facts.load_facts()
    releases = [exact_release(text) for text in requirements] or _releases_in(context.project.matrix, known)
    session = IndexSession(context.host.index)

    def check(release: tuple[str, Version]) -> None:
        package, version = release
        context.say(f"{package} {version}: reading the wheel")
        build = read_build(session, package, version)
        if difference := compare(known.builds.get(package, {}).get(str(version)), build, package, version):
            raise StaleError(f"{package} {version}: {difference}")
        click.echo(f"{package} {version}: same: CUDA {build.cuda}, {' '.join(build.architectures)}")

    errors.collect(check, releases, "releases failed")


def missing_builds(catalogue: Index, known: Facts) -> Iterator[tuple[str, Version]]:
    """Package and release of each build that facts.yaml lacks: the newest release of each version."""
    for package, releases in known.builds.items():
        for release in _missing_releases(catalogue, package, releases):
            yield package, release


def missing_versions(catalogue: Index, known: Facts) -> Iterator[str]:
    """A line for each version of CUDA that facts.yaml lacks, and where to read about it."""
    for release in _missing_releases(catalogue, TOOLKIT, known.toolkits.drivers):
        yield f"toolkits.drivers lacks CUDA {release.major}.{release.minor}: see {known.toolkits.source}"


def _missing_releases(catalogue: Index, package: str, known: Iterable[str]) -> list[Version]:
    """The newest release of each version that is not known, by two numbers, and newer than the oldest known one."""
    lines = {Version(version).release[:2] for version in known}
    stable = [release.version for release in catalogue.package(package).releases if release.is_stable]
    newest = {version.release[:2]: version for version in stable}  # the oldest are listed first
    return [version for line, version in newest.items() if line not in lines and line > min(lines)]


def exact_release(text: str) -> tuple[str, Version]:
    """Package and version of a requirement such as torch==2.9.1. Raises UsageError."""
    try:
        requirement = Requirement(text)
        (pin,) = requirement.specifier
        if pin.operator == "==":
            return canonicalize_name(requirement.name), Version(pin.version)  # raises for "2.9.*"
    except (InvalidRequirement, ValueError):
        pass
    raise UsageError(f"{text!r} is not an exact release: use e.g. torch==2.9.1")


def _releases_in(matrix: Matrix, known: Facts) -> list[tuple[str, Version]]:
    """Package and version of all GPU code in the matrix."""
    releases = {
        (known.compiled_package(framework.package, cuda), Version(entry.release)): None
        for framework in matrix.frameworks.values()
        for entry in framework.versions.values()
        for cuda in entry.cuda
        if cuda != CPU
    }
    return list(releases)


def compare(known: Build | None, build: Build, package: str, version: Version) -> str:
    """How the entry in facts.yaml differs from the build in a wheel; empty if it does not."""
    if known is None:
        return f"missing in builder/matrix/facts.yaml; add to builds.{package}:\n    {entry_of(build, version)}"
    pairs = {
        "CUDA": (known.cuda, build.cuda),
        "cuDNN": (known.cudnn, build.cudnn),
        "architectures": (" ".join(known.architectures), " ".join(build.architectures)),
        "arm64": (" ".join(known.arm64), " ".join(build.arm64)),
    }
    differences = [f"{name} {new or 'none'}, not {old or 'none'}" for name, (old, new) in pairs.items() if old != new]
    return f"correct builder/matrix/facts.yaml: the wheel has {'; '.join(differences)}" if differences else ""


def entry_of(build: Build, version: Version) -> str:
    """The line of a build in facts.yaml."""
    cudnn = f', cudnn: "{build.cudnn}"' if build.cudnn else ""
    architectures = f"architectures: [{', '.join(build.architectures)}]"
    architectures += f", arm64: [{', '.join(build.arm64)}]" if build.arm64 else ""
    return f'{version}: {{cuda: "{build.cuda}"{cudnn}, {architectures}, source: {build.source}}}'


def read_build(session: IndexSession, package: str, version: Version) -> Build:
    """What a release was compiled for, also on arm64. Raises UsageError for an unknown package, else FetchError."""
    if package not in _READERS:
        raise UsageError(
            f"cannot read from {package} what it was compiled for", hint=f"Supported packages: {', '.join(_READERS)}."
        )
    with fetch_errors(f"{package} {version}", session):
        files = sorted(session.files(package), key=lambda file: file.filename)
        if not files:
            raise FetchError(f"{package}: not found on the index", hint=DOCTOR)
        # The first wheel for Linux on each architecture.
        of_arch = {
            arch: next((file for file in files if _is_of(file.filename, version, platform)), None)
            for arch, platform in PLATFORMS.items()
        }
        if (file := of_arch[AMD64]) is None:
            raise FetchError(
                f"{package} {version}: no wheel for Linux on x86-64 on the index",
                hint="Check that this release exists.",
            )
        with session.open_wheel(file.url) as wheel:
            try:
                build = _READERS[package](wheel)
            except _UNREADABLE as error:
                raise FetchError(
                    f"{package} {version}: cannot find in {file.filename} what it was compiled for",
                    hint="It may be a CPU build. Otherwise extend tools/facts.py.",
                ) from error
        if file := of_arch[ARM64]:
            with session.open_wheel(file.url) as wheel, suppress(*_UNREADABLE):  # it may be a CPU build
                return build.model_copy(update={"arm64": _READERS[package](wheel).architectures})
        return build


def _is_of(filename: str, release: Version, platform: str) -> bool:
    try:
        _, version, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:  # a source distribution
        return False
    return version == release and any("linux" in tag.platform and platform in tag.platform for tag in tags)


def _torch(wheel: ZipFile) -> Build:
    cuda = _constants(wheel.read("torch/version.py").decode()).get("cuda")
    name = "torch/lib/libtorch_python.so"
    flags = _FLAGS.search(wheel.read(name))
    if not cuda or not flags:
        raise ValueError
    return Build(
        cuda=str(cuda),
        architectures=flags[1].decode().split(),
        source=f"torch/version.py; torch._C._cuda_getArchFlags() in {name}",
    )


def _tensorflow(wheel: ZipFile) -> Build:
    name = "tensorflow/python/platform/build_info.py"
    pairs = _constants(wheel.read(name).decode())["build_info"]
    if not isinstance(pairs, list):
        raise ValueError
    info = dict(pairs)
    return Build(
        cuda=info["cuda_version"],
        cudnn=str(info["cudnn_version"]).split(".", maxsplit=1)[0],
        architectures=info["cuda_compute_capabilities"],
        source=name,
    )


def _jax_plugin(wheel: ZipFile) -> Build:
    """JAX has no text file with this information; the headers of the fat binaries in its libraries have it."""
    entries: set[tuple[str, str, int]] = set()
    for info in wheel.infolist():
        if info.filename.endswith(".so"):
            entries.update(fat_binaries(wheel.read(info)))
    ptx = max(Version(version) for version, kind, _ in entries if kind == "compute")
    # Machine code before PTX, older before newer.
    architectures = sorted({(kind != "sm", number, kind) for _, kind, number in entries})
    return Build(
        cuda=_CUDA_OF_PTX[str(ptx)],
        architectures=[f"{kind}_{number}" for _, number, kind in architectures],
        source="headers of the fat binaries in the wheel",
    )


_READERS: dict[str, Callable[[ZipFile], Build]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax-cuda12-plugin": _jax_plugin,
    "jax-cuda13-plugin": _jax_plugin,
}


def fat_binaries(library: bytes) -> Iterator[tuple[str, str, int]]:
    """Version, `sm` or `compute`, and number of every piece of GPU code in a library, as `cuobjdump` lists them."""
    start = library.find(_FATBIN_START)
    while start >= 0:
        _, size = _FATBIN.unpack_from(library, start)
        offset = start + _FATBIN.size
        end = offset + size
        while offset < end:
            kind, _, header, length, minor, major, number = _ENTRY.unpack_from(library, offset)
            yield f"{major}.{minor}", "compute" if kind == _PTX else "sm", number
            if not header:
                raise ValueError("a fat binary's entry without a header")
            offset += header + length
        start = library.find(_FATBIN_START, end)


def _constants(source: str) -> dict[str, object]:
    """Names and values that a module assigns as literals; the module is not run."""
    values: dict[str, object] = {}
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _literal(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                values[name] = _literal(value)
    return values


def _literal(node: ast.expr | None) -> object:
    """The value of a literal; of a call such as collections.OrderedDict([...]) that of its argument; else None."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    try:
        return ast.literal_eval(node) if node else None
    except ValueError:
        return None


if __name__ == "__main__":
    main(check_facts, obj=Context())
