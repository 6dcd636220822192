"""facts.yaml as typed models: what no package's metadata says. Each entry names its source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import BaseModel, ConfigDict

from builder import strict_yaml

FILE = Path(__file__).with_name("facts.yaml")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Driver(_Model):
    minimum: str
    source: str


class Toolkits(_Model):
    """`drivers`: the driver that came with a CUDA, by its first two numbers."""

    drivers: dict[str, str]
    source: str


class Build(_Model):
    """`cuda` is what the wheel was compiled for; `architectures` as sm_90 (machine code) or compute_90 (PTX).

    `cudnn` is the major version, empty where the wheel does not say it.
    """

    cuda: str
    cudnn: str = ""
    architectures: list[str]
    source: str


class Generation(_Model):
    """GPUs of one compute capability: the first `cuda` that compiles for them, the `last` branch of drivers."""

    cuda: str
    last: str = ""
    names: list[str]
    source: str


class Trap(_Model):
    """Versions `affected` of `package` want `other` to be `wants`, which no metadata says.

    `required`: it must be there at all.
    """

    package: str
    affected: str
    other: str
    wants: str
    required: bool = False
    reason: str
    source: str

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


class Facts(_Model):
    """The whole file: `drivers` by CUDA major, `builds` by package and release, `gpus` by compute capability.

    `plugins` says which package has a framework's GPU code where its own does not, by CUDA major.
    """

    drivers: dict[str, Driver]
    toolkits: Toolkits
    plugins: dict[str, dict[str, str]]
    builds: dict[str, dict[str, Build]]
    gpus: dict[str, Generation]
    traps: list[Trap]

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
        return next((capability for capability, found in self.gpus.items() if name in found.names), "")

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

    def trap_of(self, versions: Mapping[str, str]) -> list[str]:
        """What packages want of each other and no metadata says, as lines; `versions` by canonical name."""
        return [told for trap in self.traps if (told := trap.violation(versions))]


@cache
def load() -> Facts:
    return Facts.model_validate(strict_yaml.load(FILE).data)
