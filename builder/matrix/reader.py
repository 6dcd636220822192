"""Reads matrix.yaml, and checks the references between its parts.

Faults are unknown names, duplicates, contradictions and circular needs. One error lists all of them, with their places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import get_args

from pydantic import ValidationError

from builder.common import validation
from builder.common.errors import MatrixError, did_you_mean
from builder.common.strict_yaml import Key, Located
from builder.matrix import support
from builder.matrix.cells import BUILT_IN_SETS
from builder.matrix.schema import ARM64, CPU, OTHERS, Arch, Matrix, cuda_major

_Name = tuple[Key, str, Collection[str], str]
_SECTIONS = {"CUDA version": "cuda", "Python version": "python", "index": "indexes"}  # what a new image may need first


def check_matrix(located: Located) -> Matrix:
    """The matrix in parsed YAML; raises MatrixError."""
    if not isinstance(located.data, dict):
        value = validation.value_text(located.data)
        raise MatrixError(f"{located.name}:1:1: expected `key: value` lines, found {value}")
    try:
        matrix = Matrix.model_validate(located.data)
    except ValidationError as error:
        raise MatrixError(validation.explain(error, Matrix, located)) from None
    matrix.locate(located)
    faults = [*_name_faults(matrix), *_axis_faults(matrix), *_image_faults(matrix), *_component_faults(matrix)]
    faults += [*_index_faults(matrix), *_set_faults(matrix), *_support_faults(matrix)]
    if faults:
        raise MatrixError(validation.listed_faults(faults))
    return matrix


def _names(matrix: Matrix) -> Iterator[_Name]:
    """Every reference to another part of matrix.yaml: its path, the name, the names that exist, and their kind."""
    for version, python in matrix.python.items():
        yield ("python", version, "debian"), python.debian, matrix.debian, "Debian release"
    majors = list(dict.fromkeys(map(cuda_major, matrix.cuda)))
    for name, framework in matrix.frameworks.items():
        yield ("frameworks", name), name, matrix.components, "component"
        for major in framework.package_on:
            yield ("frameworks", name, "package_on", major), major, majors, "CUDA major version"
        for line, entry in framework.versions.items():
            path = ("frameworks", name, "versions", line)
            yield from _items((*path, "cuda"), entry.cuda, matrix.cuda, "CUDA version")
            yield from _items((*path, "python"), entry.python, matrix.python, "Python version")
            yield from _items((*path, "components"), entry.components, matrix.components, "component")
            if entry.index:
                yield (*path, "index"), entry.index, matrix.indexes, "index"
            for cuda, architectures in entry.arch.items():
                if cuda != OTHERS:
                    yield (*path, "arch", cuda), cuda, matrix.cuda, "CUDA version"
                yield from _items((*path, "arch", cuda), architectures, get_args(Arch), "architecture")
            for cuda, index in entry.index_on.items():
                yield (*path, "index_on", cuda), cuda, matrix.cuda, "CUDA version"
                yield (*path, "index_on", cuda), index, matrix.indexes, "index"
    for name, component in matrix.components.items():
        if component.index:
            yield ("components", name, "index"), component.index, matrix.indexes, "index"
        yield from _items(("components", name, "needs"), component.needs, matrix.components, "component")
        yield from _items(("components", name, "only_on"), component.only_on, majors, "CUDA major version")
    for name, members in matrix.variants.items():
        yield from _items(("variants", name), members, matrix.components, "component")


def _items(path: Key, values: Iterable[str], known: Collection[str], kind: str) -> Iterator[_Name]:
    for index, value in enumerate(values):
        yield (*path, index), value, known, kind


def _name_faults(matrix: Matrix) -> Iterator[str]:
    """Names that do not exist, then items that a list has twice."""
    for path, value, known, kind in _names(matrix):
        if value not in known:
            label = ".".join(map(str, path))
            advice = f" (add it under {_SECTIONS[kind]}:)" if kind in _SECTIONS else ""
            yield f"{matrix.where(*path)}: {label}: no {kind} {value!r}{advice}{did_you_mean(value, known)}"
    seen: set[tuple[Key, str]] = set()
    for path, value, _, _ in _names(matrix):
        item = path[:-1], value
        if item in seen and isinstance(path[-1], int):
            yield f"{matrix.where(*path)}: duplicate {value!r}"
        seen.add(item)


def _axis_faults(matrix: Matrix) -> Iterator[str]:
    """Versions of Python and CUDA with the release of another version, without a source, or with the tag of another."""
    for version, python in matrix.python.items():
        if python.uv and not python.uv.startswith(f"{version}."):
            yield f"{matrix.where('python', version, 'uv')}: {python.uv} is not a release of Python {version}"
    for version, cuda in matrix.cuda.items():
        if cuda.toolkit and not cuda.toolkit.startswith(f"{version}."):
            where = matrix.where("cuda", version, "toolkit")
            yield f"{where}: cuda-toolkit {cuda.toolkit} is not a release of CUDA {version}"
    for version, python in matrix.python.items():
        if not python.packages and not python.uv:
            where = matrix.where("python", version, "apt")
            yield (
                f"{where}: python.{version}.apt: Python {version} has no packages: delete `apt`, or add `uv` with a "
                "full release"
            )
    for axis, versions in (("cuda", matrix.cuda), ("python", matrix.python)):
        tags: dict[str, str] = {}
        for version in versions:
            other = tags.setdefault(version.replace(".", ""), version)
            if other != version:
                where = matrix.where(axis, version, key=True)
                yield f"{where}: {version} and {other} differ only in their dots; ids and tags would collide"


def _image_faults(matrix: Matrix) -> Iterator[str]:
    """Images for the cpu without a name; names in ids and tags that two frameworks, or the two images of one, share."""
    for name, framework in matrix.frameworks.items():
        for line, entry in framework.versions.items():
            if CPU in entry.cuda and not framework.cpu_image:  # `quartz-cuda:0.5-cpu` would contradict itself
                where = matrix.where("frameworks", name, "versions", line, "cuda")
                yield f"{where}: {name} {line} has no image name for the cpu: add `cpu_image:` to frameworks.{name}"
    owners: dict[tuple[bool, str], str] = {}
    for name, framework in matrix.frameworks.items():
        for field in ("short", "image", "cpu_image"):
            if not (value := getattr(framework, field)):
                continue
            if owner := owners.get((field == "short", value)):
                where = matrix.where("frameworks", name, field)
                yield f"{where}: {field} {value!r} is already used by {owner}; tags and ids would collide"
            owners[field == "short", value] = name


def _component_faults(matrix: Matrix) -> Iterator[str]:
    """Variants with two components on one port, of which only one could listen; names of variants; circular needs."""
    for name, members in matrix.variants.items():
        owners: dict[int, str] = {}
        for index, member in enumerate(members):
            component = matrix.components.get(member)
            if component and component.port:
                owner = owners.setdefault(component.port, member)
                if owner != member:
                    where = matrix.where("variants", name, index)
                    yield f"{where}: variants.{name}: {owner} and {member} both use port {component.port}"
    if ARM64 in matrix.variants:
        where = matrix.where("variants", ARM64, key=True)
        yield f"{where}: variants.{ARM64}: ids of images for {ARM64} end with this name: give the variant another one"
    if "plain" not in matrix.variants:
        yield f"{matrix.where('variants')}: variants: 'plain' is missing; it is the variant without additions"
    try:
        TopologicalSorter({name: component.needs for name, component in matrix.components.items()}).prepare()
    except CycleError as error:
        # graphlib repeats the first node at the end, and may begin anywhere: the message begins where the file does.
        cycle = error.args[1][:0:-1]
        first = min(cycle, key=list(matrix.components).index)
        start = cycle.index(first)
        chain = " -> ".join([*cycle[start:], *cycle[:start], first])
        yield f"{matrix.where('components', first)}: circular needs: {chain}"


def _index_faults(matrix: Matrix) -> Iterator[str]:
    """Components with an index for no package, and packages with two indexes."""
    for name, component in matrix.components.items():
        if component.index and not component.packages:
            where = matrix.where("components", name, "index")
            yield f"{where}: components.{name}.index has no effect: the component has no `packages`"
    for name, framework in matrix.frameworks.items():
        for line, entry in framework.versions.items():
            for cuda in entry.cuda:
                for package, indexes in matrix.indexes_of(name, line, cuda).items():
                    if len(indexes) > 1:
                        (first, place), (second, other_place) = list(indexes.items())[:2]
                        yield (
                            f"{matrix.where(*place)}: {package} is from the index {first!r} here, but from {second!r} "
                            f"at {matrix.where(*other_place)}: name one index for it"
                        )


def _set_faults(matrix: Matrix) -> Iterator[str]:
    """Sets with the name of a built-in set."""
    for name in matrix.sets:
        if name in BUILT_IN_SETS or name in matrix.debian or name in matrix.frameworks:
            where = matrix.where("sets", name, key=True)
            yield f"{where}: sets.{name}: this set is built in (docs/matrix.md): delete it, or give it another name"


def _support_faults(matrix: Matrix) -> Iterator[str]:
    """Entries with `after_support` whose end of support is not known: the reason would have no effect."""
    entries: dict[tuple[str, ...], str] = {}
    entries |= {("debian", name): debian.after_support for name, debian in matrix.debian.items()}
    entries |= {("python", version): python.after_support for version, python in matrix.python.items()}
    entries |= {("cuda", version): cuda.after_support for version, cuda in matrix.cuda.items()}
    for name, framework in matrix.frameworks.items():
        for line, entry in framework.versions.items():
            entries["frameworks", name, "versions", line] = entry.after_support
    for path, reason in entries.items():
        if reason and not support.end_of(matrix, path):
            where, label = matrix.where(*path, "after_support"), ".".join(path)
            python = matrix.python.get(path[1]) if path[0] == "python" else None
            advice = "delete it"
            if python and not python.uv:
                advice = f"its updates are those of Debian: add it to debian.{python.debian} instead"
            yield f"{where}: {label}.after_support: builder/matrix/facts.yaml has no end of support for it: {advice}"
