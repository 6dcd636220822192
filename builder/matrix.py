"""matrix.yaml as typed models: what exists, checked for shape and for references between its parts.

Values that end up in a Dockerfile, a shell or a path are confined by the patterns here, so that nothing
further down has to quote or distrust them.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from builder import strict_yaml
from builder.errors import MatrixError
from builder.reference import ImageRef

MAX_FAULTS = 20
CPU = "cpu"  # the value of the CUDA axis that means: no CUDA
_DISTRIBUTION = r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}(\[[A-Za-z0-9._,-]{1,60}\])?"
_UNITS = {"MB": 10**6, "GB": 10**9}


def _matches(pattern: str, expected: str) -> Callable[[str], str]:
    compiled = re.compile(pattern, re.ASCII)  # fullmatch and ASCII: `$` admits a newline, `\d` other digits

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"expected {expected}")
        return value

    return check


def _requirement(value: str) -> str:
    try:
        requirement = Requirement(value)
    except InvalidRequirement as error:
        raise ValueError("expected a Python requirement such as torchvision>=0.24") from error
    if requirement.url:
        raise ValueError("expected a requirement without an address: wheels come from the index by name")
    if not re.fullmatch(r"[A-Za-z0-9 ._,<>=!~;()\[\]'\"+*-]+", value, re.ASCII):
        raise ValueError("expected a requirement on one line, in plain characters")
    return value


def _constraint(value: str) -> str:
    if Requirement(_requirement(value)).extras:
        raise ValueError("expected a constraint such as numpy<2, without extras")
    return value


def _pinned(value: str) -> str:
    if not ImageRef.parse(value).digest:
        raise ValueError("expected an image pinned by digest: name:tag@sha256:...")
    return value


def _registry(value: str) -> str:
    if value:
        ImageRef(registry=value, repository="x")
    return value


def _namespace(value: str) -> str:
    ImageRef(repository=value)
    return value


Name = Annotated[str, AfterValidator(_matches(r"[a-z][a-z0-9]{0,23}", "a short name of lower-case letters and digits"))]
Short = Annotated[str, AfterValidator(_matches(r"[a-z]{1,8}", "one to eight lower-case letters"))]
Line = Annotated[str, AfterValidator(_matches(r"[0-9]{1,4}(\.[0-9]{1,4}){1,2}", 'a version such as "2.9"'))]
Minor = Annotated[str, AfterValidator(_matches(r"[0-9]{1,2}\.[0-9]{1,2}", 'a version of two numbers such as "3.11"'))]
CudaName = Annotated[str, AfterValidator(_matches(r"[0-9]{1,2}\.[0-9]{1,2}|cpu", 'a version such as "12.8", or cpu'))]
CudaMajor = Annotated[str, AfterValidator(_matches(r"[0-9]{1,2}|cpu", "the first number of a CUDA version, or cpu"))]
Distribution = Annotated[str, AfterValidator(_matches(_DISTRIBUTION, "the name of a package, without a version"))]
ImageName = Annotated[str, AfterValidator(_matches(r"[a-z0-9]+(-[a-z0-9]+)*", "an image name such as pt-cuda"))]
Bytes = Annotated[str, AfterValidator(_matches(r"[0-9]{1,6}(\.[0-9]{1,3})?(MB|GB)", "a size such as 4.3GB or 900MB"))]
Release = Annotated[str, AfterValidator(_matches(r"[0-9]{1,4}(\.[0-9]{1,4}){1,3}", 'a full version such as "2.9.1"'))]
AptPackage = Annotated[str, AfterValidator(_matches(r"[a-z0-9][a-z0-9+.-]{1,60}", "the name of a Debian package"))]
PackageName = Annotated[str, AfterValidator(_requirement)]
Constraint = Annotated[str, AfterValidator(_constraint)]
Word = Annotated[str, AfterValidator(_matches(r"[A-Za-z0-9_./:=+-]{1,200}", "one word of plain characters"))]
EnvName = Annotated[str, AfterValidator(_matches(r"[A-Z][A-Z0-9_]{0,63}", "a variable such as OMP_NUM_THREADS"))]
Pattern = Annotated[str, AfterValidator(_matches(r"[a-z0-9.*?\[\]!{},-]{1,200}", "a pattern of cell ids"))]
Reason = Annotated[str, AfterValidator(_matches(r"[^\x00-\x1f\x7f]{10,300}", "a reason of one line"))]
PinnedImage = Annotated[str, AfterValidator(_pinned)]
Registry = Annotated[str, AfterValidator(_registry)]
Namespace = Annotated[str, AfterValidator(_namespace)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Debian(_Model):
    image: PinnedImage
    glibc: Minor


class Python(_Model):
    """From the packages `apt` of a Debian release, or exactly the release `uv` of uv's own builds on that Debian."""

    debian: Name
    apt: list[AptPackage] | None = None
    uv: Release | None = None

    @property
    def packages(self) -> list[str]:
        """Debian packages that it takes."""
        return self.apt if self.apt is not None else [] if self.uv else ["python3"]


