"""An image with additions: chooses wheels as `uv pip install` in the parent would, and makes layers of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from packaging.version import Version

from builder.common.errors import BuildError, LockError, RefusedError, UsageError
from builder.common.files import digest_of_bytes, digest_of_data, short_digest
from builder.common.tasks import thread_pool
from builder.common.text import listed, size
from builder.engine.run import Run
from builder.evidence.results import Evidence
from builder.index.download import CONNECTIONS, Fetcher
from builder.index.releases import applies
from builder.index.settings import IndexSettings, has_credentials
from builder.index.wheels import LockedWheel, Wheel, is_cuda_wheel
from builder.layers import oci, stored_images, stored_layers, wheel
from builder.layers.oci import Image, Layer
from builder.layers.splice import Entry
from builder.lock import checks, uv
from builder.lock.uv import ListedWheels, Target, Uv
from builder.matrix import facts
from builder.matrix.tags import CUDA_LABEL
from builder.plan import layer_order
from builder.plan.layer_order import LAYER_FORMAT, PlannedLayer
from builder.registry.transfer import Sent
from builder.release.additions import Addition, Requested, check_hashes
from builder.release.parent import WHITEOUT, Parent, hidden_paths, without

CONFLICT = (
    "Choose versions that fit, or another parent: its framework and CUDA stay as they are, and with --keep all "
    "of its packages. If the index lacks a package, name an index that has it with --index. A Dockerfile with FROM can "
    "replace anything."
)
SHOWN = 8  # packages in a line
YEAR = timedelta(days=365)
_DEPENDS = re.compile(
    r"(?:all versions of )?([A-Za-z0-9._-]+)\S* depends? on ([A-Za-z0-9._-]+)(?:\[\S*\])?([<>=!~]\S*|)"
)
ADDED = "added"  # the component and the layer of small wheels
REPLACED = "replaced packages"  # the layer that hides them


@dataclass(kw_only=True)
class AddedImage:
    """An image with additions, for one architecture. Its tests set `evidence`, and its push sets `sent`."""

    addition: Addition
    parent: Parent
    wheels: Sequence[LockedWheel]
    image: Image
    evidence: Evidence | None = None
    sent: Sent | None = None


def with_indexes(settings: IndexSettings, additions: Sequence[Addition]) -> IndexSettings:
    """The settings with the indexes of the additions. Raises UsageError for an index that does not exist."""
    for place in dict.fromkeys(addition.request.index for addition in additions):
        if (name := _index_name(settings, place)) in ("", *settings.named):
            continue
        is_address = re.match("https?://", place)
        is_secret = has_credentials(place) or re.search("://.*[?#]", place)
        if is_secret or not (is_address or Path(place).is_dir()):
            raise UsageError(
                "the address of the index has a login, a query or a fragment" if is_secret else f"no index {place!r}",
                hint="Use an address alone, the path of a folder of wheels from here, or a name in matrix.yaml: "
                f"{', '.join(settings.named) or 'there is none here'}.",
            )
        folder = None if is_address else Path(place).resolve()
        settings = settings.with_index(name, place if is_address else "", folder)
    return settings


def _index_name(settings: IndexSettings, place: str) -> str:
    """The name of an index in the settings: of matrix.yaml, or one that it cannot have. Empty for the default index."""
    is_named = not place or place in settings.named
    return place if is_named else f"added-{short_digest(digest_of_bytes(place.encode()))}"


def choose_wheels(
    program: Uv, settings: IndexSettings, parent: Parent, addition: Addition
) -> tuple[list[LockedWheel], list[str]]:
    """Resolves the requested packages as `uv pip install`, then makes sure that all packages of the parent fit.

    Returns the wheels that are new or replace one of the parent, and a line about each requested package. `settings`
    are those of `with_indexes`. Raises LockError, and RefusedError for what does not fit the parent.
    """
    requested = [
        package for package in addition.request.requirements if applies(package.requirement, parent.python, parent.arch)
    ]
    if not requested:
        return [], []
    target = _target(program, _index_name(settings, addition.request.index), parent, addition, requested)

    # The requested packages come first: they get the newest versions that the held packages allow.
    images = [image for image in (addition.earlier.get(parent.arch), parent) if image]
    present = [(wheel.name, wheel.version) for image in images for wheel in image.packages.values()]
    packages, constraints = [str(package.requirement) for package in requested], parent.constraints
    versions = program.versions(target, packages, constraints, dict(present))
    chosen = {package.name: versions[package.name] for package in requested if package.name in versions}
    lines = []
    for package in requested:
        if version := chosen.get(package.name):
            is_new = (package.name, version) not in present
            lines.append(_describe(program, target, parent, package, version, is_new=is_new))
    try:
        listing = _wheels(program, target, parent, versions)
    except LockError:
        # A package of the parent does not fit the new versions: it may move too. Requested packages stay.
        pins = uv.pinned(chosen)
        versions = program.versions(target, [*packages, *parent.packages], [*constraints, *pins], dict(present))
        listing = _wheels(program, target, parent, versions)

    before = {wheel.sha256 for wheel in parent.packages.values()}
    new = {name: entry for name, entry in listing.items() if entry[0].sha256 not in before}
    unknown = {name: entry for name, entry in new.items() if not entry[0].size}
    sizes = program.sizes(target, unknown) if unknown else {}
    wheels = {name: replace(wheel, size=sizes.get(name, wheel.size)) for name, (wheel, _) in sorted(new.items())}
    hashed = {
        package.name: listing[package.name][0] for package in requested if package.hashes and package.name in listing
    }
    check_hashes(requested, hashed | wheels)
    check_cuda(addition, parent, wheels)
    return list(wheels.values()), lines


def _target(program: Uv, index: str, parent: Parent, addition: Addition, requested: Sequence[Requested]) -> Target:
    """The parent as uv sees it: its packages, those that stay, and the packages that come from the requested index."""
    held = parent.held(keep=addition.request.keep)
    names = sorted({package.name for package in requested})
    files = {name: program.catalogue.files(name, index) for name in names} if index else {}
    indexes = {name: index for name, offered in files.items() if offered}
    if index and not indexes:
        raise UsageError(f"{addition.target}: {addition.request.index} has none of {listed(names, SHOWN)}")
    for name in sorted(indexes.keys() & held):
        wheel = parent.packages[name]
        hashes = {file.filename: file.digests.get("sha256") for file in files[name]}
        if hashes.get(wheel.file, wheel.sha256) != wheel.sha256:
            raise RefusedError(
                f"{addition.target}: another {wheel.file} is requested than the parent has", hint=CONFLICT
            )
    # Of a package that is requested from an index, the wheel of the parent is no candidate, unless it is held.
    installed = {name: wheel for name, wheel in parent.installed.items() if name in held or name not in indexes}
    return Target(
        name=str(addition.target),
        python=parent.python,
        arch=parent.arch,
        glibc=parent.glibc,
        indexes=indexes,
        installed=installed,
        held=held,
        conflict=CONFLICT,
    )


def _wheels(program: Uv, target: Target, parent: Parent, versions: Mapping[str, str]) -> ListedWheels:
    """The wheels of these versions. Raises LockError if the rest of the parent does not fit those that move."""
    moved = {
        name
        for name, wheel in parent.packages.items()
        if name not in target.installed or versions.get(name, wheel.version) != wheel.version
    }
    others = [name for name in parent.packages if moved and name not in versions]
    target = replace(target, held=parent.packages.keys() - moved)
    return program.wheels(target, [*uv.pinned(versions), *others], [])


def _describe(program: Uv, target: Target, parent: Parent, requested: Requested, version: str, *, is_new: bool) -> str:
    """A line about a requested package: its version and day, the newest version, and which requirement excludes it.

    Raises RefusedError for a new version that is a year older than the newest one, unless the request has a limit.
    """
    listing = program.catalogue.package(requested.name, target.indexes.get(requested.name, ""))
    release, newest = listing.release(Version(version)), listing.newest
    notes = [str(release.day)] if release and release.day else []
    line, specifier = f"{requested.name} {version}", requested.requirement.specifier
    if is_new and newest and newest.version > Version(version):
        notes.append(f"the newest is {newest.version}")
        if specifier.contains(newest.version):
            pin = f"{requested.name}=={newest.version}"
            try:
                program.versions(target, [pin], parent.constraints, {})
            except LockError as error:
                notes[-1] = f"the newest, {newest.version}, {_reason(str(error), requested.name)}"
        is_old = release and release.day and newest.day and newest.day - release.day > YEAR
        if is_old and all(clause.operator in (">", ">=", "!=") for clause in specifier):
            raise RefusedError(
                f"{target.name}: {line} is more than a year older than the newest one ({'; '.join(notes)})",
                hint="Choose a parent that the newest fits. If it has no wheel, build one (docs/matrix.md), and give "
                f"its folder with --index. To have this one: {line.replace(' ', '==')}",
            )
    return f"{line} ({'; '.join(notes)})" if notes else line


def _reason(error: str, package: str) -> str:
    """What uv names first for a version that does not fit, such as `needs torch 2.14.0`."""
    if not (match := _DEPENDS.search(" ".join(error.split()))):
        return "has no wheel that fits" if "usable wheels" in error else "does not fit"
    needs = f"needs {match[2]} {match[3].removeprefix('==')}".rstrip(" ,")
    return needs if match[1] == package else f"does not fit: {match[1]} {needs}"


def check_cuda(addition: Addition, parent: Parent, wheels: Mapping[str, LockedWheel]) -> None:
    """Raises RefusedError for CUDA libraries that do not fit the CUDA of the parent, and for known conflicts."""
    label = re.match(r"[0-9]+", parent.image.labels.get(CUDA_LABEL, ""))
    expected = int(label[0]) if label else 0  # the CPU
    new = [wheel for wheel in wheels.values() if is_cuda_wheel(wheel.file)]
    others = sorted({name for major, name in checks.cuda_majors(new, expected).items() if major != expected})
    unfit = others if expected else [wheel.name for wheel in new]
    if unfit:
        fits = f"CUDA {expected}" if expected else "the CPU"
        raise RefusedError(
            f"{addition.target}: not for {fits}, as the parent is: {listed(unfit, SHOWN)}",
            hint=f"Find the package that requires it, or choose a parent that fits. {CONFLICT}",
        )
    before = {name: package.version for name, package in parent.packages.items()}
    after = before | {name: wheel.version for name, wheel in wheels.items()}
    known = facts.load_facts()
    if conflicts := [conflict for conflict in known.violations(after) if conflict not in known.violations(before)]:
        raise RefusedError(f"{addition.target}: {'; '.join(conflicts)}", hint=CONFLICT)


def make_image(
    run: Run, fetcher: Fetcher[LockedWheel], addition: Addition, parent: Parent, wheels: Sequence[LockedWheel]
) -> AddedImage:
    """Makes the image in the store: the same request, wheels and parent give the same bytes.

    Raises BuildError, FetchError, RefusedError, VerifyError.
    """
    # Layers by the rule of all images. The store may have them from an earlier run.
    layers = make_layers(run, fetcher, parent, wheels)
    if (count := len(parent.image.layers) + len(layers)) > layer_order.MOST:
        raise BuildError(f"{addition.target} would have {count} layers; the limit is {layer_order.MOST}")

    # Nothing else may replace a file of the parent, such as one of the framework or the launcher.
    tocs = [(planned, stored_layers.read_stored_toc(run.store, layer)) for planned, layer in layers]
    hidden = {path for _, toc in tocs for path in hidden_paths(toc)}
    files = [entry for _, entry in without(parent.files, hidden).values()]
    lowest = PlannedLayer(kind="files", name="the parent", component="", inputs=parent.image.manifest.digest)
    of_wheels = [(planned, toc) for planned, toc in tocs if planned.wheels]
    try:
        for warning in stored_layers.check_paths(str(addition.target), [(lowest, files), *of_wheels], ()):
            run.view.say(warning)
    except BuildError as error:
        raise RefusedError(str(error), hint=CONFLICT) from error

    added, history = [layer for _, layer in layers], [oci.history_line(planned) for planned, _ in layers]
    labels = addition.labels(parent)
    config = oci.derived_config(parent.config, added, history, env=addition.request.env, labels=labels)
    image = stored_images.put_image(
        run.store, config, [*parent.image.layers, *added], history=[*parent.image.history, *history], labels=labels
    )
    added_bytes = sum(layer.size for layer in added)
    run.view.say(f"layers   {len(added)} new ({size(added_bytes)}), {len(parent.image.layers)} of the parent (0 B)")
    return AddedImage(addition=addition, parent=parent, wheels=wheels, image=image)


def make_layers(
    run: Run, fetcher: Fetcher[LockedWheel], parent: Parent, wheels: Sequence[LockedWheel]
) -> list[tuple[PlannedLayer, Layer]]:
    """The layers of wheels, from the store or made now, above a layer that hides the packages that they replace.

    Wheels are downloaded several at a time. Raises FetchError, VerifyError.
    """
    planned = layer_order.wheel_layers(
        [Wheel(**vars(wheel), component=ADDED) for wheel in wheels], parent.python, cuda_name=ADDED, name=ADDED
    )
    stored = {
        planned_layer.inputs: stored_layers.stored_layer(run.store, planned_layer.inputs) for planned_layer in planned
    }
    missing = [planned_layer for planned_layer in planned if not stored[planned_layer.inputs]]
    largest_first = sorted(
        (wheel for planned_layer in missing for wheel in planned_layer.wheels), key=lambda wheel: -wheel.size
    )
    with thread_pool(CONNECTIONS, "fetch") as pool:
        downloads = {wheel.sha256: pool.submit(fetcher.fetch, wheel) for wheel in largest_first}
        try:
            for planned_layer in missing:
                paths = [downloads[wheel.sha256].result() for wheel in planned_layer.wheels]
                stored[planned_layer.inputs] = stored_layers.store_wheels(run.store, planned_layer, paths)
        except BaseException:
            fetcher.stop()
            raise
    for fetched in largest_first:
        fetcher.drop(fetched)
    if hidden := parent.own_paths([wheel.name for wheel in wheels if wheel.name in parent.packages]):
        lowest = PlannedLayer(
            kind="files", name=REPLACED, component=ADDED, inputs=digest_of_data([LAYER_FORMAT, sorted(hidden)])
        )
        whiteouts = (f"{folder}/{WHITEOUT}{name}" for folder, _, name in (path.rpartition("/") for path in hidden))
        files = {path: Entry(path=path, mode=wheel.FILE_MODE, content=b"") for path in whiteouts}
        planned.insert(0, lowest)
        stored[lowest.inputs] = stored_layers.store_layer(
            run.store, lowest, stored_layers.component_file_entries(files, ())
        )
    return [(planned_layer, layer) for planned_layer in planned if (layer := stored[planned_layer.inputs])]
