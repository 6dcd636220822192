"""matrix.yaml as typed models, and all its checks. `builder.matrix.reader` reads the file.

The patterns here restrict every value that is used in a Dockerfile, a shell or a path, so that no other module has to
quote or check it. Only values of environment variables are any printable text: `builder.plan.render` quotes them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from builder.common import strict_yaml, validation
from builder.common.errors import did_you_mean
from builder.common.reference import ImageRef, staged_repository
from builder.common.strict_yaml import Key

Fault = tuple[Key, str]  # the place of a value, and what is wrong with it
CPU = "cpu"  # the value of the CUDA axis for images without CUDA
Arch = Literal["amd64", "arm64"]  # as in images and Debian; arm64 with an NVIDIA GPU is SBSA: Grace, Thor
AMD64: Arch = "amd64"
ARM64: Arch = "arm64"
NOT_BUILT = "not-built"
# Every Debian release and every framework names a set, too.
BUILT_IN_SETS = ("all", "unsupported", NOT_BUILT, ARM64)
OTHERS = "*"  # in a mapping by CUDA version: all others
SBOM = "{sbom}"  # in the arguments of a scanner: the path of the SBOM
IMAGE, COMMAND = "{image}", "{command}"  # in the words of the command for GPU tests
WORD_PLACEHOLDER = re.compile(r"(?<!\$)\{[a-z_]+\}")  # `${name}` is a variable of a shell
LONGEST_VARIABLE = 4096  # characters; more than any flags need, and easily read
PATH_OF_CHECKOUT = r"\w[\w.-]{0,99}(/\w[\w.-]{0,99}){0,9}"  # never through `..`
_DISTRIBUTION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}(\[[A-Za-z0-9._,-]{1,60}\])?"


def cuda_major(cuda: str) -> str:
    """The first number of a CUDA version, `12` of 12.8; `cpu` of cpu."""
    return cuda.partition(".")[0]


def required_name(requirement: str) -> str:
    """The normalized name of the package that a requirement is for, `jax` of JAX[cuda12]>=0.10."""
    return canonicalize_name(Requirement(requirement).name)


def matches(pattern: str, expected: str) -> AfterValidator:
    """A check of a text; `expected` is for its message."""
    compiled = re.compile(pattern, re.ASCII)  # fullmatch and ASCII: `$` admits a newline, `\d` other digits

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


def _unique(values: list[str]) -> list[str]:
    """A list without duplicates, such as names: the second of two would have no effect."""
    validation.raise_faults(
        ((index,), f"duplicate {value!r}") for index, value in enumerate(values) if value in values[:index]
    )
    return values


def _items(names: list[str]) -> dict[int, str]:
    return dict(enumerate(names))


def _keys(mapping: Mapping[str, object]) -> dict[str, str]:
    return {name: name for name in mapping}


def _requirement(value: str) -> str:
    try:
        requirement = Requirement(value)
    except InvalidRequirement as error:
        raise ValueError("expected a Python requirement such as torchvision>=0.24") from error
    if requirement.url:
        raise ValueError(
            "expected a requirement without an address: put its wheel on an index, or into a folder of wheels"
        )
    if not re.fullmatch(r"[A-Za-z0-9 ._,<>=!~;()\[\]'\"+*-]+", value, re.ASCII):
        raise ValueError("expected a requirement on one line, in plain characters")
    return value


def _constraint(value: str) -> str:
    if Requirement(_requirement(value)).extras:
        raise ValueError("expected a constraint such as numpy<2, without extras")
    return value


def _variable(value: str) -> str:
    if not value.isprintable() or len(value) > LONGEST_VARIABLE:
        raise ValueError(f"expected one line of printable characters, at most {LONGEST_VARIABLE}")
    return value


def _command_word(value: str) -> str:
    if unknown := set(WORD_PLACEHOLDER.findall(value)) - {IMAGE, COMMAND}:
        names = f"{IMAGE} and {COMMAND}"
        raise ValueError(f"unknown placeholder {min(unknown)}: use {names}; put other braces into a script")
    return value


def _pinned(value: str) -> str:
    if not ImageRef.parse(value).digest:
        raise ValueError("expected an image pinned by digest: name:tag@sha256:...")
    return value


def _registry(value: str) -> str:
    if value:
        ImageRef(registry=value, repository="x")
    return value


def _staging(value: str) -> str:
    if value:
        staged_repository(value, "", "x")
    return value


def _namespace(value: str) -> str:
    ImageRef(repository=value)
    return value


def _valid_host(value: str) -> str:
    """An address, after a check of its IPv6 address and its port."""
    parts = urlsplit(value)
    if parts.port == 0:
        raise ValueError("expected a port from 1 to 65535")
    if ":" in (host := parts.hostname or ""):
        ipaddress.IPv6Address(host)
    return value


def _license(value: str) -> str:
    try:
        return canonicalize_license_expression(value) if value else ""
    except InvalidLicenseExpression as error:
        raise ValueError("expected an SPDX license expression such as Apache-2.0") from error


def _arch(value: object) -> object:
    """A list of architectures, for every CUDA version."""
    return {OTHERS: value} if isinstance(value, list) else value


Name = Annotated[str, matches(r"[a-z][a-z0-9]{0,23}", "a short name of lower-case letters and digits")]
Names = Annotated[list[Name], AfterValidator(_unique)]
Short = Annotated[str, matches(r"[a-z]{1,8}", "one to eight lower-case letters")]
# Indexes write versions without leading zeros, and so must tags: 02.9.1 is 2.9.1.
_SHORT, _LONG = "(0|[1-9][0-9]?)", "(0|[1-9][0-9]{0,3})"
Line = Annotated[str, matches(rf"{_LONG}(\.{_LONG}){{1,2}}", 'a version such as "2.9"')]
Minor = Annotated[str, matches(rf"{_SHORT}\.{_SHORT}", 'a version of two numbers such as "3.11"')]
CudaName = Annotated[str, matches(rf"{_SHORT}\.{_SHORT}|cpu", 'a version such as "12.8", or cpu')]
CudaOrOthers = Annotated[str, matches(rf"{_SHORT}\.{_SHORT}|cpu|\*", 'a version such as "12.8", cpu, or "*"')]
CudaMajor = Annotated[str, matches(f"{_SHORT}|cpu", "the first number of a CUDA version, or cpu")]
Distribution = Annotated[str, matches(_DISTRIBUTION, "the name of a package, without a version")]
ImageName = Annotated[str, matches(r"[a-z0-9]+(-[a-z0-9]+)*", "an image name such as pt-cuda")]
Bytes = Annotated[str, matches(r"[0-9]{1,6}(\.[0-9]{1,3})?(MB|GB)", "a size such as 4.3GB or 900MB")]
Release = Annotated[str, matches(rf"{_LONG}(\.{_LONG}){{1,3}}", 'a full version such as "2.9.1"')]
# A normalized public version of PEP 440: with a suffix for a pre-release, a post-release or one of development.
PUBLIC_VERSION = rf"{_LONG}(\.{_LONG}){{1,3}}((a|b|rc){_LONG})?(\.post{_LONG})?(\.dev(0|[1-9][0-9]{{0,9}}))?"
PublicVersion = Annotated[
    str,
    matches(PUBLIC_VERSION, 'a full version such as "2.9.1" or "2.10.0rc1", without a local version such as +cu128'),
]
DEBIAN_PACKAGE = r"[a-z0-9][a-z0-9+.-]{1,99}"
AptPackage = Annotated[str, matches(DEBIAN_PACKAGE, "the name of a Debian package")]
File = Annotated[str, matches(PATH_OF_CHECKOUT, "a file of the checkout such as keys/ci.pub")]
Address = Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9@:/._~+-]{3,299}", "an address such as https://example.com")]
PackageName = Annotated[str, AfterValidator(_requirement)]
Constraint = Annotated[str, AfterValidator(_constraint)]
License = Annotated[str, AfterValidator(_license)]
Word = Annotated[
    str,
    matches(r"[A-Za-z0-9_./:=+-]{1,200}", "one word of plain characters"),
    matches(r"(?!(.*[/:=])?\.\.([/:]|$)).*", "one word of plain characters, without .. as a folder"),
]
Argument = Annotated[str, matches(r"[^\x00-\x1f\x7f]{1,300}", "one line of 1 to 300 characters")]
EnvName = Annotated[  # LD_PRELOAD and LD_AUDIT would load a library into every program, even of root
    str, matches(r"(?!LD_(PRELOAD|AUDIT)$)[A-Z][A-Z0-9_]{0,63}", "a variable such as OMP_NUM_THREADS")
]
EnvValue = Annotated[str, AfterValidator(_variable)]  # may be empty: CUDA_VISIBLE_DEVICES="" hides all GPUs
CommandWord = Annotated[str, AfterValidator(_variable), AfterValidator(_command_word)]
_CLOSED = r"([^{}\[\]]|\{[^{}]*\}|\[!?[^\]{}]+\])*"  # nested braces are not supported
Pattern = Annotated[
    str,
    matches(r"[a-z0-9.*?\[\]!{},-]{1,200}", "a pattern of cell ids"),
    matches(_CLOSED, "a pattern whose brackets are all closed, such as pt-*-{jupyter,full}"),
]
Reason = Annotated[str, matches(r"[^\x00-\x1f\x7f]{10,300}", "a reason of one line")]
PinnedImage = Annotated[str, AfterValidator(_pinned)]
Repository = Annotated[str, AfterValidator(_registry)]
NamedRegistry = Annotated[Repository, matches(r".+", "a registry such as registry.example.com:5000")]
Staging = Annotated[str, AfterValidator(_staging)]
Namespace = Annotated[str, AfterValidator(_namespace)]
Source = Annotated[str, matches(r"(https://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~-]+)+/?)?", "an https address")]
_ARCHIVE = r"http://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~-]+)*"
Archive = Annotated[  # a new operating system has no certificates yet; apt checks signatures
    str, matches(_ARCHIVE, "an http address such as http://archive.example.com, without a slash at the end")
]
IndexName = Annotated[str, matches(r"[a-z][a-z0-9]{0,23}(-[a-z0-9]{1,24}){0,3}", "a name such as pytorch-cu126")]
_ADDRESS = r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/([A-Za-z0-9._~+@-]|%[0-9A-Fa-f]{2})+)*/?"
IndexPlace = Annotated[
    str,
    matches(
        rf"{_ADDRESS}|{PATH_OF_CHECKOUT}/?",
        "an address such as https://python.example.com/simple, without a login (docs/matrix.md has its places), "
        "or a folder of the checkout such as wheels/",
    ),
    AfterValidator(_valid_host),
]
NO_SNAPSHOT = "none"
Snapshot = Annotated[
    str,
    matches(
        rf"{NO_SNAPSHOT}|{_ARCHIVE}",
        "an http address such as http://snapshot.example.com/archive, without a slash at the end, or none",
    ),
]


class StrictModel(BaseModel):
    """A frozen model without unknown keys or conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Debian(StrictModel):
    """A Debian release. `archive` is the address that it has moved to, `snapshot` that of an archive of all versions.

    Both have `debian` and `debian-security` below them. Without `snapshot`, a build uses the one that apt has by
    default; `none`: no snapshot archive. `ignore_valid_until` is the reason to accept Release files that have expired;
    without a reason, they are refused. `after_support`, here and below, is the reason to release images after the end
    of support in facts.yaml.
    """

    image: PinnedImage
    glibc: Minor
    archive: Archive = ""
    snapshot: Snapshot = ""
    ignore_valid_until: Reason = ""
    after_support: Reason = ""


