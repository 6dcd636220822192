"""The plan: what would be built, in order, with the digest of every input. No clock, no network, no engine.

It is made from matrix, locks and templates. `PlannedImage.plan` is a digest of everything that determines the bytes of
an image, except what is known only after the build.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from builder.common.errors import LockError, MatrixError, StaleError, for_cells
from builder.common.files import digest_of_data, digests_of_tree
from builder.common.reference import ImageRef
from builder.debian import os_lock
from builder.debian.os_lock import OS_LOCKS, OsLock, OsRequest
from builder.index.wheels import LockedWheel, Wheel, is_cuda_wheel
from builder.lock import lockfile, python_lock
from builder.lock.lockfile import GROUP_LOCKS, CellLock, Lock
from builder.lock.python_lock import PYTHON_LOCKS, LockedPython
from builder.matrix import cells, support, tags
from builder.matrix.cells import CUDA, Cell
from builder.matrix.project import Project
from builder.matrix.schema import AMD64, Arch, Matrix
from builder.matrix.support import SupportEnd
from builder.plan import layer_order, settings
from builder.plan.layer_order import PlannedLayer
from builder.plan.settings import Health, Settings

FORMAT = 4  # part of the digest of every plan
# Inputs of every image besides the folders of its components.
STEPS = "templates/steps"  # the folder of the scripts that run while an image is made
COMPILER = f"{STEPS}/compile.py"
PREFETCH = "templates/{component}/prefetch.txt"  # written by tools/prefetch.py
PACKAGES_SCRIPT = f"{STEPS}/packages.sh"
BOOTSTRAP_INPUTS = (f"{STEPS}/mmdebstrap.sh", f"{STEPS}/slim.sh", f"{STEPS}/clean.sh")
OS_INPUTS = (
    "templates/os.j2",
    "templates/macros.j2",
    *BOOTSTRAP_INPUTS,
    f"{STEPS}/os.sh",
    PACKAGES_SCRIPT,
    "templates/host/env.sh",
)
UV_LOCK = "locks/uv.txt"
_CONSTRAINTS = """\
# The framework of this image and its CUDA: pip and uv install no other versions beside them.
# Another version all the same:   PIP_CONSTRAINT= pip install ...   or   UV_CONSTRAINT= uv pip install ...
"""
# Programs below the framework read variables that begin with these.
_READ_BELOW = ("LANG", "LC_", "LD_", "PIP_", "PYTHON", "UV_")
# A version that does not exist: it excludes nothing, and pip prints it with a conflict, as a hint how to override.
_OVERRIDE_HINT = "!=0+to.override.unset.PIP_CONSTRAINT"
# Of images with uv's build of Python only: all other operating systems stay as they are.
UV_PYTHON_SCRIPT = f"{STEPS}/uv-python.sh"
UV_PYTHON_INPUTS = (UV_LOCK, "templates/os-uv.j2", UV_PYTHON_SCRIPT, COMPILER)
WHEEL_SCRIPTS = (f"{STEPS}/uv.sh", f"{STEPS}/wheels.sh", f"{STEPS}/overlaps.py", COMPILER)
COMMON_INPUTS = (*OS_INPUTS, UV_PYTHON_SCRIPT, *WHEEL_SCRIPTS, UV_LOCK)


@dataclass(frozen=True, kw_only=True)
class WheelList:
    """A file of images/ with the wheels of a component and their hashes, for one step of Dockerfiles.

    All cells of a group have the same file. It lists every wheel that the component needs from one index, even if
    another component installs the wheel too. `component` is `cuda` for the framework's CUDA wheels. `folder` is the
    folder of the checkout that is the index, if it is one.
    """

    component: str
    path: str
    is_cuda: bool
    wheels: tuple[LockedWheel, ...]
    index: str = ""
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """An image to build.

    `uv` is the release of uv's Python, empty for Debian's, and `locked_python` its lock; `references` are the full tag
    and the aliases; `requirements` are the requirements in the lock, by component; `layers` start with the lowest;
    `file_components` are the components with files of their own; `os_request` is the request for the operating system,
    `os_inputs` the digest of the inputs of the os stage; `compiler_inputs` is the digest of the program and the Python
    that compile bytecode: operating systems with the same one give the same bytecode; `constraints` is the text of
    pip's constraints file; `os_lock` are its Debian packages, `files` the component, path and digest of each file
    that components put into it. `thorough` are the components whose thorough tests this image must pass itself, see
    `thorough_components`; `support` are the ends of support of its parts, the earliest first.
    """

    cell: Cell
    components: tuple[str, ...]
    references: tuple[str, ...]
    base: str
    debian: str
    uv: str
    locked_python: LockedPython | None
    os_request: OsRequest
    os_inputs: str
    compiler_inputs: str
    plan: str
    wheels: tuple[Wheel, ...]
    lists: tuple[WheelList, ...]
    layers: tuple[PlannedLayer, ...]
    file_components: tuple[str, ...]
    requirements: dict[str, list[str]]
    constraints: str
    settings: Settings
    # The fields below do not determine the bytes of the image beyond the digests above.
    os_lock: OsLock = field(compare=False)
    files: frozenset[tuple[str, str, str]] = field(compare=False)
    thorough: frozenset[str] = field(default=frozenset(), compare=False)
    support: tuple[SupportEnd, ...] = field(default=(), compare=False)

    @property
    def id(self) -> str:
        return self.cell.id

    @property
    def local_names(self) -> tuple[str, ...]:
        """Its names in the store and in an engine, the full one first."""
        return tuple(tags.local_name(reference, self.cell) for reference in self.references)

    @property
    def os_layer(self) -> PlannedLayer:
        return next(layer for layer in self.layers if layer.kind == "os")

    @property
    def folder(self) -> str:
        """The folder of its group, with the Dockerfiles of all variants and their inputs."""
        return f"images/{self.cell.group}"

    @property
    def interpreter(self) -> str:
        """The Python that makes /opt/venv, as os.sh gets it: a path, or a name on the PATH."""
        folder = f"/opt/python/{python_lock.python_key(self.uv)}/bin/" if self.uv else ""
        return f"{folder}python{self.cell.python}"

    @property
    def dockerfile(self) -> str:
        return f"{self.folder}/{self.cell.variant}.Dockerfile"

    @property
    def bytes(self) -> int:
        """Bytes of its wheels and Debian packages, as downloaded."""
        return sum(layer.bytes for layer in self.layers)


@dataclass(frozen=True, kw_only=True)
class Plan:
    images: tuple[PlannedImage, ...]
    unlocked: tuple[str, ...] = ()

    @property
    def sum_bytes(self) -> int:
        """Bytes of all images, without sharing between them."""
        return sum(image.bytes for image in self.images)

    @property
    def unique_bytes(self) -> int:
        """Bytes of all layers; a layer that several images share counts once."""
        layers = {layer.inputs: layer for image in self.images for layer in image.layers}
        return sum(layer.bytes for layer in layers.values())

    def as_data(self) -> dict[str, Any]:
        """The plan for `--format json`: stable, and the same on every machine."""
        return {
            "format": FORMAT,
            "images": [
                {
                    "id": image.id,
                    "cell": vars(image.cell),
                    "dockerfile": image.dockerfile,
                    "references": list(image.references),
                    "base": image.base,
                    "digest": image.plan,
                    "components": list(image.components),
                    "support": [
                        {
                            "entry": end.entry,
                            "last": end.last.isoformat(),
                            "source": end.source,
                            "after_support": end.after_support,
                        }
                        for end in image.support
                    ],
                    "layers": [
                        {
                            "kind": layer.kind,
                            "name": layer.name,
                            "inputs": layer.inputs,
                            "wheels": [wheel.file for wheel in layer.wheels],
                            "bytes": layer.bytes,
                        }
                        for layer in image.layers
                    ],
                }
                for image in self.images
            ],
            "not_locked": list(self.unlocked),
            "bytes": {"sum": self.sum_bytes, "unique": self.unique_bytes},
        }


def make_plan(project: Project, selected: Sequence[Cell]) -> Plan:
    """The plan for `selected` cells; those without a lock are listed in `unlocked`. Raises LockError, StaleError.

    An image depends on its own cell alone, not on the other cells selected or the rest of the matrix.
    """
    references = tags.compute(project.matrix, project.cells)
    groups = dict.fromkeys(cell.group for cell in selected)
    locks = {group: GROUP_LOCKS.read(project.root, group) for group in groups}
    planner = _Planner(project)
    locked: list[tuple[Cell, Lock, _System]] = []
    by_group: dict[str, list[Cell]] = {}
    unlocked = []
    for cell in selected:
        if (lock := locks[cell.group]) and (system := planner.system_of(cell)):
            locked.append((cell, lock, system))
            by_group.setdefault(cell.group, []).append(cell)
        else:
            unlocked.append(cell.id)
    for group, members in by_group.items():
        if reason := lockfile.stale_reason(project.matrix, locks[group], members):
            raise StaleError(f"locks/{group}.json does not match matrix.yaml: {reason}", hint=GROUP_LOCKS.hint(group))
    images = [planner.image(cell, lock, system, references[cell.id]) for cell, lock, system in locked]
    thorough = thorough_components(images, project.matrix)
    return Plan(images=tuple(replace(image, thorough=thorough[image.id]) for image in images), unlocked=tuple(unlocked))


def thorough_components(images: Iterable[PlannedImage], matrix: Matrix) -> dict[str, frozenset[str]]:
    """By image id, the components whose thorough tests the image must pass, among images of one command.

    A thorough test uses its component and those below. So a component's tests run in the smallest of the images that
    have the same of these, also on other frameworks and CUDA versions. A command for one image runs all its tests.
    docs/decisions/0019.
    """
    passing: dict[str, list[frozenset[object]]] = {}
    thorough: dict[str, frozenset[str]] = {}
    for image in sorted(images, key=lambda image: (len(image.components), len(image.os_lock.packages), image.id)):
        contents = _contents(image, matrix, image.components) | _contents(image, matrix, ())
        own = set()
        for component in image.components:
            if not any(part <= contents for part in passing.get(component, ())):
                own.add(component)
                # Every program of an image uses its Python.
                below = {*matrix.with_needs[component], *matrix.with_needs["python"]}
                passing.setdefault(component, []).append(_contents(image, matrix, below))
        thorough[image.id] = frozenset(own)
    return thorough


def _contents(image: PlannedImage, matrix: Matrix, components: Collection[str]) -> frozenset[object]:
    """What programs of these components of an image use, to be a subset of all that another image has."""
    cell = image.cell
    is_below = cell.framework not in components and CUDA not in components
    # These may differ below the framework and CUDA, except those that other programs read. All variables are one
    # element, since they must all be equal: a new one can change what any program does.
    own = {settings.DRIVER_VARIABLE, *matrix.cuda[cell.cuda].env, *matrix.components[cell.framework].env}
    ignored = {name for name in own if is_below and not name.startswith(_READ_BELOW)}
    env = {name: value for name, value in image.settings.env.items() if name not in ignored}
    return frozenset(
        [
            # The program and the Python that compile bytecode. Another architecture has the same packages.
            *(image.compiler_inputs, cell.arch, frozenset(env.items()), "" if is_below else image.constraints),
            *image.os_lock.versions.items(),
            *(file for file in image.files if file[0] in components),
            *(wheel.sha256 for part in image.lists if part.component in components for wheel in part.wheels),
        ]
    )


def make_locked_plan(project: Project, selected: Sequence[Cell]) -> Plan:
    """As `make_plan`, but a cell without a lock is a LockError."""
    plan = make_plan(project, selected)
    if plan.unlocked:
        raise LockError(
            f"not locked: {', '.join(plan.unlocked[:5])}{' ...' if len(plan.unlocked) > 5 else ''}",
            hint=f"Resolve first: {for_cells('builder lock', plan.unlocked)}",
        )
    return plan


def systems(project: Project) -> dict[str, dict[str, Arch]]:
    """The inputs of the matrix's locked operating systems, with their architectures, by their bytecode compiler."""
    planner = _Planner(project)
    result: dict[str, dict[str, Arch]] = {}
    for cell in project.cells:
        with suppress(LockError):  # a damaged lock fails its own images only
            if system := planner.system_of(cell):
                result.setdefault(system.compiler, {})[system.layer.inputs] = cell.arch
    return result