class Cuda(_Model):
    """`toolkit` is the release of NVIDIA's metapackage `cuda-toolkit` whose metadata pins the parts of this CUDA.

    `env` are variables that images on it have.
    """

    toolkit: Release | None = None
    env: dict[EnvName, Word] = {}


class FrameworkVersion(_Model):
    """`constraints` bound packages that may come along; `components` are parts that only this line needs."""

    release: Release
    cuda: list[CudaName] = Field(min_length=1)
    python: list[Minor] = Field(min_length=1)
    packages: list[PackageName] = []
    constraints: list[Constraint] = []
    components: list[Name] = []


class Framework(_Model):
    """`package_on` names the package on some CUDA majors, where it is not `package`; so does `cpu_image` the image."""

    short: Short
    image: ImageName
    cpu_image: ImageName | None = None
    package: Distribution
    package_on: dict[CudaMajor, Distribution] = {}
    versions: dict[Line, FrameworkVersion] = Field(min_length=1)

    def package_for(self, cuda: str) -> str:
        """What is installed for a CUDA version, or for `cpu`."""
        return self.package_on.get(cuda.split(".", maxsplit=1)[0], self.package)

    def image_for(self, cuda: str) -> str:
        return self.cpu_image if cuda == CPU and self.cpu_image else self.image


class Component(_Model):
    """`only_on` are the CUDA majors (or `cpu`) that have it; none named: all."""

    needs: list[Name] = []
    only_on: list[CudaMajor] = []
    apt: list[AptPackage] = []
    packages: list[PackageName] = []
    env: dict[EnvName, Word] = {}
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    command: list[Word] = []
    healthcheck: list[Word] = []


class Exclusion(_Model):
    cells: Pattern
    reason: Reason


class Inclusion(_Model):
    cell: Pattern
    reason: Reason


class Budget(_Model):
    """The most that an image of `cells`, and any one of its layers, may weigh as pushed."""

    cells: Pattern
    image: Bytes
    layer: Bytes


class Matrix(_Model):
    """The whole of matrix.yaml; `where` gives the place of a part of it, for errors."""

    _located: strict_yaml.Located = PrivateAttr()

    registry: Registry
    namespace: Namespace
    debian: dict[Name, Debian] = Field(min_length=1)
    python: dict[Minor, Python] = Field(min_length=1)
    cuda: dict[CudaName, Cuda] = Field(min_length=1)
    frameworks: dict[Name, Framework] = Field(min_length=1)
    components: dict[Name, Component] = Field(min_length=1)
    variants: dict[Name, list[Name]] = Field(min_length=1)
    budgets: list[Budget] = []
    exclude: list[Exclusion] = []
    include: list[Inclusion] = []
    sets: dict[Name, list[Pattern]] = {}

    def where(self, *path: str | int) -> str:
        """`matrix.yaml:line:column` of the part at `path`."""
        return self._located.where(path)


def size(text: str) -> int:
    """Bytes of a size as the matrix writes it: 4.3GB."""
    return round(float(text[:-2]) * _UNITS[text[-2:]])