class Python(StrictModel):
    """Debian's Python, from the packages `apt`, or the release `uv` of uv's builds, on a Debian release.

    `not_built` is the reason that its images are locked but were not built and tested yet.
    """

    debian: Name
    apt: list[AptPackage] | None = None
    uv: Release | None = None
    after_support: Reason = ""
    not_built: Reason = ""

    @model_validator(mode="after")
    def _installs_something(self) -> Self:
        if not self.packages and not self.uv:  # the image had no Python, which the build found out minutes later
            fault = "no packages: delete `apt`, or add `uv` with a full release"
            validation.raise_faults([(("apt",), fault)])
        return self

    @property
    def packages(self) -> list[str]:
        """The Debian packages to install."""
        return self.apt if self.apt is not None else [] if self.uv else ["python3", "python3-venv"]


class Cuda(StrictModel):
    """A CUDA version. `toolkit` is the release of NVIDIA's metapackage `cuda-toolkit` for what no framework pins.

    `env` are environment variables of its images.
    """

    toolkit: Release | None = None
    env: dict[EnvName, EnvValue] = {}
    after_support: Reason = ""


class FrameworkVersion(StrictModel):
    """A line of a framework. `constraints` bound versions of dependencies; `components` are those that only it needs.

    `index` is the index of the framework's package and of `packages`, empty for the default; `index_on` overrides it by
    CUDA version. `arch` has the architectures, by CUDA version if they differ.
    """

    release: PublicVersion
    cuda: Annotated[list[CudaName], AfterValidator(_unique)] = Field(min_length=1)
    python: Annotated[list[Minor], AfterValidator(_unique)] = Field(min_length=1)
    packages: list[PackageName] = []
    constraints: list[Constraint] = []
    components: Names = []
    index: IndexName | None = None
    index_on: dict[CudaName, IndexName] = {}
    arch: Annotated[
        dict[CudaOrOthers, Annotated[list[Arch], Field(min_length=1), AfterValidator(_unique)]],
        BeforeValidator(_arch),
        Field(min_length=1),
    ] = {OTHERS: [AMD64]}
    after_support: Reason = ""

    def arch_on(self, cuda: str) -> list[Arch]:
        """The architectures of its images with a CUDA version."""
        return self.arch.get(cuda) or self.arch.get(OTHERS, [AMD64])


