"""The layer of Debian packages that `add` puts on an image.

mmdebstrap unpacks the operating system of the image, and apt installs the locked packages in it, without the network:
on this machine or in a container, as for a whole operating system. What has changed is the layer.
"""

from __future__ import annotations

import time
from pathlib import Path

from builder.build.context import RunContext
from builder.build.operating_systems import Mmdebstrap
from builder.common.console import Meter
from builder.common.files import digest_of_data
from builder.debian import apt
from builder.debian.archives import Archives, DebianFetcher
from builder.debian.os_lock import OsLock, OsRequest
from builder.layers import os_layer, stored_layers
from builder.layers.installed import DPKG
from builder.layers.oci import Layer
from builder.layers.store import BLOBS, Store
from builder.plan.layer_order import LAYER_FORMAT, MTIME, PlannedLayer
from builder.plan.plan import STEPS
from builder.registry import transfer
from builder.release.image_sources import RegistrySource
from builder.release.parent import Parent

_SCRIPTS = {"mmdebstrap.sh": "templates/add-packages.sh", "clean.sh": f"{STEPS}/clean.sh"}


def resolve_packages(run: RunContext, parent: Parent, packages: tuple[str, ...]) -> OsLock:
    """The newest packages that apt would install in an image. Raises LockError, also if it would replace one."""
    request = OsRequest(debian=parent.debian_release, packages=packages, arch=parent.arch)
    status = parent.read_file(DPKG).decode("utf-8", "replace")
    with apt.archive(request.debian, run.host, run.view.say, request.arch, status) as archive:
        return archive.resolve(request, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()))


def make_layer(
    run: RunContext, store: Store, parent: Parent, lock: OsLock, mmdebstrap: Mmdebstrap | None = None
) -> tuple[PlannedLayer, Layer]:
    """The layer of locked packages, from the store or made now. The same image and lock give the same bytes.

    Raises BuildError, FetchError.
    """
    steps = {place: run.project.path(name).read_bytes() for place, name in _SCRIPTS.items()}
    inputs = digest_of_data(
        {
            "format": LAYER_FORMAT,
            "below": list(parent.systems),
            "steps": {name: content.decode() for name, content in steps.items()},
            "packages": [[package.file, package.sha256] for package in lock.packages],
        }
    )
    planned = PlannedLayer(kind="apt", name=" ".join(lock.requested), component="apt", inputs=inputs)
    if stored := stored_layers.stored_layer(store, inputs):
        return planned, stored

    row = f"apt-{parent.arch}"
    run.view.begin(row, "downloading packages")
    if isinstance(parent.source, RegistrySource):
        layers = [layer.descriptor for layer in parent.systems.values()]
        transfer.fetch_blobs(parent.source.repository, store, layers, Meter(run.view, row, "downloaded", 0).add)
    debs = DebianFetcher(
        Archives(run.project.matrix, run.host, run.view.say_once),
        lock,
        "",
        store.root / BLOBS,
        store.downloads,
        progress=Meter(run.view, row, "downloaded", sum(package.size for package in lock.packages)).add,
    ).fetch_all()

    run.view.begin(row, "installing packages")
    files = {f"steps/{name}": content for name, content in steps.items()}
    for number, digest in enumerate(parent.systems):
        files[f"layers/{number:03}.tar.gz"] = store.path(digest).read_bytes()
    below = {path: entry for path, (layer, entry) in parent.files.items() if layer.digest in parent.systems}
    with run.project.scratch() as scratch, store.new_blob() as blob:
        arguments = [lock.debian, str(MTIME), ",".join(lock.requested)]
        tar = (mmdebstrap or Mmdebstrap(run)).run(
            run.host, row, arguments, files, Path(scratch), debs=(lock, debs), arch=parent.arch
        )
        made = os_layer.write_system(tar, blob.file, below=below)
        blob.digest = made.digest
    store.put_record(inputs, made.as_record())
    run.view.end(row, "done", "")
    return planned, made