@dataclass(frozen=True, kw_only=True)
class _System:
    """A locked operating system: `compiler` is the digest of the program and the Python that compile bytecode in it."""

    request: OsRequest
    lock: OsLock
    python: LockedPython | None
    layer: PlannedLayer
    compiler: str


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The parts that all images of a group share: `cuda` is the list of the framework's CUDA, `lists` the others."""

    constraints: str
    cuda: tuple[WheelList, ...]
    lists: Mapping[str, Sequence[WheelList]]
    layers: tuple[PlannedLayer, ...]


class _Planner:
    """Plans images. Parts that several images share are computed once: a matrix may have thousands of cells."""

    def __init__(self, project: Project) -> None:
        self._project, self._matrix = project, project.matrix
        self._request = cache(partial(os_lock.request_of, project.matrix))
        self._tree = cache(self._tree_digests)
        self._system = cache(self._locked_system)
        self._files = cache(self._files_digest)
        self._prefetch = {name: self._prefetched(name) for name in self._matrix.components}
        self._contents = cache(self._contents_of)
        self._groups: dict[tuple[str, str], _Group] = {}

    def system_of(self, cell: Cell) -> _System | None:
        """The operating system of a cell; None if it is not locked. Raises LockError if its lock is damaged."""
        return self._system(cell.python, self._request(cell.python, cells.components(self._matrix, cell), cell.arch))

    def _locked_system(self, version: str, request: OsRequest) -> _System | None:
        root, python = self._project.root, self._matrix.python[version]
        lock = OS_LOCKS.read(root, request)
        locked_python = PYTHON_LOCKS.read(root, python.uv) if python.uv else None
        if lock is None or (python.uv and locked_python is None):
            return None
        # uv unpacks the archive, and changes some of its files.
        by_uv = [vars(locked_python), *map(self._tree, UV_PYTHON_INPUTS)] if locked_python else []
        inputs = [
            [layer_order.LAYER_FORMAT, lock.debian, version, *by_uv],
            [lock.requested, [[package.name, package.version, package.sha256] for package in lock.packages]],
            [self._tree(name) for name in OS_INPUTS],
            *([self._prefetch["base"]] if self._prefetch.get("base") else []),
        ]
        layer = PlannedLayer(
            kind="os",
            name="os",
            component="base",
            inputs=digest_of_data(inputs),
            python=version,
            debian=sum(package.size for package in lock.packages),
            prefetch=self._prefetch.get("base", ()),
        )
        # Bytecode depends on the program that makes it and on the image's Python, not on other Debian packages: a
        # security refresh of these leaves the bytecode of gigabytes of wheels as it is. It is the same on amd64 and
        # arm64: docs/decisions/0033-arm64.md.
        compiler = digest_of_data(
            [self._tree(COMPILER), [locked_python.sha256] if locked_python else lock.interpreter(version)]
        )
        return _System(request=request, lock=lock, python=locked_python, layer=layer, compiler=compiler)

    def _prefetched(self, component: str) -> tuple[str, ...]:
        """The paths to prefetch in layers of a component, see `builder.layers.estargz.prefetch_order`."""
        path = self._project.path(PREFETCH.format(component=component))
        return tuple(path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()

    def _tree_digests(self, name: str) -> dict[str, str]:
        """Digests of the files at or below a path, by path."""
        base = self._project.base(name)
        return digests_of_tree(base, base / name) if (base / name).exists() else {}

    def _files_digest(self, components: tuple[str, ...], constraints: str) -> str:
        """The digest of the inputs of a layer with the files of components."""
        files = {name: self._tree(f"templates/{name}/files") for name in components}
        return digest_of_data([layer_order.LAYER_FORMAT, "prefetched", files, constraints])

    def _contents_of(self, components: tuple[str, ...]) -> frozenset[tuple[str, str, str]]:
        """Component, path and digest of the files of components in an image; a later component may replace a file."""
        files: dict[str, tuple[str, str, str]] = {}
        for name in components:
            folder = f"templates/{name}/files"
            for path, digest in self._tree(folder).items():
                inside = path.removeprefix(f"{folder}/")
                files[inside] = (name, inside, digest)
        return frozenset(files.values())

    def image(self, cell: Cell, lock: Lock, system: _System, references: Iterable[ImageRef]) -> PlannedImage:
        matrix = self._matrix
        locked = lockfile.of_cell(matrix, cell, lock)
        names = cells.components(matrix, cell)
        group = self._groups.get((cell.group, system.compiler))
        if group is None:
            group = self._groups[cell.group, system.compiler] = self._group(cell, lock, locked, system.compiler)
        with_files = tuple(name for name in names if self._tree(f"templates/{name}/files"))
        upper = layer_order.upper_layers(cell, group.layers, locked.wheels, system.compiler, self._prefetch)
        files = self._files(with_files, group.constraints)
        last = PlannedLayer(kind="files", name="files", component="base", inputs=files)
        layers = (*group.layers, system.layer, *upper, last)
        if len(layers) > layer_order.MOST:
            raise MatrixError(f"{cell.id} would have {len(layers)} layers; the limit of Docker is {layer_order.MOST}")
        debian = matrix.python[cell.python].debian
        configured = settings.of_image(matrix, cell, {name: matrix.components[name] for name in names})
        inputs = {
            "format": FORMAT,
            "settings": {
                name: vars(value) if isinstance(value, Health) else value
                for name, value in vars(configured).items()
                if name != "arch" or value != AMD64  # the plans of images for amd64 are older than `arch`
            },
            # As lists: the order of variables and labels is the order in the configuration.
            "env": list(configured.env.items()),
            "debian": debian,
            "layers": [[layer.name, layer.inputs] for layer in layers],
        }
        return PlannedImage(
            cell=cell,
            components=names,
            references=tuple(map(str, references)),
            base=matrix.debian[debian].image,
            debian=debian,
            uv=system.python.release if system.python else "",
            locked_python=system.python,
            os_request=system.request,
            os_inputs=system.layer.inputs,
            compiler_inputs=system.compiler,
            plan=digest_of_data(inputs),
            wheels=locked.wheels,
            lists=(*group.cuda, *(item for component in locked.requirements for item in group.lists[component])),
            layers=layers,
            file_components=with_files,
            requirements=dict(locked.requirements),
            constraints=group.constraints,
            settings=configured,
            os_lock=system.lock,
            files=self._contents(with_files),
            support=support.ends_of_cell(matrix, cell),
        )

    def _group(self, cell: Cell, lock: Lock, locked: CellLock, compiler: str) -> _Group:
        """The group of a cell; any of its cells with the same `compiler` gives the same."""
        foundation = cells.foundation(self._matrix, cell)
        entries = {entry.name: entry for entry in lock.wheels}
        needed = {component: [entries[name] for name in part.wheels] for component, part in lock.components.items()}
        # The CUDA of the framework has a list of its own, which comes first; its wheels are in no other.
        shared = {
            entry.name: entry
            for component in foundation
            for entry in needed.get(component, ())
            if is_cuda_wheel(entry.file)
        }
        folder = f"images/{cell.group}"
        lists: dict[str, list[WheelList]] = {}
        for component, wheels in needed.items():
            of_cuda = tuple(entry for entry in wheels if is_cuda_wheel(entry.file) and entry.name not in shared)
            others = tuple(entry for entry in wheels if not is_cuda_wheel(entry.file))
            both = [
                WheelList(component=component, path=f"{folder}/cuda-{component}.txt", is_cuda=True, wheels=of_cuda),
                WheelList(component=component, path=f"{folder}/wheels-{component}.txt", is_cuda=False, wheels=others),
            ]
            lists[component] = [item for wheel_list in both for item in _by_index(self._matrix, wheel_list)]
        cuda = WheelList(component=CUDA, path=f"{folder}/cuda.txt", is_cuda=True, wheels=tuple(shared.values()))
        return _Group(
            constraints=_constraints(lock, locked),
            cuda=tuple(_by_index(self._matrix, cuda)),
            lists=lists,
            layers=layer_order.lowest_layers(cell, foundation, locked.wheels, compiler, self._prefetch),
        )


def _by_index(matrix: Matrix, whole: WheelList) -> Iterator[WheelList]:
    """A list for each index of its wheels: an installer gets one index, and so takes no package from another one."""
    stem = whole.path.removesuffix(".txt")
    for index in sorted({wheel.index for wheel in whole.wheels}):
        path = stem + (f"-at-{index}" if index else "") + ".txt"
        wheels = tuple(wheel for wheel in whole.wheels if wheel.index == index)
        folder = matrix.folder_of(index) if index else ""
        yield replace(whole, path=path, wheels=wheels, index=index, folder=folder)


def _constraints(lock: Lock, locked: CellLock) -> str:
    """The constraints file that keeps pip and uv from replacing the framework and its CUDA. The same for a group.

    All CUDA wheels are held, although TensorFlow and JAX require ranges of versions: without this,
    `uv pip install torch==2.7.1` replaces cuDNN 9.10 by 9.5 in an image of JAX, which requires 9.8. The other
    packages of CUDA are limited: vLLM on PyTorch 2.14 (CUDA 13.0) got nvcc 13.5. Their lines do not begin with `==`,
    because uv-sync installs no package whose line does.
    """
    wheels = sorted((wheel.name, wheel.version, wheel.component) for wheel in locked.wheels)
    held = {name: version for name, version, component in wheels if component == CUDA or name in lock.held}
    lines = [f"{name}=={version},{_OVERRIDE_HINT}" for name, version in held.items()]
    lines += [f"{name}{_OVERRIDE_HINT},{pin}" for name, pin in lock.toolkit.items() if name not in held]
    lines += lock.basis.constraints
    return _CONSTRAINTS + "".join(f"{constraint}\n" for constraint in lines)