class Framework(StrictModel):
    """A framework. `package_on` overrides `package` by CUDA major; `cpu_image` overrides `image` on the cpu.

    `license` is its own licence, an SPDX expression; empty if unknown.
    """

    short: Short
    image: ImageName
    cpu_image: ImageName | None = None
    package: Distribution
    package_on: dict[CudaMajor, Distribution] = {}
    license: License = ""
    versions: dict[Line, FrameworkVersion] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_a_name_for_the_cpu(self) -> Self:
        lines = [line for line, entry in self.versions.items() if CPU in entry.cuda and not self.cpu_image]
        # `quartz-cuda:0.5-cpu` would contradict itself.
        fault = "no image name for the cpu: add `cpu_image:` to the framework"
        validation.raise_faults((("versions", line, "cuda"), fault) for line in lines)
        return self

    def package_for(self, cuda: str) -> str:
        """The package to install for a CUDA version, or for `cpu`."""
        return self.package_on.get(cuda_major(cuda), self.package)

    def image_for(self, cuda: str) -> str:
        return self.cpu_image if cuda == CPU and self.cpu_image else self.image


class Selection(StrictModel):
    """Cells, and the reason that these cells, or all others, are left out."""

    cells: Pattern
    reason: Reason


class Component(StrictModel):
    """A component. `only_on` are the CUDA majors (or `cpu`) with it; empty for all.

    A variant with the component exists for the cells of `only` alone; without it, for all.

    `index` is the index of its `packages`, in every image, also if another package requires them.
    """

    needs: Names = []
    only_on: Annotated[list[CudaMajor], AfterValidator(_unique)] = []
    only: Selection | None = None
    apt: list[AptPackage] = []
    packages: list[PackageName] = []
    index: IndexName | None = None
    env: dict[EnvName, EnvValue] = {}
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    command: list[Word] = []
    healthcheck: list[Word] = []

    @model_validator(mode="after")
    def _has_packages_for_its_index(self) -> Self:
        if self.index and not self.packages:
            validation.raise_faults([(("index",), "no effect: the component has no `packages`")])
        return self