def load(path: Path) -> Matrix:
    """Reads and checks a matrix; raises one MatrixError that lists every fault with its place."""
    return check(strict_yaml.load(path))


def check(located: strict_yaml.Located) -> Matrix:
    """Located YAML to a Matrix; raises MatrixError."""
    if not isinstance(located.data, dict):
        raise MatrixError(f"{located.name}:1:1: expected `key: value` lines, found {_describe(located.data)}")
    try:
        matrix = Matrix.model_validate(located.data)
    except ValidationError as error:
        faults = [_explain(dict(item), located) for item in error.errors(include_url=False)]
        raise MatrixError(_listed(faults)) from None
    matrix._located = located
    if faults := list(_references(matrix, located)):
        raise MatrixError(_listed(faults))
    return matrix


def _listed(faults: list[str]) -> str:
    """One fault a line, each once, the first twenty."""
    lines = list(dict.fromkeys(faults))
    rest = [f"... and {len(lines) - MAX_FAULTS} more"] if len(lines) > MAX_FAULTS else []
    return "\n".join(lines[:MAX_FAULTS] + rest)


def _clip(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """`; did you mean ...?` for the nearest known name, or the list of them when few are known."""
    names = [str(name) for name in known]
    if close := difflib.get_close_matches(word, names, n=1, cutoff=0.5):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def _explain(item: dict[str, Any], located: strict_yaml.Located) -> str:
    loc = tuple(item["loc"])
    is_key = loc[-1:] == ("[key]",)
    path = loc[:-1] if is_key else loc
    label = ".".join(_clip(str(part)) for part in path)
    kind = item["type"]
    if kind == "missing":
        return f"{located.where(path[:-1])}: {label}: missing"
    if kind == "extra_forbidden":
        return f"{located.where(path, key=True)}: {label}: unknown key{nearest(str(path[-1]), _keys(path[:-1]))}"
    where = located.where(path, key=is_key)
    typed = _clip(located.raw.get(path, ""))
    if kind == "string_type" and typed:
        return f'{where}: {label}: {typed} is read as {_describe(item["input"])}; quote it: "{typed}"'
    if kind == "value_error":
        return f"{where}: {label}: {_describe(item['input'])}: {item['ctx']['error']}"
    return f"{where}: {label}: {item['msg'][:1].lower()}{item['msg'][1:]}, found {_describe(item['input'])}"


def _keys(path: strict_yaml.Key) -> list[str]:
    """The keys that the model at `path` knows."""
    current: Any = Matrix
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = field.annotation if field else None
        else:
            arguments = typing.get_args(current)
            current = arguments[-1] if arguments else None
        if isinstance(current, types.UnionType):
            current = typing.get_args(current)[0]
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _describe(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {_clip(str(value)) if isinstance(value, float) or abs(value) < 10**60 else 'it is'}"
    if isinstance(value, str):
        return repr(_clip(value))
    return {"dict": "a mapping", "list": "a list"}.get(type(value).__name__, f"a {type(value).__name__}")


def _references(matrix: Matrix, located: strict_yaml.Located) -> typing.Iterator[str]:
    """Faults between parts: names that name nothing, cycles, names used twice."""

    def unknown(path: strict_yaml.Key, value: str, known: typing.Iterable[str], what: str) -> str:
        label = ".".join(str(part) for part in path)
        return f"{located.where(path)}: {label}: no {what} {value!r}{nearest(value, known)}"

    for version, python in matrix.python.items():
        if python.debian not in matrix.debian:
            yield unknown(("python", version, "debian"), python.debian, matrix.debian, "Debian release")
    yield from _axes(matrix, located)
    for name, framework in matrix.frameworks.items():
        if name not in matrix.components:
            yield unknown(("frameworks", name), name, matrix.components, "component")
        for line, entry in framework.versions.items():
            for axis, known in (("cuda", matrix.cuda), ("python", matrix.python)):
                values: list[str] = getattr(entry, axis)
                for index, value in enumerate(values):
                    path: strict_yaml.Key = ("frameworks", name, "versions", line, axis, index)
                    if value not in known:
                        yield unknown(path, value, known, f"{axis} version")
                    elif value in values[:index]:
                        yield f"{located.where(path)}: {value} stands twice"
            for index, part in enumerate(entry.components):
                if part not in matrix.components:
                    path = ("frameworks", name, "versions", line, "components", index)
                    yield unknown(path, part, matrix.components, "component")
            if CPU in entry.cuda and not framework.cpu_image:
                where = located.where(("frameworks", name, "versions", line, "cuda"))
                yield f"{where}: {name} {line} on the cpu needs a name: add `cpu_image:` to frameworks.{name}"
    seen: dict[tuple[str, str], str] = {}
    for name, framework in matrix.frameworks.items():
        for field in ("short", "image", "cpu_image"):
            if value := getattr(framework, field):
                kind = "short" if field == "short" else "image"
                if (kind, value) in seen:
                    where = located.where(("frameworks", name, field))
                    yield f"{where}: {field} {value!r} is also that of {seen[kind, value]}; tags and ids would collide"
                seen[kind, value] = name
    for name, component in matrix.components.items():
        for index, need in enumerate(component.needs):
            if need not in matrix.components:
                yield unknown(("components", name, "needs", index), need, matrix.components, "component")
    for name, members in matrix.variants.items():
        for index, member in enumerate(members):
            if member not in matrix.components:
                yield unknown(("variants", name, index), member, matrix.components, "component")
    if "plain" not in matrix.variants:
        yield f"{located.where(('variants',))}: variants: 'plain' is missing; it is the image without additions"
    yield from _cycles(matrix, located)


def _axes(matrix: Matrix, located: strict_yaml.Located) -> typing.Iterator[str]:
    """Faults of single CUDA and Python versions."""
    for version, python in matrix.python.items():
        if python.uv and not python.uv.startswith(f"{version}."):
            yield f"{located.where(('python', version, 'uv'))}: {python.uv} is no release of Python {version}"
    for version, cuda in matrix.cuda.items():
        if cuda.toolkit and not cuda.toolkit.startswith(f"{version}."):
            where = located.where(("cuda", version, "toolkit"))
            yield f"{where}: cuda-toolkit {cuda.toolkit} is not of CUDA {version}"
    for axis, versions in (("cuda", matrix.cuda), ("python", matrix.python)):
        tags: dict[str, str] = {}
        for version in versions:
            tag = version.replace(".", "")
            if tag in tags:
                where = located.where((axis, version), key=True)
                yield f"{where}: {version} and {tags[tag]} differ only by their dots; ids and tags would collide"
            tags[tag] = version
    majors = {version.split(".", maxsplit=1)[0] for version in matrix.cuda}
    for name, component in matrix.components.items():
        for index, major in enumerate(component.only_on):
            if major not in majors:
                where = located.where(("components", name, "only_on", index))
                yield f"{where}: no CUDA of the matrix is {major}{nearest(major, majors)}"
    for name, framework in matrix.frameworks.items():
        for major in framework.package_on:
            if major not in majors:
                where = located.where(("frameworks", name, "package_on", major), key=True)
                yield f"{where}: no CUDA of the matrix is {major}{nearest(major, majors)}"


def _cycles(matrix: Matrix, located: strict_yaml.Located) -> typing.Iterator[str]:
    done: set[str] = set()
    for start in matrix.components:
        trail: list[str] = []
        current: str | None = start
        # Follow first unfinished needs; a repeat on the trail is a cycle.
        stack = [iter([start])]
        while stack:
            current = next(stack[-1], None)
            if current is None:
                stack.pop()
                if trail:
                    done.add(trail.pop())
                continue
            if current in trail:
                chain = " -> ".join([*trail[trail.index(current) :], current])
                yield f"{located.where(('components', current))}: components need each other in a circle: {chain}"
                return
            if current in done or current not in matrix.components:
                continue
            trail.append(current)
            stack.append(iter(matrix.components[current].needs))
