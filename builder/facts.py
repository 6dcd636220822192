"""facts.yaml as typed models: what no package's metadata says. Each entry names its source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError

from builder import strict_yaml
from builder.errors import FileError

FILE = Path(__file__).with_name("facts.yaml")


def _specifier(value: str) -> str:
    try:
        SpecifierSet(value)
    except InvalidSpecifier as error:
        raise ValueError("expected versions such as >=2.6,<2.21") from error
    return value


# Some of these end up in a Dockerfile and in labels. In pydantic's patterns `$` is the end alone, no newline before it.
DriverVersion = Annotated[str, StringConstraints(pattern=r"^[0-9]{3}(\.[0-9]{1,4}){0,2}$")]
Branch = Annotated[str, StringConstraints(pattern=r"^([0-9]{3})?$")]
Major = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}$")]
CudaVersion = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}(\.[0-9]{1,4}){1,2}$")]
Minor = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$")]
Capability = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]?\.[0-9]$")]
Architecture = Annotated[str, StringConstraints(pattern=r"^(sm|compute)_[1-9][0-9]{1,2}[af]?$")]
Package = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,60}(-[a-z0-9]{1,60}){0,9}$")]
Release = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){1,3}$")]
GpuName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 -]{0,60}$")]
Specifier = Annotated[str, AfterValidator(_specifier), StringConstraints(pattern=r"^[0-9.,<>=!~*]{0,60}$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,300}$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Driver(_Model):
    minimum: DriverVersion
    source: Line


class Toolkits(_Model):
    """`drivers`: the driver that came with a CUDA, by its first two numbers."""

    drivers: dict[Minor, DriverVersion]
    source: Line


class Build(_Model):
    """`cuda` is what the wheel was compiled for; `architectures` as sm_90 (machine code) or compute_90 (PTX).

    `cudnn` is the major version, empty where the wheel does not say it.
    """

    cuda: CudaVersion
    cudnn: Annotated[str, StringConstraints(pattern=r"^[0-9]{0,2}$")] = ""
    architectures: list[Architecture]
    source: Line


class Generation(_Model):
    """GPUs of one compute capability: the first `cuda` that compiles for them, the `last` branch of drivers.

    Those of `arm` come only with an ARM CPU; with no `names`, so does every GPU of this compute capability.
    """

    cuda: Minor
    last: Branch = ""
    names: list[GpuName]
    arm: list[GpuName] = []
    source: Line


class Trap(_Model):
    """Versions `affected` of `package` want `other` to be `wants`, which no metadata says.

    `required`: it must be there at all.
    """

    package: Package
    affected: Specifier
    other: Package
    wants: Specifier
    required: bool = False
    reason: Line
    source: Line

    def violation(self, versions: Mapping[str, str]) -> str:
        """What is wrong with these packages, in one line; empty if nothing is."""
        mine, its = versions.get(self.package), versions.get(self.other)
        if mine is None or not SpecifierSet(self.affected).contains(mine, prereleases=True):
            return ""
        if its is None:
            return f"{self.package} {mine} takes {self.other}{self.wants}: {self.reason}" if self.required else ""
        if SpecifierSet(self.wants).contains(its, prereleases=True):
            return ""
        return f"{self.package} {mine} takes {self.other}{self.wants}, not {its}: {self.reason}"


class Caveat(_Model):
    """A flaw of images that run: of a `framework` of the matrix, by its `cuda` and the GPU's `capabilities`."""

    framework: Package
    cuda: Specifier
    capabilities: Specifier
    reason: Line
    source: Line


class Facts(_Model):
    """The whole file: `drivers` by CUDA major, `builds` by package and release, `gpus` by compute capability.

    `plugins` says which package has a framework's GPU code where its own does not, by CUDA major.
    """

    drivers: dict[Major, Driver]
    toolkits: Toolkits
    plugins: dict[Package, dict[Major, Package]]
    builds: dict[Package, dict[Release, Build]]
    gpus: dict[Capability, Generation]
    traps: list[Trap]
    caveats: list[Caveat]

    def driver(self, cuda: str) -> str:
        """Oldest driver that runs CUDA `cuda`; empty if the file does not know that major version."""
        found = self.drivers.get(cuda.split(".", maxsplit=1)[0])
        return found.minimum if found else ""

    def toolkit_driver(self, cuda: str) -> str:
        """The driver that came with CUDA `cuda`: no older one compiles its PTX. Empty if the file does not know it."""
        return self.toolkits.drivers.get(".".join(cuda.split(".")[:2]), "")

    def build(self, package: str, release: str, cuda: str = "") -> Build | None:
        """`cuda` is needed where each CUDA has a package of its own."""
        package = self.compiled_package(package, cuda)
        return self.builds.get(package, {}).get(release)

    def compiled_package(self, package: str, cuda: str) -> str:
        """The package whose wheel has the GPU code of `package`."""
        return self.plugins.get(package, {}).get(cuda.split(".", maxsplit=1)[0], package)

    def capability(self, name: str) -> str:
        """Compute capability of a GPU by its name in this file, or empty."""
        return next((capability for capability, found in self.gpus.items() if name in found.names + found.arm), "")

    def first_cuda(self, capability: str) -> str:
        """The oldest CUDA whose machine code runs on this compute capability, or empty."""
        known = [Version(one) for one in self.gpus]
        mine = Version(capability or "0")
        return min(
            (self.gpus[str(one)].cuda for one in known if one.major == mine.major and one <= mine),
            key=Version,
            default="",
        )

    def first_driver(self, capability: str) -> str:
        """The oldest driver that knows GPUs of this compute capability, or empty."""
        found = self.gpus.get(capability)
        return self.toolkit_driver(found.cuda) if found else ""

    def last_branch(self, capability: str) -> str:
        """The last driver branch that knows them, such as 580; empty if today's does."""
        found = self.gpus.get(capability)
        return found.last if found else ""

    def caveats_of(self, framework: str, cuda: str, capability: str) -> list[str]:
        """Known flaws of a framework with this CUDA on GPUs of this compute capability, as lines."""
        return [
            one.reason
            for one in self.caveats
            if one.framework == framework
            and SpecifierSet(one.cuda).contains(cuda)
            and SpecifierSet(one.capabilities).contains(capability)
        ]

    def trap_of(self, versions: Mapping[str, str]) -> list[str]:
        """What packages want of each other and no metadata says, as lines; `versions` by canonical name."""
        return [told for trap in self.traps if (told := trap.violation(versions))]


def read(path: Path) -> Facts:
    """Raises a FileError with the place of the first fault; what is no YAML is a MatrixError, as everywhere."""
    located = strict_yaml.load(path)
    try:
        return Facts.model_validate(located.data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        is_key = first["loc"][-1:] == ("[key]",)
        place = first["loc"][:-1] if is_key else first["loc"]
        raise FileError(
            f"{located.where(place, key=is_key)}: {'.'.join(map(str, place))}: {first['msg']}",
            hint="Correct it; the entries next to it show the form.",
        ) from None


@cache
def load() -> Facts:
    return read(FILE)