class Inclusion(StrictModel):
    cell: Pattern
    reason: Reason


class Budget(StrictModel):
    """The largest images of `cells` and layers of them allowed, compressed, and the largest images unpacked."""

    cells: Pattern
    image: Bytes
    layer: Bytes
    unpacked: Bytes | None = None


class Trusted(StrictModel):
    """A trusted signer: a public `key` in the checkout, or an OIDC `identity` with its `issuer`."""

    key: File = ""
    identity: Address = ""
    issuer: Address = ""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if bool(self.key) == bool(self.identity) or bool(self.identity) != bool(self.issuer):
            raise ValueError("expected a key, or an identity with its issuer")
        return self

    @property
    def name(self) -> str:
        return self.key or self.identity


class Scan(StrictModel):
    """The command that scans an SBOM; its exit status decides. It runs for `parallel` images at the same time.

    Some scanners lock their cache. A release checks four images at a time.
    """

    command: list[Argument] = Field(min_length=1)
    parallel: Annotated[int, Field(ge=1, le=4)] = 1

    @model_validator(mode="after")
    def _has_sbom(self) -> Self:
        if not any(SBOM in argument for argument in self.command[1:]):
            raise ValueError(f"expected {SBOM} in an argument of `command`: it becomes the path of the SBOM")
        if unknown := set(re.findall(r"\{[a-z_]*\}", " ".join(self.command))) - {SBOM}:
            raise ValueError(f"unknown placeholder {min(unknown)}: use only {SBOM}")
        return self


