"""The layers that the store records by their inputs. Makes layers of wheels, operating systems and plain files."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from builder.common.errors import BuildError, DamagedError, FetchError, VerifyError
from builder.common.files import files_below
from builder.common.text import listed
from builder.layers import estargz, known_layers, splice, wheel
from builder.layers.estargz import CHUNK, TocEntry
from builder.layers.oci import Layer
from builder.layers.splice import Entry, SpliceError
from builder.layers.store import REPAIR, Store
from builder.layers.wheel import OverlapError, WheelError
from builder.matrix.project import Project
from builder.plan import settings
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import PlannedImage

_LAYER = TypeAdapter(Layer)
_INCOMPATIBLE = "Two of their wheels are incompatible: pin other versions in matrix.yaml."


def stored_layer(store: Store, inputs: str, known: Layer | None = None) -> Layer | None:
    """The layer that the store has for these inputs; None if its record is invalid, or if it is not the `known` one."""
    if (record := store.get_record(inputs)) is None:
        return None
    try:
        stored = _LAYER.validate_json(json.dumps(record))
    except ValidationError:  # an older builder wrote it
        return None
    return stored if stored.as_record().keys() == record.keys() and known in (None, stored) else None


def store_layer(
    store: Store,
    planned: PlannedLayer,
    entries: Iterable[Entry],
    known: Layer | None = None,
    facts: Mapping[str, Any] = {},
) -> Layer:
    """Stores a layer of these entries, and its record. Raises BuildError if it is not the `known` one.

    With a known layer of wheels, nothing is inflated: its digest is compared. `facts` are those of an operating system,
    whose files are not compressed yet.
    """
    with store.new_blob() as blob:
        diff_id = known.diff_id if known and not facts else ""
        layer = replace(splice.write_layer(entries, blob.file, diff_id=diff_id), **facts)
        if known:
            known_layers.check_layer(planned.name, planned.inputs, known, layer)
        blob.stored_as = layer.digest
    store.put_record(planned.inputs, layer.as_record())
    return layer


def store_wheels(store: Store, planned: PlannedLayer, paths: Sequence[Path], known: Layer | None = None) -> Layer:
    """Stores a layer of wheels; `paths` are in the order of the layer's wheels.

    Warns of wheels with different files for one path. Raises BuildError if these are not allowed, or if it is not the
    `known` layer; FetchError, DiskError, FileNotFoundError.
    """
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(path.open("rb", buffering=CHUNK)) for path in paths]
            names = [file.file for file in planned.wheels]
            wheels = zip(names, opened, strict=True)
            entries = wheel.layer_entries(wheels, planned.python, may_overlap=planned.may_overlap)
            return store_layer(store, planned, splice.prefetched_first(entries, planned.prefetch), known)
    except OverlapError as error:
        raise BuildError(f"{planned.name}: {error}", hint=_INCOMPATIBLE) from error
    except (WheelError, SpliceError) as error:
        raise FetchError(str(error), hint="The wheel itself is invalid: pin another version.") from error


def store_system(store: Store, planned: PlannedLayer, tar: Path, known: Layer | None = None) -> Layer:
    """Stores the `os` layer of the file system in a tar. Raises as `store_layer`; tarfile.TarError, OSError."""
    with tarfile.open(tar) as source:
        entries, facts = read_system(source, planned.prefetch)
        return store_layer(store, planned, entries, known, facts)


def read_system(source: tarfile.TarFile, prefetch: Collection[str] = ()) -> tuple[Iterator[Entry], dict[str, Any]]:
    """The entries of an `os` layer, the same for the same files, and the fields that `Layer` has for it alone.

    Files have the times in their packages, at most the time of the newest package: the times of files written during
    the build would differ from one build to the next. `prefetch` are the paths that come first, see
    `estargz.prefetch_order`.
    """
    files = {name: info for info in source if (name := _plain(info.name))}
    newest = _newest(source, files)
    attributes = {name: (info.mode & 0o7777, info.uid, info.gid) for name, info in files.items() if info.isdir()}
    facts = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newest)),
        "taken": tuple(sorted(path for path, info in files.items() if path.startswith("opt/") and not info.isdir())),
        "folders": tuple(sorted(path for path, values in attributes.items() if values != (0o755, 0, 0))),
    }
    return _system_entries(source, files, newest, prefetch), facts


def _system_entries(
    source: tarfile.TarFile, files: Mapping[str, tarfile.TarInfo], newest: int, prefetch: Collection[str]
) -> Iterator[Entry]:
    # Links last: a hard link needs its target before it.
    links = sorted(name for name, info in files.items() if info.islnk())
    for name in [*estargz.prefetch_order(sorted(files.keys() - set(links)), prefetch), *links]:
        if name not in files:
            yield splice.PREFETCH
            continue
        info, header = files[name], tarfile.TarInfo(name)
        header.type = tarfile.REGTYPE if info.isreg() else info.type
        header.mode, header.uid, header.gid = info.mode & 0o7777, info.uid, info.gid
        # Folders have the time of the build; dpkg keeps a link to a folder that another version of the package made.
        header.mtime = newest if info.isdir() or info.issym() else min(int(info.mtime), newest)
        xattrs = {key: value for key, value in info.pax_headers.items() if key.startswith("SCHILY.xattr.")}
        header.pax_headers = xattrs
        header.devmajor, header.devminor = info.devmajor, info.devminor
        header.size = info.size if info.isreg() else 0
        header.linkname = _plain(info.linkname) if info.islnk() else info.linkname
        content = source.extractfile(info) if info.isreg() else None
        yield Entry(path=name, mode=header.mode, header=header, content=content.read() if content else None)


def _plain(name: str) -> str:
    """A path without a slash at either end; empty for the root."""
    return "" if name == "." else name.removeprefix("./").strip("/")


def _newest(source: tarfile.TarFile, files: Mapping[str, tarfile.TarInfo]) -> int:
    """Time of the newest file of a Debian package. Files in /etc are left out: the build may have edited them."""
    times = [0]
    for path, info in files.items():
        if path.startswith("var/lib/dpkg/info/") and path.endswith(".list") and (content := source.extractfile(info)):
            for line in content.read().decode("utf-8", "replace").splitlines():
                owned = files.get(line.strip("/"))
                if owned and owned.isreg() and not line.startswith("/etc/"):
                    times.append(int(owned.mtime))
    return max(times)


def read_stored_toc(store: Store, layer: Layer) -> tuple[TocEntry, ...]:
    """The files of a layer in the store. Raises DamagedError."""
    try:
        with store.path(layer.digest).open("rb") as blob:
            return estargz.read_toc(blob)
    except FileNotFoundError:
        raise DamagedError(
            f"layer {layer.digest} disappeared from the store during the build",
            hint="Run the same command again to rebuild it.",
            blob=layer.digest,
        ) from None
    except VerifyError as error:
        raise DamagedError(f"{store.path(layer.digest)}: {error}", hint=REPAIR, blob=layer.digest) from error


def check_paths(
    image_id: str, layers: Iterable[tuple[PlannedLayer, Iterable[TocEntry]]], taken: Collection[str]
) -> list[str]:
    """Compares the paths of layers with their files, lowest layer first; returns warnings.

    Of different files for one path, that of the higher layer is used. Raises BuildError if that is not allowed: see
    `PlannedLayer.may_overlap`. `taken` are paths of the operating system in folders that wheels use. Wheels of one
    namespace may share a file.
    """
    files: dict[str, tuple[PlannedLayer, tuple[object, ...]]] = {}
    overlaps: dict[tuple[str, str], list[str]] = {}
    for layer, entries in layers:
        for entry in entries:
            path, file = entry.name, (entry.mode, entry.size, entry.digest, entry.link)
            if entry.type in ("dir", "chunk") or path in estargz.RESERVED:
                continue
            if path in taken:
                raise BuildError(f"{image_id}: /{path} is in the os layer and in {layer.name}")
            # An equal file keeps its lower owner: a third layer must not replace it if that is the framework's.
            lower, first = files.setdefault(path, (layer, file))
            if first != file:
                if not (lower.may_overlap and layer.may_overlap):
                    message = f"{image_id}: {lower.name} and {layer.name} have different files for /{path}"
                    raise BuildError(message, hint=_INCOMPATIBLE)
                overlaps.setdefault((lower.name, layer.name), []).append(f"/{path}")
                files[path] = layer, file
    # A path that is a folder in one layer and a file in another: the higher one would replace all that is below it.
    names = {path: layer.name for path, (layer, _) in files.items()} | dict.fromkeys(taken, "the os layer")
    folders: dict[str, str] = {}
    for path, name in names.items():
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:  # if a folder is in `folders`, those above it are, too
            folders[folder] = name
            folder = folder.rpartition("/")[0]
    for path in sorted(folders.keys() & names.keys()):
        raise BuildError(f"{image_id}: /{path} is a folder in {folders[path]} and something else in {names[path]}")
    return [
        f"{image_id}: {lower} and {higher} have different files for {listed(paths, 3)}; those of {higher} are used"
        for (lower, higher), paths in overlaps.items()
    ]


# ---- plain files of an image's components


def read_component_files(project: Project, image: PlannedImage) -> dict[str, Entry]:
    """The files by path. A file of a later component overrides one of an earlier component."""
    files: dict[str, Entry] = {}
    for component in image.file_components:
        top = project.path(f"templates/{component}/files")
        for source in files_below(top):
            path = source.relative_to(top).as_posix()
            if source.is_symlink():
                files[path] = Entry(path=path, mode=0o777, link=str(source.readlink()))
                continue
            mode = wheel.PROGRAM_MODE if source.stat().st_mode & 0o100 else wheel.FILE_MODE
            files[path] = Entry(path=path, mode=mode, content=source.read_bytes())
    for path in files:
        if above := next((str(parent) for parent in PurePosixPath(path).parents if str(parent) in files), None):
            raise BuildError(f"templates/ has a file for /{path}, but /{above} is a link or file of another component")
    constraints = settings.CONSTRAINTS.lstrip("/")
    files[constraints] = Entry(path=constraints, mode=wheel.FILE_MODE, content=image.constraints.encode())
    return files


def component_file_entries(files: Mapping[str, Entry], folders: tuple[str, ...]) -> Iterator[Entry]:
    """The entries of plain files, sorted by path, so that a folder is before its contents.

    Every file is prefetched: there are few, and a start reads half of them. `folders` are the folders of the operating
    system that are not 0755 root:root. Raises BuildError for a file in such a folder, because the layer would make the
    folder 0755 root:root. Only folders of the environment keep their own mode.
    """
    seen: set[str] = set()
    for path in sorted(files):
        for entry in wheel.new_folders(path, seen):
            if entry.path in folders and entry.mode == wheel.FOLDER_MODE:
                raise BuildError(
                    f"templates/ has a file for /{path}, but folder /{entry.path} of the system is not 0755 root:root"
                )
            yield entry
        yield files[path]
    yield splice.PREFETCH
