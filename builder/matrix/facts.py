"""facts.yaml as typed models: facts that no package metadata has. Each entry names its source."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Annotated

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, Field, StringConstraints

from builder.common import strict_yaml, validation
from builder.common.errors import FileError
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import AMD64, PUBLIC_VERSION, Matrix, StrictModel, cuda_major, required_name

FILE = Path(__file__).with_name("facts.yaml")


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise ValueError("expected versions such as >=2.6,<2.21") from error
    return value


# Some of these are used in Dockerfiles and labels. In pydantic's patterns `$` does not match before a newline.
DriverVersion = Annotated[str, StringConstraints(pattern=r"^[0-9]{3}(\.[0-9]{1,4}){0,2}$")]
Branch = Annotated[str, StringConstraints(pattern=r"^([0-9]{3})?$")]
Major = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}$")]
CudaVersion = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}(\.[0-9]{1,4}){1,2}$")]
Minor = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")]
Capability = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]?\.[0-9]$")]
Architecture = Annotated[str, StringConstraints(pattern=r"^(sm|compute)_[1-9][0-9]{1,2}[af]?$")]
Package = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,60}(-[a-z0-9]{1,60}){0,9}$")]
Release = Annotated[str, StringConstraints(pattern=rf"^{PUBLIC_VERSION}(\+[a-z0-9.]{{1,20}})?$")]
GpuName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 -]{0,60}$")]
Specifier = Annotated[str, AfterValidator(_specifier), StringConstraints(pattern=r"^[0-9.,<>=!~*]{0,60}$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,300}$")]


class Driver(StrictModel):
    minimum: DriverVersion
    source: Line


class Toolkits(StrictModel):
    """`drivers`: the driver of each CUDA toolkit, by its first two numbers."""

    drivers: dict[Minor, DriverVersion]
    source: Line


class Build(StrictModel):
    """The CUDA that a wheel was compiled with, and its `architectures`: sm_90 (machine code) or compute_90 (PTX).

    `arm64` are the architectures of the wheel for that CPU, empty if they are not known or if it has no CUDA. `cudnn`
    is the major version, empty if the wheel does not record it.
    """

    cuda: CudaVersion
    cudnn: Annotated[str, StringConstraints(pattern=r"^[0-9]{0,2}$")] = ""
    architectures: list[Architecture]
    arm64: list[Architecture] = Field(default=[])
    source: Line


class Generation(StrictModel):
    """GPUs of one compute capability: the first `cuda` that compiles for them, the `last` driver branch for them.

    GPUs in `arm` exist only with an ARM CPU; without `names`, all GPUs of this compute capability do.
    """

    cuda: Minor
    last: Branch = ""
    names: list[GpuName]
    arm: list[GpuName] = Field(default=[])
    source: Line


class VersionConflict(StrictModel):
    """Versions `affected` of `package` need versions `wants` of `other`, which no metadata has.

    With `required`, `other` must be installed too.
    """

    package: Package
    affected: Specifier
    other: Package
    wants: Specifier
    required: bool = False
    reason: Line
    source: Line


class Caveat(StrictModel):
    """A flaw of images that run: of a `framework` in the matrix, by `cuda` and by `capabilities` of the GPU."""

    framework: Package
    cuda: Specifier
    capabilities: Specifier
    reason: Line
    source: Line


class DebianSupport(StrictModel):
    """The last days on which the security team and the LTS team make updates for a Debian release."""

    security: date
    lts: date | None = None
    source: Line


class VersionSupport(StrictModel):
    """The last day on which a version gets fixes of security problems."""

    last: date
    source: Line


class Support(StrictModel):
    """Ends of support: by name of the Debian release, by Python, by CUDA, and by package and line of a framework."""

    debian: dict[Package, DebianSupport]
    python: dict[Minor, VersionSupport]
    cuda: dict[Minor, VersionSupport]
    frameworks: dict[Package, dict[Minor, VersionSupport]]


class Facts(StrictModel):
    """The whole file: `drivers` by CUDA major, `builds` by package and release, `gpus` by compute capability.

    `plugins` names the package with the GPU code of a framework where it is not the framework's own, by CUDA major.
    """

    drivers: dict[Major, Driver]
    toolkits: Toolkits
    plugins: dict[Package, dict[Major, Package]]
    builds: dict[Package, dict[Release, Build]]
    gpus: dict[Capability, Generation]
    traps: list[VersionConflict]
    caveats: list[Caveat]
    support: Support

    def driver(self, cuda: str) -> str:
        """The oldest driver for CUDA `cuda`; empty if unknown."""
        driver = self.drivers.get(cuda_major(cuda))
        return driver.minimum if driver else ""

    def toolkit_driver(self, cuda: str) -> str:
        """The driver released with CUDA `cuda`, the oldest that compiles its PTX; empty if unknown."""
        return self.toolkits.drivers.get(".".join(cuda.split(".")[:2]), "")

    def build(self, package: str, release: str, cuda: str = "") -> Build | None:
        """The build of a release of a package; `cuda` selects among packages that are for one CUDA."""
        return self.builds.get(self.compiled_package(package, cuda), {}).get(release)

    def build_of_cell(self, matrix: Matrix, cell: Cell) -> Build | None:
        """The build of the framework of a cell.

        A named index has other builds of a release: their entries have a local version, such as 2.9.1+cu126.
        """
        build = self._build_for_amd64(matrix, cell)
        if build is None or cell.arch == AMD64:
            return build
        return build.model_copy(update={"architectures": build.arm64}) if build.arm64 else None

    def _build_for_amd64(self, matrix: Matrix, cell: Cell) -> Build | None:
        framework = matrix.frameworks[cell.framework]
        own = required_name(framework.package_for(cell.cuda))
        if own not in cells.indexes_of_packages(matrix, cell):
            return self.build(framework.package, cell.release, cell.cuda)
        builds = self.builds.get(self.compiled_package(framework.package, cell.cuda), {})
        others = (build for release, build in builds.items() if release.startswith(f"{cell.release}+"))
        return next((build for build in others if build.cuda == cell.cuda), None)

    def compiled_package(self, package: str, cuda: str) -> str:
        """The package whose wheel has the GPU code of `package`."""
        return self.plugins.get(package, {}).get(cuda_major(cuda), package)

    def first_cuda(self, capability: str) -> str:
        """The oldest CUDA whose machine code runs on this compute capability, or empty."""
        newest = Version(capability or "0")
        older = [key for key in self.gpus if Version(key).major == newest.major and Version(key) <= newest]
        return min((self.gpus[key].cuda for key in older), key=Version, default="")

    def caveats_of(self, framework: str, cuda: str, capability: str) -> list[str]:
        """Known flaws of a framework with this CUDA on GPUs of this compute capability, as lines."""
        return [
            caveat.reason
            for caveat in self.caveats
            if caveat.framework == framework
            and SpecifierSet(caveat.cuda).contains(cuda)
            and SpecifierSet(caveat.capabilities).contains(capability)
        ]

    def violations(self, versions: Mapping[str, str]) -> list[str]:
        """Conflicts between packages that no metadata has, as lines; `versions` by canonical name."""
        lines = []
        for conflict in self.traps:
            version, other = versions.get(conflict.package), versions.get(conflict.other)
            if version is None or not SpecifierSet(conflict.affected).contains(version, prereleases=True):
                continue
            if other is None and not conflict.required:
                continue
            if other is None or not SpecifierSet(conflict.wants).contains(other, prereleases=True):
                found = "" if other is None else f", not {other}"
                needed = f"{conflict.other}{conflict.wants}{found}"
                lines.append(f"{conflict.package} {version} needs {needed}: {conflict.reason}")
        return lines


@cache
def load_facts() -> Facts:
    """The facts of this program. Raises FileError with every fault and its place, and MatrixError for invalid YAML."""
    located = strict_yaml.load_yaml(FILE)
    return validation.validate(located, Facts, FileError, "Correct it, as in the entries next to it.")