class GpuTesting(StrictModel):
    """The command that runs the GPU tests of staged images, instead of the engine of this machine: its words."""

    gpu_command: list[CommandWord] = Field(min_length=1)

    @model_validator(mode="after")
    def _has_image_and_command(self) -> Self:
        for needed in (IMAGE, COMMAND):
            if not any(needed in WORD_PLACEHOLDER.findall(word) for word in self.gpu_command):
                raise ValueError(f"gpu_command: expected {needed} in a word")
        return self


class Matrix(StrictModel):
    """The whole of matrix.yaml."""

    _located: strict_yaml.Located = PrivateAttr()

    extends: Literal["gpu-images"] | None = None
    registry: Repository
    namespace: Namespace
    source: Source = ""
    staging: Staging = ""
    evidence: list[Trusted] = []
    insecure: list[NamedRegistry] = []
    scan: Scan | None = None
    test: GpuTesting | None = None
    indexes: dict[IndexName, IndexPlace] = {}
    debian: dict[Name, Debian] = Field(min_length=1)
    python: dict[Minor, Python] = Field(min_length=1)
    cuda: dict[CudaName, Cuda] = Field(min_length=1)
    frameworks: dict[Name, Framework] = Field(min_length=1)
    components: dict[Name, Component] = Field(min_length=1)
    variants: dict[Name, Names] = Field(min_length=1)
    budgets: list[Budget] = []
    exclude: list[Selection] = []
    include: list[Inclusion] = []
    sets: dict[Name, Annotated[list[Pattern], Field(min_length=1)]] = {}

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        """Refuses unknown names, contradictions between parts and circular needs, all of them at once."""
        faults = [*self._unknown_names(), *self._wrong_releases(), *self._names_in_use(), *self._bad_variants()]
        validation.raise_faults([*faults, *self._circular_needs(), *self._packages_of_two_indexes()])
        return self

    def _unknown_names(self) -> Iterator[Fault]:
        """References to names that matrix.yaml does not define."""
        sections = {"CUDA version": "cuda", "Python version": "python", "index": "indexes"}  # a new image may need one
        for path, names, known, kind in self._references():
            for place, name in names.items():
                if name is not None and name not in known:
                    advice = f" (add it under {sections[kind]}:)" if kind in sections else ""
                    yield (*path, place), f"no {kind} {name!r}{advice}{did_you_mean(name, known)}"

    def _references(self) -> Iterator[tuple[Key, Mapping[Any, str | None], Collection[str], str]]:
        """Each place that refers to names: its path, the names by key, the defined names, and what they name."""
        majors = list(dict.fromkeys(map(cuda_major, self.cuda)))
        for version, python in self.python.items():
            yield ("python", version), {"debian": python.debian}, self.debian, "Debian release"
        for name, framework in self.frameworks.items():
            yield ("frameworks",), {name: name}, self.components, "component"
            yield ("frameworks", name, "package_on"), _keys(framework.package_on), majors, "CUDA major version"
            for line, entry in framework.versions.items():
                path: Key = ("frameworks", name, "versions", line)
                yield (*path, "cuda"), _items(entry.cuda), self.cuda, "CUDA version"
                yield (*path, "python"), _items(entry.python), self.python, "Python version"
                yield (*path, "components"), _items(entry.components), self.components, "component"
                yield (*path, "arch"), _keys(entry.arch), [*self.cuda, OTHERS], "CUDA version"
                yield path, {"index": entry.index}, self.indexes, "index"
                yield (*path, "index_on"), _keys(entry.index_on), self.cuda, "CUDA version"
                yield (*path, "index_on"), entry.index_on, self.indexes, "index"
        for name, component in self.components.items():
            yield ("components", name), {"index": component.index}, self.indexes, "index"
            yield ("components", name, "needs"), _items(component.needs), self.components, "component"
            yield ("components", name, "only_on"), _items(component.only_on), majors, "CUDA major version"
        for name, members in self.variants.items():
            yield ("variants", name), _items(members), self.components, "component"

    def _wrong_releases(self) -> Iterator[Fault]:
        """Releases that do not belong to their version."""
        for version, python in self.python.items():
            if python.uv and not python.uv.startswith(f"{version}."):
                yield ("python", version, "uv"), f"{python.uv} is not a release of Python {version}"
        for version, cuda in self.cuda.items():
            if cuda.toolkit and not cuda.toolkit.startswith(f"{version}."):
                yield ("cuda", version, "toolkit"), f"cuda-toolkit {cuda.toolkit} is not a release of CUDA {version}"

    def _names_in_use(self) -> Iterator[Fault]:
        """Names that two frameworks, or both images of one, use in ids or tags; sets named like a built-in set."""
        owners: dict[tuple[bool, str], str] = {}
        for name, framework in self.frameworks.items():
            for field in ("short", "image", "cpu_image"):
                if not (value := getattr(framework, field)):
                    continue
                if owner := owners.get((field == "short", value)):
                    fault = f"{value!r} is already used by {owner}; tags and ids would collide"
                    yield ("frameworks", name, field), fault
                owners[field == "short", value] = name
        for name in self.sets:
            if name in (*BUILT_IN_SETS, *self.debian, *self.frameworks):
                fault = "this set is built in (docs/matrix.md): delete it, or give it another name"
                yield ("sets", name, validation.KEY), fault

    def _bad_variants(self) -> Iterator[Fault]:
        """Variants with two components on one port, of which only one could listen; names of variants."""
        for name, members in self.variants.items():
            owners: dict[int, str] = {}
            for index, member in enumerate(members):
                component = self.components.get(member)
                if component and component.port:
                    owner = owners.setdefault(component.port, member)
                    if owner != member:
                        yield ("variants", name, index), f"{owner} and {member} both use port {component.port}"
        if ARM64 in self.variants:
            fault = f"ids of images for {ARM64} end with this name: give the variant another one"
            yield ("variants", ARM64, validation.KEY), fault
        if "plain" not in self.variants:
            yield ("variants",), "'plain' is missing; it is the variant without additions"

    def _circular_needs(self) -> Iterator[Fault]:
        try:
            TopologicalSorter({name: component.needs for name, component in self.components.items()}).prepare()
        except CycleError as error:
            cycle = error.args[1][::-1]  # graphlib names a component before those that need it
            yield ("components", cycle[0]), f"circular needs: {' -> '.join(cycle)}"

    def _packages_of_two_indexes(self) -> Iterator[Fault]:
        for name, framework in self.frameworks.items():
            for line, entry in framework.versions.items():
                for cuda in entry.cuda:
                    for package, indexes in self.indexes_of(name, line, cuda).items():
                        for index, place in indexes.items() if len(indexes) > 1 else ():
                            yield place, f"{package} has {len(indexes)} indexes, here {index!r}: name one for it"

    @property
    def staging_place(self) -> str:
        """The place for staged images: `staging`, or else repositories beside the images; empty without a registry.

        The default adds no level to the names: Docker Hub allows two.
        """
        return self.staging or (f"{self.registry}/{self.namespace}/staging-" if self.registry else "")

    @property
    def image_names(self) -> list[str]:
        """The names of all images, without registry and namespace."""
        frameworks = self.frameworks.values()
        names = [name for framework in frameworks for name in (framework.image, framework.cpu_image) if name]
        return list(dict.fromkeys(names))

    @property
    def newest_debian(self) -> str:
        """The newest Debian release, which has the newest mmdebstrap: it supports older releases."""
        return max(self.debian, key=lambda release: [int(part) for part in self.debian[release].glibc.split(".")])

    @cached_property
    def with_needs(self) -> dict[str, tuple[str, ...]]:
        """By name of a component: everything that it needs, then itself. The needs must not be circular."""
        ordered: dict[str, tuple[str, ...]] = {}

        def add(name: str) -> tuple[str, ...]:
            if name not in ordered:
                needs = chain.from_iterable(add(need) for need in self.components[name].needs)
                ordered[name] = tuple(dict.fromkeys((*needs, name)))
            return ordered[name]

        return {name: add(name) for name in self.components}

    def folder_of(self, index: str) -> str:
        """The folder of the checkout that is an index; empty for an index with an address."""
        return "" if "://" in self.indexes[index] else self.indexes[index].removesuffix("/")

    def indexes_of(self, framework: str, line: str, cuda: str) -> dict[str, dict[str, Key]]:
        """The packages that come from a named index, in the cells of a framework line and CUDA.

        By canonical name of the package: the indexes, with the places in matrix.yaml that name them. A valid matrix
        has one index for each package. The packages of all components count, whether the cells have them or not: a
        package that one image gets from a private index comes from no other index in another one.
        """
        entry = self.frameworks[framework].versions[line]
        at: Key = ("frameworks", framework, "versions", line)
        places: list[tuple[str | None, Key, list[str]]] = [
            (component.index, ("components", name, "index"), component.packages)
            for name, component in self.components.items()
        ]
        place: Key = (*at, "index_on", cuda) if cuda in entry.index_on else (*at, "index")
        packages_of_all = [self.frameworks[framework].package, *self.frameworks[framework].package_on.values()]
        own = [*packages_of_all, *entry.packages]
        places.append((entry.index_on.get(cuda, entry.index), place, own))
        result: dict[str, dict[str, Key]] = {}
        for index, place, packages in places:
            for package in packages if index else ():
                result.setdefault(required_name(package), {}).setdefault(str(index), place)
        return result

    def locate(self, located: strict_yaml.Located) -> None:
        """Keeps the parsed file for `where`."""
        self._located = located

    def where(self, *path: str | int, key: bool = False) -> str:
        """`matrix.yaml:line:column` of the value (or the key) at `path`."""
        return self._located.where(path, key=key)

    def is_own(self, *path: str | int) -> bool:
        """False for a value of the shipped matrix that this one extends."""
        return self._located.where(path).startswith(f"{self._located.name}:")
